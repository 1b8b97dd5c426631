"""Reads workers' logs for the page with this process's own right. Offsets are those of `objects.log_lines`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import aiohttp

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.api.wire import LogChunk
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.objects.log_lines import LogLines
from kfp_gpuquota.errors import ClusterUnavailableError

if TYPE_CHECKING:
    from kfp_gpuquota.api import Job
    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
    from kfp_gpuquota.cluster.kubernetes.web.objects import Objects

PIECE: Final = 1 << 18
POLL_S: Final = 1.0
TOGETHER_S: Final = 0.5
"""What is printed within this time after a line is read with it, since each read opens a connection."""


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
        found = LogLines(offset, PIECE)
        ended = pod.status.phase in {"Succeeded", "Failed"}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s or None) as limit:
                await self._collect(pod, found, None if ended or not timeout_s else limit)
        return LogChunk(text=found.text(), next_offset=found.last, more=bool(found.lines) or not ended)

    def _pod(self, job: Job, worker: str) -> Pod | None:
        workers = [one.id for one in job.status.workers if worker in {"", one.id, str(one.index)}]
        chosen = job.status.result_worker if not worker and job.status.result_worker else next(iter(workers), "")
        return self._objects.pod(job.spec.project, job.spec.name, chosen)

    async def _collect(self, pod: Pod, found: LogLines, limit: asyncio.Timeout | None) -> None:
        """Read what there is; with a `limit` also what is printed until then, or for a moment after the first line."""
        path = join("/api/v1/namespaces", pod.metadata.namespace, "pods", pod.metadata.name, "log")
        params = {"container": pod.spec.containers[0].name, **found.query()}
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
