"""Reads the logs of workers in pieces, also while they run."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.wire import LogChunk
from kfp_gpuquota.errors import NotFoundError

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.local.storage.state import ClusterState
    from kfp_gpuquota.cluster.local.workers.runtime import WorkerRuntime
    from kfp_gpuquota.engine.records import JobRecord

PREVIOUS_RUN: Final = "previous"
"""In the place of a worker whose log is read: the first worker of the run before the present one."""
POLL_S: Final = 0.1


class WorkerLogs:
    """The logs of the workers in `state`. A worker is named by its id or its index; "" is the one with the result."""

    def __init__(self, state: ClusterState, runtime: WorkerRuntime) -> None:
        self._state, self._runtime = state, runtime

    async def read(self, job: JobRecord, worker: str, offset: int, timeout_s: float) -> LogChunk:
        """Return a piece from `offset` on, as soon as there is one. Raises NotFoundError for an unknown worker."""
        if not worker and not self._state.attempt_of(job):
            await self._state.wait_for_change(self._state.revision, timeout_s)
        chosen = self.worker_id(self._state.jobs.get(job.uid, job), worker)
        if chosen is None:
            return LogChunk(text=b"", next_offset=max(0, offset), more=not self._state.view(job.uid).status.phase.final)
        deadline = time.monotonic() + timeout_s
        while True:
            found = self._state.workers.get(chosen)
            if found is None:  # the job was deleted meanwhile
                return LogChunk(text=b"", next_offset=max(0, offset), more=False)
            alive = found.alive
            text, begin = await self._runtime.read_log(found.worker, offset)
            if text or not alive or time.monotonic() >= deadline:
                return LogChunk(text=text, next_offset=begin + len(text), more=bool(text) or alive)
            await asyncio.sleep(POLL_S)

    def worker_id(self, job: JobRecord, worker: str) -> str | None:
        """Return the id of a worker of the job; None while it has none. Raises NotFoundError."""
        workers = self._state.workers_of(job.uid)
        if worker == PREVIOUS_RUN:
            earlier = [w for w in workers if w.attempt < job.attempt]
            if not earlier:
                raise NotFoundError(f"job {job.spec.name!r} was not started again, so it has no previous log")
            return min((w for w in earlier if w.attempt == earlier[-1].attempt), key=lambda w: w.worker.index).worker.id
        if worker:
            found = next((w.worker.id for w in workers if worker in (w.worker.id, str(w.worker.index))), None)
            if found is None:
                raise NotFoundError(f"job {job.spec.name!r} has no worker {worker!r}")
            return found
        present = self._state.attempt_of(job)
        return job.status.result_worker or (present[0].worker.id if present else None)
