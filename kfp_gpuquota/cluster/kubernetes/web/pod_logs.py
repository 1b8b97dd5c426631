"""Workers' logs in parts. The API server has no offsets in logs, but it prefixes lines with their times.

An offset is therefore the time of the last line that was read, in nanoseconds since 2020: fewer digits than a browser's
limit for exact ids of streams. The API server resolves a time to whole seconds, so the lines of the last second are
read again and skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import aiohttp

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.api.wire import LogChunk
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.errors import ClusterUnavailableError

if TYPE_CHECKING:
    from kfp_gpuquota.api import Job
    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
    from kfp_gpuquota.cluster.kubernetes.web.objects import Objects

EPOCH_S: Final = 1_577_836_800
PIECE: Final = 1 << 18
SHORTEST_LINE: Final = 50
"""A number of last bytes is asked for as a number of lines, which are taken to have so many bytes at least."""
POLL_S: Final = 1.0
TOGETHER_S: Final = 0.5
"""What is printed within this time after a line is read with it, since each read opens a connection."""
_NS: Final = 1_000_000_000
_STAMP: Final = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


class PodLogs:
    """Reads the logs of jobs' pods with this process's own right."""

    def __init__(self, objects: Objects, connection: Connection) -> None:
        self._objects, self._connection = objects, connection

    async def read(self, job: Job, worker: str, offset: int, timeout_s: float) -> LogChunk:
        """Return whole lines behind `offset`, waiting for some for at most `timeout_s`; an offset below 0 is a number
        of bytes from the end. `worker` is an index or a pod, by default the job's first.
        """
        pod = self._pod(job, worker)
        if pod is None or not pod.spec.node_name:
            await asyncio.sleep(min(timeout_s, POLL_S))
            return LogChunk(text=b"", next_offset=max(0, offset), more=not job.status.phase.final)
        found = _Lines(offset)
        ended = pod.status.phase in {"Succeeded", "Failed"}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s or None) as limit:
                await self._collect(pod, found, None if ended or not timeout_s else limit)
        return LogChunk(text=found.text(), next_offset=found.last, more=bool(found.lines) or not ended)

    def _pod(self, job: Job, worker: str) -> Pod | None:
        workers = [one.id for one in job.status.workers if worker in {"", one.id, str(one.index)}]
        chosen = job.status.result_worker if not worker and job.status.result_worker else next(iter(workers), "")
        return self._objects.pod(job.spec.project, job.spec.name, chosen)

    async def _collect(self, pod: Pod, found: _Lines, limit: asyncio.Timeout | None) -> None:
        """Read what there is; with a `limit` also what is printed until then, or for a moment after the first line."""
        path = join("/api/v1/namespaces", pod.metadata.namespace, "pods", pod.metadata.name, "log")
        params = {"timestamps": "true", "container": pod.spec.containers[0].name, **found.query()}
        if limit is not None:
            params["follow"] = "true"
        first = True
        try:
            async with contextlib.aclosing(self._connection.chunks(path, params)) as chunks:
                async for chunk in chunks:
                    if not found.take(chunk):
                        return
                    if limit is not None and first and found.lines:
                        first = False
                        limit.reschedule(asyncio.get_running_loop().time() + TOGETHER_S)
            found.finish()
        except ApiError as error:
            if error.status not in {400, 404}:  # its container has not started, or the pod is gone
                raise
        except (aiohttp.ClientError, OSError) as error:
            raise ClusterUnavailableError(f"the log of {pod.metadata.name} cannot be read: {error}") from error
        if limit is not None and not found.lines:
            await asyncio.sleep(POLL_S)


class _Lines:
    """The whole lines behind an offset, up to a number of bytes; `last` is the time of the last one."""

    def __init__(self, offset: int) -> None:
        self.lines: deque[bytes] = deque()
        self.last = max(0, offset)
        self._after, self._tail = max(0, offset), max(0, -offset)
        self._size, self._rest = 0, b""

    def query(self) -> dict[str, str]:
        """Return what selects the lines, and some before them."""
        if self._tail:
            return {"tailLines": str(max(1, self._tail // SHORTEST_LINE))}
        since = datetime.fromtimestamp(EPOCH_S + self._after // _NS, UTC)
        return {"sinceTime": since.strftime("%Y-%m-%dT%H:%M:%SZ")} if self._after else {}

    def take(self, chunk: bytes) -> bool:
        """Take a part of the answer; False where there are bytes enough."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return all(self._take_line(line + b"\n") for line in lines)

    def finish(self) -> None:
        """The answer has ended: what came after the last end of a line is a line."""
        if self._rest:
            self._take_line(self._rest)

    def text(self) -> bytes:
        """Return all lines."""
        return b"".join(self.lines)

    def _take_line(self, stamped: bytes) -> bool:
        stamp, _, line = stamped.partition(b" ")
        at = time_of(stamp)
        if at is None:
            at, line = self.last, stamped
        elif at <= self._after:
            return True
        if not self._tail and self._size > PIECE and at != self.last:
            return False
        self.lines.append(line)
        self._size += len(line)
        self.last = max(self.last, at)
        while self._tail and self._size - len(self.lines[0]) > self._tail:
            self._size -= len(self.lines.popleft())
        return True


def time_of(stamp: bytes) -> int | None:
    """Return a line's time in nanoseconds since 2020; None for what is no time."""
    found = _STAMP.fullmatch(stamp)
    if found is None:
        return None
    at = datetime.fromisoformat(found[1].decode() + found[3].decode().replace("Z", "+00:00"))
    return (int(at.timestamp()) - EPOCH_S) * _NS + int((found[2] or b"0").ljust(9, b"0"))
