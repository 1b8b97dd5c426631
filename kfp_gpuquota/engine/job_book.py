"""The indexed records of jobs and workers, and the scheduler events that follow from their changes.

Shared by all kinds of cluster; each one's subclass adds its persistent store and further indexes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Phase
from kfp_gpuquota.api.start_conditions import parse_after
from kfp_gpuquota.engine.notifications import notification_of
from kfp_gpuquota.engine.scheduling import job_announced, job_changed, run_recalled, worker_changed
from kfp_gpuquota.scheduler.forecast import Accuracy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kfp_gpuquota.api import ExpectedStart, Node, Project
    from kfp_gpuquota.api.wire import Event
    from kfp_gpuquota.engine.notifications import Notification
    from kfp_gpuquota.engine.records import JobRecord, WorkerRecord


@dataclass
class Change:
    """The records that one decision changes; None deletes a record. `defragmented`: what its moves have cost."""

    projects: dict[str, Project | None] = field(default_factory=dict)
    jobs: dict[str, JobRecord | None] = field(default_factory=dict)
    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    defragmented: scheduler.Defragmented | None = None


class JobBook:
    """Jobs by uid, workers by id. `nodes` are the scheduler's nodes by name, `promised` what jobs are promised.

    `expected_starts` are those of waiting jobs, as far as they are known: kept in memory, and shown by all views, as is
    the `accuracy` of past ones. `conditional` are the jobs whose starts have conditions that are not met, `dependents`
    those of them that wait for a name in a project, `array_jobs` all of an array that have not ended. `succeeded` are
    the records of jobs that have, by project; `successes` counts the changes of these, of each project. `notify`
    receives what people outside of the cluster are informed of, and must return at once.
    """

    notify: Callable[[Notification], None] = staticmethod(lambda _: None)

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.nodes = nodes
        self.jobs: dict[str, JobRecord] = {}
        self.workers: dict[str, WorkerRecord] = {}
        self._workers_of: dict[str, list[str]] = {}
        self.promised: dict[str, tuple[scheduler.Placement, ...]] = {}
        self.expected_starts: dict[str, ExpectedStart] = {}
        self.accuracy = Accuracy()
        self.conditional: dict[str, None] = {}
        self.dependents: dict[tuple[str, str], dict[str, None]] = {}
        self.array_jobs: dict[tuple[str, str, int], dict[str, None]] = {}
        self.succeeded: dict[str, dict[str, JobRecord]] = {}
        self.successes: Counter[str] = Counter()
        self._uids: dict[tuple[str, str], str] = {}

    def uid_of(self, project: str, name: str) -> str | None:
        """Return the uid of the project's job of this name."""
        return self._uids.get((project, name))

    def expected_start(self, uid: str) -> ExpectedStart | None:
        """Return when the job is expected to start; None where that is unknown, as of one that is held."""
        reason = self.jobs[uid].status.reason
        return None if reason is not None and reason.code.holds else self.expected_starts.get(uid)

    def workers_of(self, uid: str) -> list[WorkerRecord]:
        """Return all stored workers of a job, oldest first."""
        return [self.workers[worker] for worker in self._workers_of.get(uid, ())]

    def attempt_of(self, job: JobRecord) -> list[WorkerRecord]:
        """Return the workers of the job's present attempt."""
        return [worker for worker in self.workers_of(job.uid) if worker.attempt == job.attempt]

    def alive_of(self, uid: str) -> list[WorkerRecord]:
        """Return the workers of a job that may still hold devices."""
        return [worker for worker in self.workers_of(uid) if worker.alive]

    def wanted_of(self, uid: str) -> list[str]:
        """Return the workers of a job that have not been asked to leave."""
        return [record.worker.id for record in self.alive_of(uid) if not record.released]

    def new_promises(self, plan: scheduler.Plan) -> dict[str, tuple[scheduler.Placement, ...]]:
        """Return the placements that the plan promises otherwise than recorded, by job; () ends a promise."""
        changed = scheduler.changed_promises(self.promised, plan)
        return {uid: found for uid, found in changed.items() if uid in self.jobs}

    def scheduler_events(self, change: Change) -> Iterator[scheduler.Event]:
        """Yield the scheduler events of a change; must be called before `apply_change`."""
        recalled: dict[str, list[WorkerRecord]] = {}
        for uid, job in change.jobs.items():
            yield from job_announced(self.jobs.get(uid), job)
            if uid not in self.jobs:
                recalled[uid] = []
        for name, worker in change.workers.items():
            if (of_job := recalled.get(worker.worker.job_uid)) is not None:
                of_job.append(worker)
            else:
                yield from worker_changed(self.workers.get(name), worker)
        for uid, workers in recalled.items():
            if (job := change.jobs[uid]) is not None:
                yield from run_recalled(job, workers)
        for uid, job in change.jobs.items():
            yield from job_changed(self.jobs.get(uid), job)
        if change.defragmented is not None:
            yield change.defragmented

    def apply_change(self, change: Change) -> None:
        """Apply a change to the records; a job of None is removed with its workers."""
        for worker in change.workers.values():
            self.put_worker(worker)
        for uid, job in change.jobs.items():
            if job is None:
                self.remove_job(uid)
            else:
                self.put_job(job)
        for event in change.events:
            if (of := self.jobs.get(event.job_uid)) and (one := notification_of(of, event)) is not None:
                self.notify(one)

    def put_job(self, job: JobRecord) -> None:
        """Add or replace the job's record."""
        if job.uid not in self.jobs:
            self._uids[job.spec.project, job.spec.name] = job.uid
        self._index_success(job.uid, job)
        self.jobs[job.uid] = job
        self._index_conditions(job)
        if job.status.phase is not Phase.PENDING:
            self.expected_starts.pop(job.uid, None)
            if job.status.started_at is not None:
                self.accuracy.started(job.uid, job.status.started_at)
        if job.promised:
            self.promised[job.uid] = job.promised
        else:
            self.promised.pop(job.uid, None)

    def _index_success(self, uid: str, job: JobRecord | None) -> None:
        before = self.jobs.get(uid)
        for one in (before, job):
            if before is not job and one is not None and one.status.phase is Phase.SUCCEEDED:
                self.successes[one.spec.project] += 1
        if before is not None:
            self.succeeded.get(before.spec.project, {}).pop(uid, None)
        if job is not None and job.status.phase is Phase.SUCCEEDED:
            self.succeeded.setdefault(job.spec.project, {})[uid] = job

    def _index_conditions(self, job: JobRecord) -> None:
        if job.conditional:
            self.conditional[job.uid] = None
            for text in job.spec.after:
                self.dependents.setdefault((job.spec.project, parse_after(text).name), {})[job.uid] = None
        else:
            self._leave_conditional(job)
        if (key := job.array_key) is not None:
            self.array_jobs.setdefault(key, {})[job.uid] = None
            if job.status.phase.final:
                self._leave_array(job)

    def _leave_conditional(self, job: JobRecord) -> None:
        if job.uid not in self.conditional:
            return
        del self.conditional[job.uid]
        for key in {(job.spec.project, parse_after(text).name) for text in job.spec.after}:
            waiting = self.dependents[key]
            del waiting[job.uid]
            if not waiting:
                del self.dependents[key]

    def _leave_array(self, job: JobRecord) -> None:
        if (key := job.array_key) is None:
            return
        members = self.array_jobs.get(key, {})
        members.pop(job.uid, None)
        if not members:
            self.array_jobs.pop(key, None)

    def put_worker(self, record: WorkerRecord) -> None:
        """Add or replace the worker's record."""
        worker = record.worker
        if worker.id not in self.workers:
            self._workers_of.setdefault(worker.job_uid, []).append(worker.id)
        self.workers[worker.id] = record

    def remove_job(self, uid: str) -> list[str]:
        """Remove the job and its workers; return the workers' ids."""
        self._index_success(uid, None)
        if (job := self.jobs.pop(uid, None)) is not None:
            self._leave_array(job)
            self._leave_conditional(job)
            if self.uid_of(job.spec.project, job.spec.name) == uid:
                del self._uids[job.spec.project, job.spec.name]
        self.promised.pop(uid, None)
        self.expected_starts.pop(uid, None)
        workers = self._workers_of.pop(uid, [])
        for worker in workers:
            del self.workers[worker]
        return workers
