"""Files to and from workers in other pods: complete, in parts, and not readable by others."""

from __future__ import annotations

import http.client
import json
import os
import resource
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.certificates import issue, new_authority
from kfp_gpuquota.dsl.launcher import relay as relay_module
from kfp_gpuquota.dsl.launcher.relay import Relay
from kfp_gpuquota.dsl.launcher.staging import Staging
from kfp_gpuquota.dsl.spec.pod_template import BOOTSTRAP
from kfp_gpuquota.dsl.worker import remote
from kfp_gpuquota.dsl.worker import start as worker_module
from kfp_gpuquota.dsl.worker.remote import RelayClient, RelayError
from kfp_gpuquota.server.transport.tls import load_pair
from tests.polling import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Step:
    """A step with one input artifact (a directory) and one output, in a launcher's pod at `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "in" / "data" / "deep").mkdir(parents=True)
        (root / "in" / "data" / "deep" / "a.txt").write_text("hello")
        (root / "in" / "data" / "run.sh").write_text("#!/bin/sh\n")
        (root / "in" / "data" / "run.sh").chmod(0o755)
        (root / "secret").write_text("not yours")
        self.executor_input: dict[str, Any] = {
            "inputs": {"artifacts": {"data": {"artifacts": [{"name": "data", "uri": str(root / "in" / "data")}]}}},
            "outputs": {
                "outputFile": str(root / "out" / "executor_output.json"),
                "artifacts": {"model": {"artifacts": [{"name": "model", "uri": str(root / "out" / "model")}]}},
            },
        }
        self.staging = Staging(self.executor_input, "job-1")
        self.environment: dict[str, str] = {}
        self.relay: Relay | None = None
        self.mount = root / "mount"
        self.completed: Callable[[str], None] = lambda _worker: None

    def serve(self, *argv: str) -> Relay:
        self.staging.create(list(argv), self.environment)
        return self.restart()

    def restart(self) -> Relay:
        """A launcher that was made anew: another port, the same token; the mounted Secret follows."""
        token = ""
        if self.relay:
            token = self.relay.token
            self.relay.close()
        self.relay = Relay(self.executor_input, self.staging, "127.0.0.1", token, self.completed)
        self.mount.mkdir(exist_ok=True)
        (self.mount / "url").write_text(self.relay.url)
        (self.mount / "token").write_text(self.relay.token)
        (self.mount / "ca.crt").write_text(self.relay.authority)
        return self.relay

    def ask(self, method: str, path: str, token: str = "", body: bytes | None = None) -> tuple[int, bytes]:
        assert self.relay
        connection = http.client.HTTPSConnection(host_of(self.relay), timeout=10, context=trusting(self.relay))
        connection.request(method, path, body, {"Authorization": f"Bearer {token or self.relay.token}"})
        answer = connection.getresponse()
        return answer.status, answer.read()


def host_of(relay: Relay) -> str:
    return relay.url.removeprefix("https://")


def trusting(relay: Relay) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=relay.authority)


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Step]:
    made = Step(tmp_path)
    yield made
    if made.relay:
        made.relay.close()


def worker(step: Step, worker_id: str = "w0", **environment: str) -> subprocess.CompletedProcess[str]:
    """A worker as its pod starts it, in an image that has Python and nothing else of ours."""
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", BOOTSTRAP, str(step.mount)],
        cwd=step.root,
        env={"PATH": os.environ["PATH"], "GPUQUOTA_POD_NAME": worker_id, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_worker_runs_the_command_and_its_outputs_come_home(step: Step) -> None:
    model = step.root / "out" / "model"
    script = (
        "import sys, pathlib; out = pathlib.Path(sys.argv[1]); out.mkdir(parents=True, exist_ok=True); "
        f"source = pathlib.Path({str(step.root / 'in' / 'data')!r}, 'deep', 'a.txt'); "
        "out.joinpath('weights').write_text(source.read_text())"
    )
    step.serve(sys.executable, "-c", script, "{{gpuquota.outputs.artifacts['model'].path}}")
    done = worker(step)
    assert done.returncode == 0, done.stderr
    step.staging.publish_outputs("w0")
    assert (model / "weights").read_text() == "hello"


def test_a_launcher_learns_that_a_worker_has_sent_everything(step: Step) -> None:
    completed: list[str] = []
    step.completed = completed.append
    step.serve(sys.executable, "-c", "print('hello')")
    done = worker(step)
    assert completed == ["w0"]
    assert done.stdout.splitlines()[-1] == f"{remote.ENDED}0"


def test_a_worker_that_is_killed_in_the_middle_of_a_file_leaves_no_traceback_in_the_steps_log(
    step: Step, capfd: pytest.CaptureFixture[str]
) -> None:
    relay = step.serve("true")
    mine = worker_module.redirected(step.executor_input, f"{step.staging.tag}/w0")
    target = mine["outputs"]["artifacts"]["model"]["artifacts"][0]["uri"]
    host, port = host_of(relay).split(":")
    plain = socket.create_connection((host, int(port)))
    with trusting(relay).wrap_socket(plain, server_hostname=host) as connection:
        head = f"PUT /file?path={target} HTTP/1.1\r\nAuthorization: Bearer {relay.token}\r\nContent-Length: 1000000"
        connection.sendall(f"{head}\r\n\r\nabc".encode())
        until(lambda: list(Path(target).parent.glob("*.part")))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: not list(Path(target).parent.glob("*.part")))
    relay.close()
    assert capfd.readouterr().err == ""


def test_outputs_are_sent_again_to_a_launcher_that_was_made_anew_in_the_meantime(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    step.serve("true")
    monkeypatch.setenv("GPUQUOTA_POD_NAME", "w0")
    mine = worker_module.redirected(step.executor_input, f"{step.staging.tag}/w0")
    weights = Path(mine["outputs"]["artifacts"]["model"]["artifacts"][0]["uri"])
    weights.parent.mkdir(parents=True)
    weights.write_text("w")
    client, sent, complete = RelayClient(str(step.mount)), [], RelayClient.complete

    def counted(self: RelayClient, name: str, files: list[tuple[str, int]]) -> bool:
        """The first launcher exits before it could confirm, and its pod's files are lost."""
        sent.append(files)
        lost = [(f"{path}-of-another-pod", size) for path, size in files]
        return complete(self, name, lost if len(sent) == 1 else files)

    monkeypatch.setattr(RelayClient, "complete", counted)
    remote.send_outputs(client, mine)
    assert sent == [[(str(weights), 1)], [(str(weights), 1)]]


