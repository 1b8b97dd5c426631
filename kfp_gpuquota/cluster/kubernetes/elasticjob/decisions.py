"""Carries out decisions about ElasticJobs: records them, then changes pods and memberships."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Phase
from kfp_gpuquota.cluster.jobs.change_recorder import ChangeRecorder
from kfp_gpuquota.cluster.jobs.job_book import Change
from kfp_gpuquota.cluster.jobs.records import with_status

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kfp_gpuquota.api import Reason, Worker
    from kfp_gpuquota.cluster.jobs.records import Intent, JobRecord
    from kfp_gpuquota.cluster.kubernetes.elasticjob.events import JobPartEvents, StatusRequests
    from kfp_gpuquota.cluster.kubernetes.elasticjob.membership.reporting import JobMembership
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import Book
    from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_manager import WorkerPods


EXPLAINED_AGAIN_S: Final = 300.0


class Decisions:
    """Decisions about jobs."""

    def __init__(
        self,
        book: Book,
        membership: JobMembership,
        workers: WorkerPods,
        *,
        statuses: StatusRequests,
        events: JobPartEvents,
    ) -> None:
        self._book, self._membership, self._workers = book, membership, workers
        self._statuses, self._events = statuses, events

    def plan(self, plan: scheduler.Plan) -> None:
        """Carry out the plan's decisions about ElasticJobs; other decisions are ignored here."""
        own = scheduler.Plan(
            bind=tuple(b for b in plan.bind if b.job in self._book.jobs),
            resize=tuple(r for r in plan.resize if r.job in self._book.jobs),
            evict=tuple(e for e in plan.evict if e.job in self._book.jobs),
            move=tuple(m for m in plan.move if m.job in self._book.jobs),
            promises=plan.promises,
        )
        if not own.empty or self._book.new_promises(own):
            with self.recording() as recorder:
                recorder.plan(own)
        for uid, reason in plan.waiting.items():
            self._note_waiting(uid, reason)

    def _note_waiting(self, uid: str, reason: Reason) -> None:
        """Record why a job waits. Only amounts differ: not for a while, since they change with every pod that ends."""
        job = self._book.jobs.get(uid)
        if job is None or self._book.runtime_states[uid].held_back or job.status.reason == reason:
            return
        state, now = self._book.runtime_states[uid], self._book.now()
        if _same_cause(job.status.reason, reason) and 0 <= now - state.explained_at < EXPLAINED_AGAIN_S:
            return
        state.explained_at = now
        self._book.jobs[uid] = with_status(job, reason=reason)
        self._statuses.changed(uid)

    @contextmanager
    def recording(self) -> Iterator[ChangeRecorder]:
        """Record decisions; when the block ends, commit them, then carry them out."""
        change = Change()
        recorder = ChangeRecorder(self._book, change, self._book.now())
        yield recorder
        self._book.commit(change)
        self._start_all(recorder.started)
        self.stop_all(recorder.stopped)
        for uid in change.jobs:
            if uid in self._book.runtime_states:
                self._events.job_decided(uid)

    def stop(self, job: JobRecord, intent: Intent, reason: Reason) -> None:
        """Stop the job with this intent."""
        with self.recording() as recorder:
            recorder.stop(job, intent, reason)

    def stop_all(self, workers: Iterable[str]) -> None:
        """Stop these workers: remove them from the membership's target, and delete their pods."""
        records = [self._book.workers[worker] for worker in workers]
        for uid in dict.fromkeys(record.worker.job_uid for record in records):
            self._membership.update_target(uid)
        for record in records:
            self._workers.delete(record.worker.id, self._book.jobs[record.worker.job_uid].spec.grace_period_s)

    def _start_all(self, workers: Iterable[str]) -> None:
        by_job: dict[str, list[Worker]] = {}
        for worker in workers:
            record = self._book.workers[worker].worker
            by_job.setdefault(record.job_uid, []).append(record)
        for uid, started in by_job.items():
            job = self._book.jobs[uid]
            if job.status.phase is Phase.STARTING:
                self._book.runtime_states[uid].start_anew()
                self._membership.open(job)
            else:
                self._membership.update_target(uid)
            self._workers.make(uid, started)


def _same_cause(before: Reason | None, after: Reason) -> bool:
    cause = after.code, after.project, after.beneficiary
    return before is not None and (before.code, before.project, before.beneficiary) == cause
