"""Another user of the machine against the daemon's socket: as a client, as the server, and from the network."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_runtime.membership.environment import Environment
from kfp_gpuquota.cluster.connect import connect
from kfp_gpuquota.cluster.local.start import await_stop
from kfp_gpuquota.errors import UnauthorizedError, UsageError
from kfp_gpuquota.server.client import Client
from kfp_gpuquota.server.transport.unix_sockets import UnixConnection, listen
from tests.conftest import running_cluster
from tests.security.other_user import as_root, open_to_everybody, run, start

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from tests.conftest import EmbeddedCluster

SQUATTER = """
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("listening", flush=True)
connected, _ = server.accept()
received = connected.recv(1 << 16)
print(f"received {received!r}", flush=True)
"""

INTRUDER = """
connected = socket.socket(socket.AF_UNIX)
try:
    connected.connect(sys.argv[1])
    head = f"GET /v1/health HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {sys.argv[2]}\\r\\n\\r\\n"
    connected.sendall(head.encode())
    print("answered", connected.recv(100))
except OSError as error:
    print("refused", error)
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory that every user may write to."""
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o777)
    open_to_everybody(directory)
    return directory


@contextlib.contextmanager
def squatter(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another user's server at the path."""
    with start(SQUATTER, path) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "listening\n"
        yield program
        program.kill()


@as_root
def test_a_client_sends_nothing_to_another_users_server(shared: Path) -> None:
    path = shared / "socket"
    with squatter(path) as program:
        with pytest.raises(UnauthorizedError, match="is served by user 65534, not by user 0, so nothing was sent"):
            Client(lambda: (path, "secret")).health()
        assert program.stdout is not None
        assert program.stdout.readline() == "received b''\n"


@as_root
def test_a_worker_neither_sends_its_token_to_another_users_coordinator_nor_reads_its_orders(shared: Path) -> None:
    path = shared / "socket"
    connection, request = Environment(worker_id="w0", coordinator=f"unix://{path}:/v1/membership/job").connect(10.0)
    assert request == "/v1/membership/job"
    with squatter(path) as program:
        with pytest.raises(PermissionError, match="is served by user 65534, not by user 0"):
            connection.request("POST", request, headers={"Authorization": "Bearer secret"})
        assert program.stdout is not None
        assert program.stdout.readline() == "received b''\n"


@as_root
def test_another_user_cannot_reach_the_daemon(embedded_cluster: EmbeddedCluster) -> None:
    home = embedded_cluster.home
    open_to_everybody(home.root)
    assert run(INTRUDER, home.socket_file, "x").startswith("refused [Errno 13]")


@as_root
def test_another_user_who_reaches_the_socket_and_has_the_token_gets_no_answer(
    embedded_cluster: EmbeddedCluster,
) -> None:
    home = embedded_cluster.home
    open_to_everybody(home.socket_file)
    home.socket_file.chmod(0o777)
    output = run(INTRUDER, home.socket_file, home.token_file.read_text())
    assert output.startswith(("refused", "answered b''"))
    assert "a connection of user 65534" in home.log_file.read_text()


def test_the_daemon_listens_on_no_port(embedded_cluster: EmbeddedCluster) -> None:
    pid = embedded_cluster.client.health().pid
    links = (str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir())
    sockets = {found[1] for link in links if (found := re.match(r"socket:\[(\d+)]", link))}
    ports = [
        row.split() for name in ("tcp", "tcp6", "udp") for row in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    assert sockets
    assert not [row for row in ports if len(row) > 9 and row[9] in sockets]


def test_a_directory_with_a_path_longer_than_a_sockets_address_works(tmp_path: Path) -> None:
    root = tmp_path / ("long" * 40) / ("path" * 40)
    with running_cluster(root) as cluster:
        cluster.project("team-a", 1)
        cluster.submit("job", "true")
        cluster.wait_for_phase("job", "Succeeded")
        url = f"unix://{cluster.home.socket_file}"
        named = connect({"GPUQUOTA_URL": url, "GPUQUOTA_TOKEN_FILE": str(cluster.home.token_file)})
        assert named.get_job("team-a", "job").spec.name == "job"


def test_a_daemon_that_starts_again_takes_the_place_of_the_dead_ones_socket(embedded_cluster: EmbeddedCluster) -> None:
    before = embedded_cluster.home.socket_file.stat().st_ino
    embedded_cluster.kill_daemon()
    assert embedded_cluster.home.socket_file.exists()
    assert embedded_cluster.client.health().pid
    assert embedded_cluster.home.socket_file.stat().st_ino != before


def test_a_stopped_cluster_leaves_nothing_that_a_client_would_trust(embedded_cluster: EmbeddedCluster) -> None:
    embedded_cluster.client.stop_cluster()
    await_stop(embedded_cluster.home)
    with pytest.raises(OSError, match=r"refused|No such file"):
        UnixConnection(embedded_cluster.home.socket_file, 1.0).connect()


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080", "https://cluster.example", "unix://relative/socket"])
def test_a_token_is_never_sent_to_an_address_of_the_network(url: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    with pytest.raises(UsageError, match="it must be unix:///PATH/OF/SOCKET"):
        connect({"GPUQUOTA_URL": url, "GPUQUOTA_TOKEN_FILE": str(tmp_path / "token")})


def test_a_socket_is_private_to_its_user(tmp_path: Path) -> None:
    with listen(tmp_path / "socket"):
        assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600