def test_an_output_that_came_in_pieces_is_not_complete(step: Step) -> None:
    step.serve("true")
    assert RelayClient(str(step.mount)).complete("w0", [(str(step.staging.root / "w0" / "gone"), 3)]) is False


def test_a_launcher_that_is_gone_is_noticed_soon_and_the_next_one_is_found(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "CONNECT_TIMEOUT_S", 0.2)
    step.serve("true")
    url = (step.mount / "url").read_text()
    (step.mount / "url").write_text("https://192.0.2.1:9")  # nothing answers there, and nothing refuses
    threading.Timer(0.5, lambda: (step.mount / "url").write_text(url)).start()
    assert json.loads(RelayClient(str(step.mount)).read("/step"))["argv"] == ["true"]


def test_an_input_arrives_whole_with_its_modes(step: Step) -> None:
    step.serve("true")
    data = step.root / "in" / "data"
    client = RelayClient(str(step.mount))
    listed = json.loads(client.read(f"/list?path={data}"))
    assert listed == [["deep/a.txt", 5, 0o644], ["run.sh", 10, 0o755]]
    copy = step.root / "copy.sh"
    client.download(str(data / "run.sh"), str(copy), 10, 0o755)
    assert copy.read_text() == "#!/bin/sh\n"
    assert copy.stat().st_mode & 0o777 == 0o755


