"""The records of all ElasticJobs and their workers.

What the embedded cluster stores in SQLite is here in the objects' status and in the pods; the rules that write into the
book are the same (cluster/lifecycle.py, the transcript of a plan).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.job_book import Change, JobBook

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota import scheduler
    from kfp_gpuquota.api import Node
    from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import Seats
    from kfp_gpuquota.cluster.kubernetes.elasticjob.runtime_state import Facts
    from kfp_gpuquota.cluster.records import JobRecord, WorkerRecord


class Book(JobBook):
    """The workers' seats go with their records; `facts` are by job."""

    def __init__(self, tell: Callable[[scheduler.Event], None], seats: Seats, nodes: Mapping[str, Node]) -> None:
        super().__init__(nodes)
        self._tell, self._seats = tell, seats
        self.facts: dict[str, Facts] = {}

    def record(self, job: JobRecord) -> None:
        """The job as given from now on."""
        if job is not self.jobs[job.uid]:
            self.commit(Change(jobs={job.uid: job}))

    def commit(self, change: Change) -> None:
        """Remember it, and tell the scheduler; a job of None is forgotten, with its workers."""
        told = list(self.scheduler_events(change))
        self.apply_change(change)
        for event in told:
            self._tell(event)

    def put_worker(self, record: WorkerRecord) -> None:
        """The worker as given; it sits on its devices until it is gone."""
        super().put_worker(record)
        worker, held = record.worker, self._seats.held(record.worker.id)
        if record.alive and held is None:
            self._seats.take(worker.id, worker.node, len(worker.devices), worker.devices, part=worker.share < 1)
        elif not record.alive and held is not None:
            self._seats.release(worker.id)

    def remove_job(self, uid: str) -> list[str]:
        """Forget it, its workers and what they sat on."""
        workers = super().remove_job(uid)
        for worker in workers:
            self._seats.release(worker)
        return workers
