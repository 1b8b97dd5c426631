"""Carries out decisions about jobs, and records what becomes of their workers; the same for every kind of cluster.

    plans, users ──► records, committed ──► workers started and asked to leave, targets of memberships
    ends of workers ──► records, committed ──► targets of memberships

Invariant: a decision is committed before it is carried out, so that a restarted process finds it and carries it out.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kfp_gpuquota.engine.change_recorder import ChangeRecorder
from kfp_gpuquota.engine.job_book import Change
from kfp_gpuquota.engine.lifecycle import after_worker_runs
from kfp_gpuquota.engine.records import with_status
from kfp_gpuquota.engine.size_changes import unmanaged_size
from kfp_gpuquota.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kfp_gpuquota import scheduler
    from kfp_gpuquota.api import Reason
    from kfp_gpuquota.engine.protocols import Memberships, Store, Workers
    from kfp_gpuquota.engine.records import Intent, JobRecord, WorkerRecord


class Decisions:
    """Decisions about the jobs of a store. A commit that fails raises StateFileError, and nothing is carried out."""

    def __init__(self, store: Store, memberships: Memberships, workers: Workers) -> None:
        self._store, self._memberships, self._workers = store, memberships, workers

    @contextmanager
    def decide(self) -> Iterator[ChangeRecorder]:
        """Record decisions; when the block ends, commit them, then carry them out."""
        change = Change()
        recorder = ChangeRecorder(self._store, change, self._store.clock())
        yield recorder
        self._store.commit(change)
        self._start(recorder.started)
        self.release(recorder.stopped)
        for uid in [uid for uid, job in change.jobs.items() if job is None]:
            self._memberships.close(uid)
            self._workers.forget_job(uid)

    def plan(self, plan: scheduler.Plan) -> None:
        """Carry out a plan, and note why jobs wait."""
        for uid, reason in plan.waiting.items():
            self._store.note_waiting(uid, reason)
        if not plan.empty or self._store.new_promises(plan) or plan.defragmented is not None:
            with self.decide() as recorder:
                recorder.plan(plan)

    def stop(self, job: JobRecord, intent: Intent, reason: Reason) -> None:
        """Stop the job with this intent."""
        with self.decide() as recorder:
            recorder.stop(job, intent, reason)

    def stop_unless_over(self, uid: str, intent: Intent, reason: Reason) -> None:
        """Stop the job with this intent, unless it was deleted, has ended or is being stopped permanently."""
        job = self._store.jobs.get(uid)
        if job is not None and not job.over:
            self.stop(job, intent, reason)

    def explain(self, uid: str, reason: Reason) -> None:
        """Record what keeps the job from what was decided, until the next decision about it."""
        with self._store.noting(uid) as recorder:
            recorder.record(with_status(self._store.jobs[uid], reason=reason))

    def worker_runs(self, record: WorkerRecord) -> None:
        """Record that a worker's process runs; `record` is as it is now."""
        uid = record.worker.job_uid
        with self._store.noting(record.worker.id) as recorder:
            recorder.change.workers[record.worker.id] = record
            recorder.record(after_worker_runs(self._store.jobs[uid]))
        self.workers_changed(uid)

    def release(self, workers: Iterable[str]) -> None:
        """Ask workers to leave that are recorded as leaving."""
        records = [self._store.workers[worker] for worker in workers]
        for uid in dict.fromkeys(record.worker.job_uid for record in records):
            self.update_target(uid)
        for record in records:
            self._workers.ask_to_leave(record)

    def worker_ended(
        self,
        record: WorkerRecord,
        code: int | None,
        *,
        at: float | None = None,
        why: Reason | None = None,
        ending: Sequence[WorkerRecord] = (),
    ) -> None:
        """Record that a worker's process has ended `at` this time; `why` if more than its exit code is known.

        `ending` are workers whose ends are recorded next: they count as alive until then, and are not asked to leave.
        """
        with self.decide() as recorder:
            recorder.end(record, code, at=at, why=why, ending=ending)
        uid, worker = record.worker.job_uid, record.worker.id
        self._memberships.worker_exited(uid, worker, finished=code == 0 and not record.released)
        if uid in self._store.jobs:
            self.workers_changed(uid, exited=self._store.workers.get(worker))

    def workers_changed(self, uid: str, *, exited: WorkerRecord | None = None) -> None:
        """Pass the job's workers to its membership, and record the size that a job without one has."""
        if not self._store.alive_of(uid):
            self._memberships.close(uid)
            return
        self.update_target(uid)
        job = self._store.jobs[uid]
        after = unmanaged_size(job, self._store.attempt_of(job), self._store.clock(), exited)
        if after != job:
            with self._store.noting(uid) as recorder:
                recorder.record(after)

    def update_target(self, uid: str) -> None:
        """Set the target of the job's membership: all workers that have not been asked to leave."""
        with suppress(NotFoundError):
            self._memberships.set_target(uid, self._store.wanted_of(uid))

    def _start(self, workers: Iterable[str]) -> None:
        by_job: dict[str, list[WorkerRecord]] = {}
        for record in (self._store.workers[worker] for worker in workers):
            by_job.setdefault(record.worker.job_uid, []).append(record)
        for uid, started in by_job.items():
            job = self._store.jobs[uid]
            if len(started) == len(self._store.attempt_of(job)):
                self._memberships.close(uid)  # that of an earlier start: `start_workers` opens another one
            else:
                self.update_target(uid)
            self._workers.start_workers(job, started)
