"""Workers prove to each other, over each connection, that they hold the job's key."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from elastic_runtime.errors import CollectiveError
from elastic_runtime.membership import pair_authentication
from elastic_runtime.membership.pair_authentication import check_users, listening_ports, prove
from elastic_runtime.torch_internals import build_second_connections
from tests.security.other_user import as_root, start

if TYPE_CHECKING:
    import torch.distributed as dist

LIMIT = timedelta(seconds=30)


def connected(size: int) -> list[list[dist.ProcessGroup]]:
    """Two connections between all ranks, which are threads of this process."""
    store = HashStore()

    def one(rank: int) -> list[dist.ProcessGroup]:
        return [build_second_connections(PrefixStore(name, store), rank, size, LIMIT) for name in ("a", "b")]

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def outcomes(keys: list[bytes], generations: list[int]) -> list[str]:
    groups = connected(len(keys))

    def one(rank: int) -> str:
        try:
            prove(groups[rank], rank, len(keys), generations[rank], keys[rank])
        except CollectiveError as error:
            return str(error)
        return "proved"

    with ThreadPoolExecutor(len(keys)) as pool:
        return list(pool.map(one, range(len(keys))))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_workers_with_the_jobs_key_accept_each_other(size: int) -> None:
    assert outcomes([b"key"] * size, [3] * size) == ["proved"] * size


def test_a_peer_without_the_key_is_refused() -> None:
    first, second, other = outcomes([b"key", b"key", b"another"], [3, 3, 3])
    assert first == second == "rank 2 does not hold the job's key"
    assert "does not hold the job's key" in other


def test_a_proof_of_another_generation_does_not_count() -> None:
    assert all("does not hold" in outcome for outcome in outcomes([b"key", b"key"], [3, 4]))


def test_who_is_connected_is_looked_at_where_a_proof_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_authentication, "PATIENCE_S", 0.01)
    (connections, _silent) = connected(2)

    def intruder() -> None:
        raise CollectiveError("user 65534 has connected")

    with pytest.raises(CollectiveError, match="user 65534"):
        prove(connections, 0, 2, 3, b"key", intruder)


CLIENT = """
connected = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("connected", flush=True)
sys.stdin.read()
"""


@as_root
def test_another_users_connection_to_a_new_port_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as earlier:
        before = listening_ports()
        with socket.create_server(("127.0.0.1", 0)) as server:
            with start(CLIENT, earlier.getsockname()[1]) as elsewhere:
                assert elsewhere.stdout is not None
                assert elsewhere.stdout.readline() == "connected\n"
                check_users(before)
                elsewhere.kill()
            with socket.create_connection(server.getsockname()):
                check_users(before)
            with start(CLIENT, server.getsockname()[1]) as intruder:
                assert intruder.stdout is not None
                assert intruder.stdout.readline() == "connected\n"
                with pytest.raises(CollectiveError, match="user 65534 has connected to this worker's port"):
                    check_users(before)
                intruder.kill()
