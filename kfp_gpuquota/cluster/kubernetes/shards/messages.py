"""Messages between the leader and a shard: JSON lines over one HTTP request that stays open."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import zlib
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api import Progress
from kfp_gpuquota.errors import RunError
from kfp_gpuquota.membership import AnnounceCommit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import StreamReader

CONTROL_PATH: Final = "/v1/shard"
PING_S: Final = 1.0
SILENCE_S: Final = 10.0
"""Seconds without a line after which the other end counts as failed. Both ends send an empty line each PING_S."""
MAX_LINE_BYTES: Final = 64 << 20
"""Bytes of a line; more than a job of 100,000 workers needs, so a longer line is not a valid message."""


class _Message(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Base class of the messages: one line each."""


class JobState(_Message, frozen=True):
    """Open a job, with its whole state. The ids of all its workers begin with `worker_prefix`."""

    uid: str
    attempt: int  # the job's start to which these workers belong
    min_workers: int
    first_generation: int  # counts where the shard does not have the job
    stored: int  # the highest generation number that may be sent
    leave_s: float
    alive: tuple[str, ...]  # whose processes may still run
    wanted: tuple[str, ...]  # that should run, in order
    trained: tuple[str, ...]  # that were in the current generation when the leader started
    ended: dict[str, bool]  # those that have exited, and whether they succeeded
    worker_prefix: str = ""


class JobClosed(_Message, frozen=True):
    """Close a job, which has no workers any more."""

    uid: str


class Synced(_Message, frozen=True):
    """End of the list of open jobs: the shard closes all others, and serves workers."""


class Hello(_Message, frozen=True):
    """First line from a shard: an identifier of its process."""

    process: str


class NumberNeeded(_Message, frozen=True):
    """Request to store the number `generation`, for which orders wait."""

    uid: str
    generation: int


class Committed(_Message, frozen=True):
    """Notice of a committed generation (`Notices.generation_committed`)."""

    uid: str
    commit: AnnounceCommit


class Released(_Message, frozen=True):
    """Notice of a worker that left the membership (`Notices.worker_released`)."""

    uid: str
    worker: str
    step: int


class KillNeeded(_Message, frozen=True):
    """Request to kill a worker's process (`Notices.kill_requested`)."""

    uid: str
    worker: str
    why: str


class Progressed(_Message, frozen=True):
    """Notice of a worker's training progress (`Notices.progress_reported`)."""

    uid: str
    worker: str
    progress: Progress


class Finished(_Message, frozen=True):
    """Notice that the training applied its last step (`Notices.training_finished`)."""

    uid: str
    worker: str
    step: int


FromLeader = JobState | JobClosed | Synced
Notice = NumberNeeded | Committed | Released | KillNeeded | Progressed | Finished
FromShard = Hello | Notice


def shard_of(job_uid: str, shards: int) -> int:
    """Return the shard that serves a job that starts now: a hash that is the same in each process and version."""
    return zlib.crc32(job_uid.encode()) % shards


def control_token(key: bytes) -> str:
    """Return the token that authenticates a leader; no job has this token, since no uid contains a slash."""
    return hmac.new(key, b"shard/control", hashlib.sha256).hexdigest()


async def lines(content: StreamReader) -> AsyncIterator[bytes]:
    """Yield lines as they arrive, also empty ones. Raises TimeoutError after SILENCE_S without a line."""
    rest = b""
    while True:
        async with asyncio.timeout(SILENCE_S):
            chunk = await content.readany()
        if not chunk:
            return
        *complete, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise RunError(f"a line of more than {MAX_LINE_BYTES} bytes was received from the other process")
        for line in complete:
            yield line


class Outbox:
    """Messages to the other end, in order, with an empty line after PING_S without a message."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def put(self, message: FromLeader | FromShard) -> None:
        """Queue a message."""
        self._queue.put_nowait(msgspec.json.encode(message) + b"\n")

    def close(self) -> None:
        """End the stream after the queued messages."""
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            try:
                async with asyncio.timeout(PING_S):
                    line = await self._queue.get()
            except TimeoutError:
                line = b"\n"
            if line is None:
                return
            yield line
