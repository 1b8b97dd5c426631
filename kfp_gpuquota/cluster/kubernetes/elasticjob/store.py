"""The records of all ElasticJobs and their workers.

The local cluster stores them in SQLite; here they are stored in the objects' status and in the pods. The rules that
change them are the same (cluster/lifecycle.py, cluster/change_recorder.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.cluster.jobs.job_book import Change, JobBook

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota import scheduler
    from kfp_gpuquota.api import Node
    from kfp_gpuquota.api.placement import Placement
    from kfp_gpuquota.cluster.jobs.records import JobRecord, WorkerRecord
    from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
    from kfp_gpuquota.cluster.kubernetes.elasticjob.runtime_state import RuntimeState


class Book(JobBook):
    """Records of jobs and workers; devices are assigned and released with the workers' records.

    `runtime_states` are by job. `now` is the time of all records and of what waits for them, in seconds since 1970.
    """

    def __init__(
        self,
        emit: Callable[[scheduler.Event], None],
        allocator: DeviceAllocator,
        nodes: Mapping[str, Node],
        now: Callable[[], float],
    ) -> None:
        super().__init__(nodes)
        self.emit, self._allocator, self.now = emit, allocator, now
        self.runtime_states: dict[str, RuntimeState] = {}

    def record(self, job: JobRecord) -> None:
        """Replace the job's record."""
        if job is not self.jobs[job.uid]:
            self.commit(Change(jobs={job.uid: job}))

    def commit(self, change: Change) -> None:
        """Apply a change, and emit its events to the scheduler; a job of None is removed with its workers."""
        events = list(self.scheduler_events(change))
        self.apply_change(change)
        for event in events:
            self.emit(event)

    def promise(self, uid: str, placements: tuple[Placement, ...], at: float) -> None:
        """Record the placements of the job's next workers that an earlier controller has promised."""
        self.record(msgspec.structs.replace(self.jobs[uid], promised=placements, promised_at=at))

    def put_worker(self, record: WorkerRecord) -> None:
        """Add or update a worker; it holds its devices until it has exited."""
        super().put_worker(record)
        worker, held = record.worker, self._allocator.held(record.worker.id)
        if record.alive and held is None:
            self._allocator.take(worker.id, worker.node, len(worker.devices), worker.devices, part=worker.share < 1)
        elif not record.alive and held is not None:
            self._allocator.release(worker.id)

    def remove_job(self, uid: str) -> list[str]:
        """Remove the job and its workers, and release their devices."""
        workers = super().remove_job(uid)
        for worker in workers:
            self._allocator.release(worker)
        return workers
