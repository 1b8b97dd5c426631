"""Records a plan, or a request to stop a job, as a change of records. Starts and signals no process.

The change is committed before anything is started or stopped, so that a restarted process finds every decision.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api import JobStatus, Occurrence, Phase, Reason, ReasonCode, Worker, WorkerPhase
from kfp_gpuquota.api.quantity import as_number, show_gpus
from kfp_gpuquota.api.resources import other_gpus_of
from kfp_gpuquota.api.wire import Event, EventKind
from kfp_gpuquota.engine.lifecycle import after_worker_exited, settled
from kfp_gpuquota.engine.records import Intent, JobRecord, WorkerRecord, leaving, with_status
from kfp_gpuquota.engine.scheduling import sizes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kfp_gpuquota import scheduler
    from kfp_gpuquota.api import JobSpec
    from kfp_gpuquota.engine.job_book import Change, JobBook


@dataclass
class ChangeRecorder:
    """Writes decisions into `change`. The caller commits it, then starts and stops the workers `started`, `stopped`."""

    state: JobBook
    change: Change
    now: float
    started: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)

    def plan(self, plan: scheduler.Plan) -> None:
        """Record a plan, and what it promises."""
        self.change.defragmented = plan.defragmented
        for evict in plan.evict:
            self._evict(evict)
        for move in plan.move:
            self._move(move)
        for resize in plan.resize:
            self._release(self._job(resize.job), resize.remove, resize.reason)
            self._add_workers(self._job(resize.job), resize.add, resize.reason)
        for bind in plan.bind:
            self._bind(bind)
        for uid, placements in self.state.new_promises(plan).items():
            job = self._job(uid)
            at = job.promised_at if job.promised else self.now
            victims = plan.victims.get(uid, ()) if placements else ()
            self.change.jobs[uid] = msgspec.structs.replace(job, promised=placements, promised_at=at, victims=victims)

    def stop(self, job: JobRecord, intent: Intent, reason: Reason) -> None:
        """Record the stop of a job with this intent; a job without workers gets its final phase at once."""
        job = msgspec.structs.replace(job, intent=intent)
        if intent is Intent.SUSPEND:
            self.note(job, EventKind.JOB_SUSPENDED, reason=reason)
        if not job.status.phase.final:
            job = with_status(job, phase=Phase.STOPPING, reason=reason)
        if alive := [record.worker.id for record in self.state.alive_of(job.uid)]:
            self._release(job, alive, reason)
        else:
            self.record(settled(job, [], self.now))

    def update(self, job: JobRecord, spec: JobSpec) -> None:
        """Give the job what may change while it runs; its youngest workers beyond a new maximum leave."""
        resized = sizes(spec) != sizes(job.spec)
        job = msgspec.structs.replace(job, spec=spec, updated_at=self.now if resized else job.updated_at)
        self.note(job, EventKind.JOB_UPDATED)
        self.change.jobs[job.uid] = job
        alive = [record.worker for record in self.state.alive_of(job.uid) if not record.released]
        surplus = len(alive) - spec.workers_of(spec.largest)
        if surplus > 0 and job.intent is Intent.RUN:
            message = f"shrunk to its new maximum of {show_gpus(spec.largest)}"
            youngest = sorted(alive, key=lambda worker: -worker.index)[:surplus]
            self._release(job, [worker.id for worker in youngest], Reason(code=ReasonCode.USER, message=message))

    def resume(self, job: JobRecord) -> None:
        """Return a suspended job to the queue with its age, one that is still stopping when it has stopped."""
        if job.intent is Intent.SUSPEND:
            job = msgspec.structs.replace(job, intent=Intent.REQUEUE)
        else:
            job = with_status(job, phase=Phase.PENDING, reason=None)
        self.note(job, EventKind.JOB_RESUMED)
        self.record(job)

    def end(
        self,
        record: WorkerRecord,
        code: int | None,
        *,
        at: float | None = None,
        why: Reason | None = None,
        ending: Sequence[WorkerRecord] = (),
    ) -> None:
        """Record the end of a worker's process, and what follows for its job; `ending` workers end at the same time.

        `at` is when it ended, by its machine's clock; None: now.
        """
        ended_at = self.now if at is None else min(self.now, max(at, record.worker.started_at))
        gone = msgspec.structs.replace(record.worker, phase=WorkerPhase.GONE, exit_code=code, finished_at=ended_at)
        record = msgspec.structs.replace(record, worker=gone)
        before = after = self._job(gone.job_uid)
        ended = {each.worker.id for each in (record, *ending)}
        staying = [each for each in self.state.attempt_of(before) if each.worker.id not in ended]
        if record.attempt == before.attempt and not before.status.phase.final:
            alike = [each for each in ending if each.attempt == before.attempt and each.alive]
            after = after_worker_exited(before, record, [*staying, *alike, record], ended_at)
        if why is not None:
            after = with_status(after, reason=why)
        self.note(after, EventKind.WORKER_GONE, worker=gone.id, gpus=-gone.gpus)
        self.change.workers[gone.id] = record
        self.record(after)
        others = [each.worker.id for each in staying if each.alive]
        if others and after.intent is not before.intent:
            self._stop_others(after, others)

    def _stop_others(self, job: JobRecord, others: Iterable[str]) -> None:
        """Record the stop of the remaining workers of a job that fails, or that starts again as a whole."""
        assert job.status.reason is not None
        self._release(with_status(job, phase=Phase.STOPPING), others, job.status.reason)

    def record(self, job: JobRecord) -> None:
        """Replace the job's record; its end and changes of its size are added to the history."""
        before = self.state.jobs.get(job.uid) or msgspec.structs.replace(job, status=JobStatus())  # a new job, else
        if len(job.status.resizes) > len(before.status.resizes):
            last = job.status.resizes[-1]
            self.note(job, EventKind.JOB_RESIZED, gpus=last.to_gpus - last.from_gpus, reason=last.reason)
        if job.status.phase.final and not before.status.phase.final:
            self.note(job, EventKind.JOB_ENDED, reason=job.status.reason)
        deleted = job.status.phase.final and job.intent is Intent.DELETE
        if deleted:
            self.note(job, EventKind.JOB_DELETED)
        self.change.jobs[job.uid] = None if deleted else job

    def note(
        self, job: JobRecord, kind: EventKind, *, worker: str = "", gpus: float = 0, reason: Reason | None = None
    ) -> None:
        """Add an event to the history."""
        spec = job.spec
        self.change.events.append(
            Event(
                revision=0,
                at=self.now,
                kind=kind,
                project=spec.project,
                job=spec.name,
                job_uid=job.uid,
                worker=worker,
                gpus=as_number(gpus),
                reason=reason,
                user=job.submitter if worker else "",
            )
        )

    def _job(self, uid: str) -> JobRecord:
        return self.change.jobs.get(uid) or self.state.jobs[uid]

    def _bind(self, bind: scheduler.Bind) -> None:
        job = self._job(bind.job)
        job = msgspec.structs.replace(job, attempt=job.attempt + 1, intent=Intent.RUN)
        job = with_status(job, phase=Phase.STARTING, reason=bind.reason, started_at=self.now, result_worker=None)
        self.note(job, EventKind.JOB_STARTED, reason=bind.reason)
        self._add_workers(job, bind.placements, bind.reason)

    def _move(self, move: scheduler.Move) -> None:
        """Stop a worker that is to run elsewhere, and record it: the other place is planned again when it has left."""
        job = self._job(move.job)
        reason = move.reason
        if not job.managed:
            message = f"{reason.message}; its process is started again there, and what it did not save is lost"
            reason = msgspec.structs.replace(reason, message=message)
        self.note(job, EventKind.WORKER_MOVED, worker=move.worker, reason=reason)
        job = with_status(job, moves=job.status.moves + 1, last_move=Occurrence(at=self.now, reason=reason))
        self._release(job, (move.worker,), reason)

    def _evict(self, evict: scheduler.Evict) -> None:
        job = msgspec.structs.replace(self._job(evict.job), intent=Intent.REQUEUE)
        job = with_status(
            job,
            phase=Phase.STOPPING,
            reason=evict.reason,
            evictions=job.status.evictions + 1,
            last_eviction=Occurrence(at=self.now, reason=evict.reason),
        )
        self.note(job, EventKind.JOB_EVICTED, reason=evict.reason)
        self._release(job, [record.worker.id for record in self.state.alive_of(job.uid)], evict.reason)

    def _add_workers(self, job: JobRecord, placements: Iterable[scheduler.Placement], reason: Reason) -> None:
        for placement in placements:
            worker = Worker(
                id=f"{job.uid}-{job.next_index}",
                job_uid=job.uid,
                index=job.next_index,
                node=placement.node,
                devices=placement.devices,
                share=job.spec.share_of(self.state.nodes[placement.node].gpu_memory_mib),
                other_gpus=other_gpus_of(job.spec),
                started_at=self.now,
            )
            job = msgspec.structs.replace(job, next_index=job.next_index + 1)
            self.change.workers[worker.id] = WorkerRecord(worker=worker, attempt=job.attempt, started_for=reason)
            self.started.append(worker.id)
            self.note(job, EventKind.WORKER_STARTED, worker=worker.id, gpus=worker.gpus)
        self.change.jobs[job.uid] = with_status(job, reason=reason)

    def _release(self, job: JobRecord, workers: Iterable[str], reason: Reason) -> None:
        """Record workers as leaving; they hold their devices until they have exited."""
        for worker in workers:
            record = self.change.workers.get(worker) or self.state.workers[worker]
            self.change.workers[worker] = leaving(record, self.now, reason)
            self.stopped.append(worker)
        self.change.jobs[job.uid] = with_status(job, reason=reason)
