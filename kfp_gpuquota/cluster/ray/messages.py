"""The messages between daemon and bridge: one JSON object per line, over a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

LINE_LIMIT: Final = 64 << 20
NODE_ID: Final = "ray.io/node-id"


class _Tagged(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    pass


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker as its node needs it. `files` (path to text) and `directories` are created before it starts.

    `root` holds all files of this cluster on the node, and is private to its user.
    """

    worker: str
    root: str
    directory: str
    files: dict[str, str] = {}
    directories: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    working_directory: str = ""
    grace_period_s: float = 0.0
    open_files: int = 0
    log_limit: int = 0
    runtime_env: dict[str, Any] = {}


# From the daemon


class Follow(_Tagged, frozen=True):
    """Start the worker where `start`, and it never was; report what becomes of it.

    Without `start`: prevent it, or stop it where it runs.
    """

    task: Task
    node_id: str
    gpus: int
    start: bool = True


class Signal(_Tagged, frozen=True):
    """Stop the worker: at once where `kill`, else after its grace period."""

    worker: str
    kill: bool = False


class Forget(_Tagged, frozen=True):
    """Report nothing more of the worker: its node is lost."""

    worker: str


class ReadLog(_Tagged, frozen=True):
    """Answer with LogRead of the same number."""

    number: int
    worker: str
    node_id: str
    directory: str
    offset: int


class RemoveFiles(_Tagged, frozen=True):
    """Delete a directory on all nodes."""

    directory: str


class ListWorkers(_Tagged, frozen=True):
    """Answer with WorkersFound of each node: what runs below `jobs`."""

    jobs: str


class EndWorkers(_Tagged, frozen=True):
    """End workers of a node that no job has."""

    node_id: str
    workers: tuple[str, ...]


class MeasureUse(_Tagged, frozen=True):
    """Answer with UseMeasured of each of these workers whose actor has measured the use of its GPUs."""

    workers: tuple[str, ...]


ToBridge = Follow | Signal | Forget | ReadLog | RemoveFiles | ListWorkers | EndWorkers | MeasureUse


# From the bridge


class RayNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A live node. `held`: its GPUs that this daemon's actors hold, `free`: those that are idle.

    `name` is what `ray start --node-name` gave it, by default its address.
    """

    id: str
    address: str
    hostname: str
    name: str = ""
    gpus: int = 0
    free: float = 0.0
    held: float = 0.0
    cpus: float = 0.0
    memory_mib: int = 0
    gpu_type: str = ""
    draining: bool = False
    labels: dict[str, str] = {}


class Connected(_Tagged, frozen=True):
    """The bridge is connected; `address` is the cluster's, `here` this machine's in it."""

    address: str
    here: str
    version: str


class Failed(_Tagged, frozen=True):
    """The bridge ends, and why."""

    why: str


class NodesSeen(_Tagged, frozen=True):
    """All live nodes."""

    nodes: tuple[RayNode, ...]


class NodesUnchanged(_Tagged, frozen=True):
    """Ray's head was asked again, and the nodes are as last sent."""


class WorkerStarted(_Tagged, frozen=True):
    """The worker's process runs."""

    worker: str
    pid: int


class WorkerEnded(_Tagged, frozen=True):
    """The worker's process has ended, by an `error` if it reported one, or `why` it cannot run at all."""

    worker: str
    code: int
    why: str = ""
    error: str = ""


class WorkerNotStarted(_Tagged, frozen=True):
    """The node could not start it."""

    worker: str
    why: str


class WorkerLost(_Tagged, frozen=True):
    """The worker never ran and will not, or it was ended because its GPUs could not be held."""

    worker: str
    why: str


class WorkersFound(_Tagged, frozen=True):
    """Workers that run on a node. They were recorded before they were started, so one without a record is none's."""

    node_id: str
    workers: tuple[str, ...]


Figures = tuple[float, int | None]
"""Of a GPU the percent of the time in use, and the memory in MiB if that is known."""


class UseMeasured(_Tagged, frozen=True):
    """Whether a GPU of the worker was used since its actor was last asked, None if that is not certain.

    `figures` are those of each of its GPUs; () if they are not known.
    """

    worker: str
    used: bool | None
    figures: tuple[Figures, ...] = ()


class LogRead(_Tagged, frozen=True):
    """A piece of a log; `why` where it cannot be read."""

    number: int
    text: bytes = b""
    begin: int = 0
    why: str = ""


FromBridge = (
    Connected
    | Failed
    | NodesSeen
    | NodesUnchanged
    | WorkerStarted
    | WorkerEnded
    | WorkerNotStarted
    | WorkerLost
    | WorkersFound
    | UseMeasured
    | LogRead
)


class Link:
    """One end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, connection: socket.socket) -> Link:
        """Return a link over a connected socket, which it closes."""
        return cls(*await asyncio.open_connection(sock=connection, limit=LINE_LIMIT))

    def send(self, message: object) -> None:
        """Send it; to an end that has closed nothing."""
        if not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(message) + b"\n")

    async def receive(self, kind: object) -> AsyncIterator[Any]:
        """All messages of this kind until the other end closes."""
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)
        try:
            while line := await self._reader.readline():
                yield decoder.decode(line)
        except (ConnectionError, asyncio.IncompleteReadError):
            return

    async def drained(self) -> None:
        """Return when all was sent."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    def close(self) -> None:
        """Close this end."""
        self._writer.close()
