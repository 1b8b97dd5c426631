"""The records of all ElasticJobs and their workers, and what the scheduler hears when one changes.

The same shape as the embedded cluster's state, so that the same rules write into it (cluster/lifecycle.py,
scheduling.py, the transcript of a plan); what is stored there in SQLite is here in the objects' status and in the pods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.local.state import Change
from kfp_gpuquota.cluster.scheduling import job_announced, job_changed, worker_changed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kfp_gpuquota import scheduler
    from kfp_gpuquota.api import Node
    from kfp_gpuquota.cluster.kubernetes.elastic_facts import Facts
    from kfp_gpuquota.cluster.kubernetes.seats import Seats
    from kfp_gpuquota.cluster.records import JobRecord, WorkerRecord


class Book:
    """Jobs by uid, workers by id. `nodes` is what the scheduler knows of nodes."""

    def __init__(self, tell: Callable[[scheduler.Event], None], seats: Seats, nodes: Mapping[str, Node]) -> None:
        self._tell, self._seats = tell, seats
        self.nodes = nodes
        self.jobs: dict[str, JobRecord] = {}
        self.workers: dict[str, WorkerRecord] = {}
        self.facts: dict[str, Facts] = {}
        self._workers_of: dict[str, list[str]] = {}

    def workers_of(self, uid: str) -> list[WorkerRecord]:
        """All that are remembered, oldest first."""
        return [self.workers[worker] for worker in self._workers_of.get(uid, ())]

    def attempt_of(self, job: JobRecord) -> list[WorkerRecord]:
        """Those of the job's present attempt."""
        return [worker for worker in self.workers_of(job.uid) if worker.attempt == job.attempt]

    def alive_of(self, uid: str) -> list[WorkerRecord]:
        """Those that may still hold devices."""
        return [worker for worker in self.workers_of(uid) if worker.alive]

    def record(self, job: JobRecord) -> None:
        """The job as given from now on."""
        if job is not self.jobs[job.uid]:
            self.commit(Change(jobs={job.uid: job}))

    def commit(self, change: Change) -> None:
        """Remember it, and tell the scheduler; a job of None is forgotten, with its workers."""
        told = list(self._news(change))
        for worker in change.workers.values():
            self._remember_worker(worker)
        for uid, job in change.jobs.items():
            if job is None:
                self._forget(uid)
            else:
                self.jobs[uid] = job
        for event in told:
            self._tell(event)

    def _news(self, change: Change) -> Iterator[scheduler.Event]:
        for uid, job in change.jobs.items():
            yield from job_announced(self.jobs.get(uid), job)
        for name, worker in change.workers.items():
            yield from worker_changed(self.workers.get(name), worker)
        for uid, job in change.jobs.items():
            yield from job_changed(self.jobs.get(uid), job)

    def _remember_worker(self, record: WorkerRecord) -> None:
        worker = record.worker
        if worker.id not in self.workers:
            self._workers_of.setdefault(worker.job_uid, []).append(worker.id)
        self.workers[worker.id] = record
        held = self._seats.held(worker.id)
        if record.alive and held is None:
            self._seats.take(worker.id, worker.node, len(worker.devices), worker.devices, part=worker.share < 1)
        elif not record.alive and held is not None:
            self._seats.release(worker.id)

    def _forget(self, uid: str) -> None:
        self.jobs.pop(uid, None)
        for worker in self._workers_of.pop(uid, ()):
            del self.workers[worker]
            self._seats.release(worker)