def test_the_commands_exit_code_is_the_workers(step: Step) -> None:
    step.serve("sh", "-c", "exit 7")
    assert worker(step).returncode == 7
    step.serve("no-such-program")
    done = worker(step)
    assert done.returncode == 127
    assert "gpuquota: cannot run 'no-such-program': No such file or directory" in done.stderr


def test_an_image_without_elastic_runtime_gets_it(step: Step) -> None:
    step.serve(
        sys.executable, "-S", "-c", "import elastic_runtime.plan.batches; print(elastic_runtime.plan.batches.__file__)"
    )
    done = worker(step)
    assert ".zip/elastic_runtime" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/file?path={root}/secret", 404),
        ("GET", "/file?path={root}/in/data/../../secret", 404),
        ("GET", "/file?path=/etc/passwd", 404),
        ("GET", "/list?path={root}", 404),
        ("PUT", "/file?path={root}/secret", 403),
        ("PUT", "/file?path={root}/out/model", 403),
        ("PUT", "/file?path={root}/out/.gpuquota/job-1/../../model", 403),
        ("PUT", "/file?path={root}/out/.gpuquota/job-2/w0/model", 403),
        ("GET", "/nothing", 404),
    ],
)
def test_a_jobs_token_opens_its_own_files_and_nothing_else(step: Step, method: str, path: str, status: int) -> None:
    step.serve("true")
    assert step.ask(method, path.format(root=step.root), body=b"x" if method == "PUT" else None)[0] == status
    assert (step.root / "secret").read_text() == "not yours"


def test_without_the_token_nothing_is_open(step: Step) -> None:
    step.serve("true")
    assert step.ask("GET", "/step", token="wrong")[0] == 401


def test_whoever_speaks_no_tls_gets_no_answer(step: Step) -> None:
    relay = step.serve("true")
    connection = http.client.HTTPConnection(host_of(relay), timeout=10)
    connection.request("GET", "/step", headers={"Authorization": f"Bearer {relay.token}"})
    with pytest.raises((ConnectionError, http.client.BadStatusLine)):
        connection.getresponse()


def test_a_client_that_says_nothing_keeps_no_other_waiting(step: Step) -> None:
    host, port = host_of(step.serve("true")).split(":")
    with socket.create_connection((host, int(port))):
        assert json.loads(RelayClient(str(step.mount)).read("/step"))["argv"] == ["true"]


