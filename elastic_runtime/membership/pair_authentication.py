"""Each pair of workers proves, over its own connection, that both ends hold the job's key.

gloo connects to the address that a peer has put into the rendezvous store, and accepts the first connection that names
the right pair: any process that reaches the port may be first. So before a generation's first collective, over each
connection, both ends send 32 random bytes, and answer the other one's with

    HMAC-SHA256(key, "elastic pair" | generation | connection | own rank | peer's rank | own bytes | peer's bytes)

which is a proof for this direction of this pair of this generation only: an answer cannot be used elsewhere. It costs
two messages each way, and runs in the thread that builds the group. Connections of others that are part of no pair do
not matter: they are left open, and nobody reads from them. If proofs are still missing after a few seconds, someone
else may have taken the place of a peer: on one machine the users of the connections are then looked at (`check_users`),
so that the next generation is built without waiting for the time limit. What follows over a connection is neither
signed nor encrypted.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import os
import resource
import secrets
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from elastic_runtime.errors import CollectiveError
from elastic_runtime.membership import background

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch.distributed as dist

TIMEOUT = timedelta(seconds=30)
PATIENCE_S = 3.0
"""Seconds after which missing proofs are suspicious; they take milliseconds, on a busy machine a second."""
_BYTES = 32
_FIRST_TAG = 1 << 20
_LISTENING, _CONNECTED = "0A", "01"

Peers = dict[int, torch.Tensor]


def prove(
    connections: Sequence[dist.ProcessGroup],
    rank: int,
    size: int,
    generation: int,
    key: bytes,
    suspect: Callable[[], None] | None = None,
    name: str = "",
) -> None:
    """Return once all peers have proved that they hold the key. CollectiveError where one has not.

    `name`: of these connections, in the proofs. `suspect` is called once if proofs are missing after `PATIENCE_S`; it
    raises where waiting longer is useless.
    """
    proved: Future[None] = Future()

    def run() -> None:
        try:
            _prove(connections, rank, size, generation, key, name)
        except BaseException as error:  # noqa: BLE001  (raised in the caller's thread)
            proved.set_exception(error)
        else:
            proved.set_result(None)

    background.start(run, "elastic-prove")
    try:
        proved.result(PATIENCE_S)
    except TimeoutError:
        if suspect is not None:
            suspect()
        proved.result()


def _prove(
    connections: Sequence[dist.ProcessGroup], rank: int, size: int, generation: int, key: bytes, name: str
) -> None:
    peers = [peer for peer in range(size) if peer != rank]
    contexts = [f"elastic pair {generation} {name}{number}" for number in range(len(connections))]
    rounds = [_Round(group, context, rank, peers, key) for group, context in zip(connections, contexts, strict=True)]
    try:
        for each in rounds:
            each.challenge()
        for each in rounds:
            each.answer()
        for each in rounds:
            each.verify()
    except RuntimeError as error:
        raise CollectiveError(f"a peer did not prove that it holds the job's key: {error}") from error


class _Round:
    """One connection to each peer."""

    def __init__(self, group: dist.ProcessGroup, context: str, rank: int, peers: list[int], key: bytes) -> None:
        self._group, self._rank, self._peers, self._key = group, rank, peers, key
        self._context = context.encode()
        self._own = {peer: _tensor(secrets.token_bytes(_BYTES)) for peer in peers}

    def challenge(self) -> None:
        """Send random bytes to all, and begin to receive theirs."""
        self._challenges = self._start(self._own, _FIRST_TAG)

    def answer(self) -> None:
        """Answer the challenges of all peers."""
        self._finish()
        proofs = {peer: _tensor(self._proof(peer, of_peer=False)) for peer in self._peers}
        self._answers = self._start(proofs, _FIRST_TAG + 1)

    def verify(self) -> None:
        """CollectiveError where an answer is wrong."""
        self._finish()
        for peer in self._peers:
            if not hmac.compare_digest(_content(self._answers[peer]), self._proof(peer, of_peer=True)):
                raise CollectiveError(f"rank {peer} does not hold the job's key")

    def _proof(self, peer: int, *, of_peer: bool) -> bytes:
        """Return the answer that this rank sends to `peer`, or must receive from it."""
        own = (self._rank, _content(self._own[peer]))
        other = (peer, _content(self._challenges[peer]))
        (prover, first), (verifier, second) = (other, own) if of_peer else (own, other)
        message = b"|".join([self._context, f"{prover} {verifier}".encode(), first, second])
        return hmac.digest(self._key, message, hashlib.sha256)

    def _start(self, sent: Peers, tag: int) -> Peers:
        received = {peer: torch.zeros(_BYTES, dtype=torch.uint8) for peer in self._peers}
        self._works = [self._group.send([sent[peer]], peer, tag) for peer in self._peers]
        self._works += [self._group.recv([received[peer]], peer, tag) for peer in self._peers]
        self._sent = sent  # gloo reads it until it is sent
        return received

    def _finish(self) -> None:
        for work in self._works:
            work.wait(TIMEOUT)


def raise_open_files() -> None:
    """Raise this process's limit on open files to the hard one: gloo ends the process where it cannot accept one more.

    Each connection to its port takes one. If this does not suffice, the job continues without the worker.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listening_ports() -> set[str]:
    """Return the ports that this process listens on, as /proc writes them."""
    own = _own_sockets()
    return {row[1] for row in _tcp_rows() if row[3] == _LISTENING and row[9] in own}


def check_users(before: set[str]) -> None:
    """Raise CollectiveError where another user is connected to a port that this process did not listen on `before`."""
    new = {address.rpartition(":")[2] for address in listening_ports() - before}
    rows = [row for row in _tcp_rows() if row[3] == _CONNECTED]
    users = {(row[1], row[2]): row[7] for row in rows}
    for row in rows:
        if row[1].rpartition(":")[2] in new and users.get((row[2], row[1]), "") not in {"", str(os.geteuid())}:
            raise CollectiveError(f"user {users[row[2], row[1]]} has connected to this worker's port")


def _tcp_rows() -> Iterator[list[str]]:
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        yield from (line.split() for line in lines)


def _own_sockets() -> set[str]:
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)  # noqa: PTH115
        except OSError:
            continue  # closed in the meantime
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _content(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())
