"""The records of jobs and their workers by what they are looked up by, and what the scheduler hears when some change.

For every kind of cluster: where records are kept for good, and what else is indexed, is for its own book to add.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.scheduling import job_announced, job_changed, worker_changed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kfp_gpuquota import scheduler
    from kfp_gpuquota.api import Node, Project
    from kfp_gpuquota.api.wire import Event
    from kfp_gpuquota.cluster.records import JobRecord, WorkerRecord


@dataclass
class Change:
    """What one decision alters; None removes."""

    projects: dict[str, Project | None] = field(default_factory=dict)
    jobs: dict[str, JobRecord | None] = field(default_factory=dict)
    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


class JobBook:
    """Jobs by uid, workers by id. `nodes` is what the scheduler knows of nodes."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.nodes = nodes
        self.jobs: dict[str, JobRecord] = {}
        self.workers: dict[str, WorkerRecord] = {}
        self._workers_of: dict[str, list[str]] = {}

    def workers_of(self, uid: str) -> list[WorkerRecord]:
        """All workers of a job that are remembered, oldest first."""
        return [self.workers[worker] for worker in self._workers_of.get(uid, ())]

    def attempt_of(self, job: JobRecord) -> list[WorkerRecord]:
        """The workers of the job's present attempt."""
        return [worker for worker in self.workers_of(job.uid) if worker.attempt == job.attempt]

    def alive_of(self, uid: str) -> list[WorkerRecord]:
        """The workers that may still hold devices."""
        return [worker for worker in self.workers_of(uid) if worker.alive]

    def news(self, change: Change) -> Iterator[scheduler.Event]:
        """What the scheduler has to hear of a change, before it is remembered."""
        for uid, job in change.jobs.items():
            yield from job_announced(self.jobs.get(uid), job)
        for name, worker in change.workers.items():
            yield from worker_changed(self.workers.get(name), worker)
        for uid, job in change.jobs.items():
            yield from job_changed(self.jobs.get(uid), job)

    def remember(self, change: Change) -> None:
        """It is so from now on; a job of None is forgotten, with its workers."""
        for worker in change.workers.values():
            self.remember_worker(worker)
        for uid, job in change.jobs.items():
            if job is None:
                self.forget_job(uid)
            else:
                self.remember_job(job)

    def remember_job(self, job: JobRecord) -> None:
        """The job as given from now on."""
        self.jobs[job.uid] = job

    def remember_worker(self, record: WorkerRecord) -> None:
        """The worker as given from now on."""
        worker = record.worker
        if worker.id not in self.workers:
            self._workers_of.setdefault(worker.job_uid, []).append(worker.id)
        self.workers[worker.id] = record

    def forget_job(self, uid: str) -> list[str]:
        """Forget it, and its workers; their ids."""
        self.jobs.pop(uid, None)
        workers = self._workers_of.pop(uid, [])
        for worker in workers:
            del self.workers[worker]
        return workers