class Impostor:
    """A server at the relay's address that records what it receives, over TLS with another certificate, or without."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls, self.received, self.refused = tls, b"", 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"  # no answer to it may be in clear
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                try:
                    secure = self._tls.wrap_socket(connection, server_side=True) if self._tls else connection
                    self.received += secure.recv(1 << 16)
                    secure.close()
                except OSError:
                    pass
            self.refused += 1

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.mark.parametrize("secure", [True, False])
def test_no_token_is_sent_to_a_server_without_the_relays_certificate(step: Step, secure: bool) -> None:
    relay = step.serve("true")
    pair = issue(new_authority("gpuquota-relay", time.time()), ["127.0.0.1"], time.time())
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_pair(tls, pair.certificate, pair.key)
    impostor = Impostor(tls if secure else None)
    (step.mount / "url").write_text(impostor.url)
    with pytest.raises(RelayError, match="the step's launcher does not answer"):
        RelayClient(str(step.mount), timeout_s=0.1).read("/step")
    until(lambda: impostor.refused)
    seen = impostor.refused
    starting = subprocess.Popen([sys.executable, "-I", "-S", "-c", BOOTSTRAP, str(step.mount)])
    try:
        until(lambda: impostor.refused > seen)
    finally:
        starting.kill()
        starting.wait()
        impostor.close()
    assert relay.token.encode() not in impostor.received
    assert b"HTTP/1.1" not in impostor.received


def test_a_transfer_that_breaks_leaves_nothing_and_is_repeated(step: Step) -> None:
    relay = step.serve("true")
    place = step.root / "out" / ".gpuquota" / "job-1" / "w0" / "model"
    connection = http.client.HTTPSConnection(host_of(relay), timeout=10, context=trusting(relay))
    connection.putrequest("PUT", f"/file?path={place}")
    connection.putheader("Authorization", f"Bearer {relay.token}")
    connection.putheader("Content-Length", "1000")
    connection.endheaders()
    connection.send(b"half")
    connection.close()
    source = step.root / "source"
    source.write_bytes(b"whole")
    RelayClient(str(step.mount)).upload(str(source), str(place))
    until(lambda: not list(place.parent.glob("*.part")))
    assert place.read_bytes() == b"whole"


def test_a_launcher_that_was_made_anew_is_found(step: Step) -> None:
    step.serve("true")
    assert step.relay
    step.relay.close()
    client = RelayClient(str(step.mount), timeout_s=30)
    answers: list[bytes] = []
    asking = threading.Thread(target=lambda: answers.append(client.read("/step")))
    asking.start()
    step.restart()
    asking.join(30)
    assert json.loads(answers[0])["argv"] == ["true"]


def test_a_launcher_that_stays_away_is_given_up(step: Step) -> None:
    step.serve("true").close()
    step.relay = None
    with pytest.raises(RelayError, match="the step's launcher does not answer"):
        RelayClient(str(step.mount), timeout_s=0.5).read("/step")


def test_of_a_file_that_changes_while_it_is_sent_no_byte_more_than_announced_is_sent(tmp_path: Path) -> None:
    grown = tmp_path / "grown"
    grown.write_bytes(b"announced" + b" and written later")
    here, there = socket.socketpair()
    with here, there, grown.open("rb") as file:
        remote.send_file(here, file, len(b"announced"))
        with pytest.raises(ConnectionError, match="82 bytes shorter"):
            remote.send_file(here, file, 100)
        here.close()
        assert there.makefile("rb").read() == b"announced and written later"


def test_a_large_file_is_never_whole_in_memory(step: Step) -> None:
    step.serve("true")
    large = step.root / "large"
    with large.open("wb") as file:
        file.truncate(600 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    place = step.root / "out" / ".gpuquota" / "job-1" / "w0" / "model"
    RelayClient(str(step.mount)).upload(str(large), str(place))
    assert place.stat().st_size == 600 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    assert remote.CHUNK_SIZE < 100 << 20


def test_an_imported_artifact_that_kfp_does_not_download_is_none_of_the_relays(step: Step) -> None:
    imported = {"name": "weights", "uri": "https://example.com/weights.bin"}  # KFP's launcher leaves it where it is
    step.executor_input["inputs"]["artifacts"]["weights"] = {"artifacts": [imported]}
    step.serve(sys.executable, "-c", "print('ran')")
    done = worker(step)
    assert done.returncode == 0, done.stderr
    assert "ran" in done.stdout


def connected(step: Step, source: str = "127.0.0.1") -> socket.socket:
    """Return a connection that has sent nothing."""
    assert step.relay
    host, _, port = host_of(step.relay).partition(":")
    return socket.create_connection((host, int(port)), 20, source_address=(source, 0))


def ended(connection: socket.socket) -> bool:
    """Return whether the other end closes the connection without an answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_connections_without_the_token_are_few_and_keep_no_worker_out(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "MAX_UNPROVEN_OF_ONE", 8)
    monkeypatch.setattr(relay_module, "MAX_UNPROVEN", 20)
    step.serve("echo")
    before = threading.active_count()
    silent = [connected(step, "127.0.0.2") for _ in range(30)]
    assert all(ended(one) for one in silent[8:]), "no more than so many from one address"
    others = [connected(step, f"127.0.0.{number}") for number in range(10, 40)]
    until(lambda: threading.active_count() - before <= 20)
    assert sum(map(ended, others[:10])) == 10, "the oldest are closed for newer ones"
    assert step.ask("GET", "/step")[0] == 200
    for one in (*silent, *others):
        one.close()


def test_a_connection_that_does_not_send_the_token_is_closed_in_time_however_often_it_sends_a_byte(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "PROOF_TIMEOUT_S", 1.0)
    relay = step.serve("echo")
    slow = trusting(relay).wrap_socket(connected(step), server_hostname="127.0.0.1")
    kept = http.client.HTTPSConnection(host_of(relay), timeout=10, context=trusting(relay))
    kept.request("GET", "/step", headers={"Authorization": f"Bearer {relay.token}"})
    assert kept.getresponse().read()

    def closed() -> bool:
        try:
            slow.sendall(b"G")
            slow.settimeout(0.05)
            return slow.recv(1) == b""
        except TimeoutError:
            return False
        except OSError:
            return True

    until(closed)
    kept.request("GET", "/step", headers={"Authorization": f"Bearer {relay.token}"})
    assert kept.getresponse().status == 200, "a connection that has sent the token may be idle"
    kept.close()


def odd_entries(step: Step, folder: Path) -> dict[str, Callable[[Path], None]]:
    """Return what can be in a folder beside files and folders, by a name that says what it is."""
    return {
        "a link to a file outside": lambda path: path.symlink_to(step.root / "secret"),
        "a link to a folder outside": lambda path: path.symlink_to(step.root),
        "a link to a folder within": lambda path: path.symlink_to(folder),
        "a link to nothing": lambda path: path.symlink_to(folder / "missing"),
        "a link to itself": lambda path: path.symlink_to(path),
        "a pipe": os.mkfifo,
    }


ODD = ["a link to a file outside", "a link to a folder outside", "a link to a folder within", "a link to nothing",
       "a link to itself", "a pipe"]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_an_input_with_something_that_no_worker_can_have_is_refused_by_its_name(step: Step, odd: str) -> None:
    data = step.root / "in" / "data"
    path = data / "deep" / "odd"
    odd_entries(step, data / "deep")[odd](path)
    step.serve("echo")
    listed, reason = step.ask("GET", f"/list?path={data}")
    assert (listed, str(path) in reason.decode()) == (403, True), reason
    if "outside" in odd:
        read, body = step.ask("GET", f"/file?path={path}")
        through, _ = step.ask("GET", f"/file?path={path}/secret")
        assert (read, through, b"not yours" in body) == (404, 404, False)


def test_a_link_to_a_file_of_the_same_input_is_sent_as_that_file(step: Step) -> None:
    data = step.root / "in" / "data"
    (data / "deep" / "linked").symlink_to(data / "deep" / "a.txt")
    step.serve("echo")
    listed, found = step.ask("GET", f"/list?path={data}")
    assert (listed, [name for name, _, _ in json.loads(found)]) == (200, ["deep/a.txt", "deep/linked", "run.sh"])
    assert step.ask("GET", f"/file?path={data}/deep/linked") == (200, b"hello")


@pytest.mark.parametrize("odd", ODD[2:])
def test_an_output_with_something_that_cannot_be_sent_is_an_error_that_names_it(step: Step, odd: str) -> None:
    out = step.root / "written"
    out.mkdir()
    odd_entries(step, out)[odd](out / "odd")
    with pytest.raises(RelayError, match=f"{out}/odd"):
        remote.output_files(str(out))


@pytest.mark.parametrize(
    ("path", "body"),
    [("/complete?worker=w0", b"[" * 100_000), ("/complete?worker=w0", b"{}x"), ("/complete?worker=w0", b"[1]")],
)
def test_a_request_that_cannot_be_read_is_refused(step: Step, path: str, body: bytes) -> None:
    step.serve("echo")
    assert step.ask("PUT", path, body=body)[0] == 400


def test_a_mode_that_is_no_number_is_refused(step: Step) -> None:
    step.serve("echo")
    target = f"{step.staging.directories()[0]}/x"
    assert step.ask("PUT", f"/file?path={target}&mode=rwx", body=b"x")[0] == 400
