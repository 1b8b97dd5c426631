"""The records of all ElasticJobs and their workers.

The local cluster stores them in SQLite; here they are stored in the objects' status and in the pods. The rules that
change them are the same (engine/lifecycle.py, engine/change_recorder.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.engine.job_book import Change
from kfp_gpuquota.engine.protocols import Store
from kfp_gpuquota.engine.records import with_status
from kfp_gpuquota.engine.start_conditions import hold, settle
from kfp_gpuquota.engine.time_accounting import account, account_all
from kfp_gpuquota.server.membership.service import NotStoredYetError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.api import Node, Reason
    from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
    from kfp_gpuquota.cluster.kubernetes.elasticjob.runtime_state import RuntimeState
    from kfp_gpuquota.engine.records import JobRecord, WorkerRecord


EXPLAINED_AGAIN_S: Final = 300.0
RESERVED_AT_ONCE: Final = 32
"""Generations are reserved in blocks of this size, with one write long before they are needed."""


class ElasticJobStore(Store):
    """Records of jobs and workers; devices are assigned and released with the workers' records.

    `runtime_states` are by job. `changed(uid)` is called after a change of a job's state that its status shows, and
    `decided(uid)` after one that is written at once.
    """

    def __init__(
        self,
        emit: Callable[[scheduler.Event], None],
        allocator: DeviceAllocator,
        nodes: Mapping[str, Node],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(nodes)
        self.emit, self._allocator, self.clock = emit, allocator, clock
        self.changed: Callable[[str], None] = lambda _: None
        self.decided: Callable[[str], None] = lambda _: None
        self.runtime_states: dict[str, RuntimeState] = {}
        self._listed = False

    def record(self, job: JobRecord) -> None:
        """Replace the job's record."""
        if job is not self.jobs[job.uid]:
            self.commit(Change(jobs={job.uid: job}))

    def commit(self, change: Change, *, durable: bool = True) -> None:  # noqa: ARG002 (the status is written soon)
        """Apply a change, and emit its events to the scheduler; a job of None is removed with its workers."""
        if self._listed:
            settle(self, change, self.clock())
        else:
            hold(change)
        self._apply(change)

    def submit_again(self, job: JobRecord) -> None:
        """Replace a waiting job by one with another specification: nobody that waits for it takes it for deleted."""
        self._apply(Change(jobs={job.uid: None}))
        self.commit(Change(jobs={job.uid: job}))

    def _apply(self, change: Change) -> None:
        account_all(self, change, self.clock())
        events = [event for event in self.scheduler_events(change) if self._listed or not self._ends_new_job(event)]
        changed = {record.worker.job_uid: True for record in change.workers.values()}
        changed |= {uid: _is_decision(self.jobs.get(uid), job) for uid, job in change.jobs.items()}
        self.apply_change(change)
        for event in events:
            self.emit(event)
        for uid, decided in changed.items():
            if uid in self.jobs and uid in self.runtime_states:
                (self.decided if decided else self.changed)(uid)

    def listed(self) -> None:
        """Remove jobs that are being stopped permanently from the scheduler's queue, after all pods were listed.

        Not earlier: the scheduler forgets a removed job without workers, and the GPUs of workers that are listed after
        it would count as idle while they exit.
        """
        self._listed = True
        for uid, job in self.jobs.items():
            if job.ending and not job.status.phase.final:
                self.emit(scheduler.JobRemoved(uid))

    def examine_conditions(self) -> None:
        """Examine the conditions of all starts, after all jobs were listed and those with pods count as started.

        Not earlier: a job that was not listed yet would count as deleted.
        """
        self.commit(Change(jobs={uid: self.jobs[uid] for uid in self.conditional}))

    def _ends_new_job(self, event: scheduler.Event) -> bool:
        return isinstance(event, scheduler.JobRemoved) and event.uid not in self.jobs

    def reserve_generation(self, uid: str, generation: int) -> None:
        """Reserve a block of generation numbers if needed; raise NotStoredYetError until this number is stored."""
        state = self.runtime_states[uid]
        if generation + RESERVED_AT_ONCE // 2 > state.reserved:
            state.reserved = max(state.reserved, generation) + RESERVED_AT_ONCE
            self.changed(uid)
        if generation > state.durable:
            raise NotStoredYetError(f"generation {generation} of job {uid}")

    def note_waiting(self, uid: str, reason: Reason | None) -> None:
        """Record why a job waits. Only amounts differ: not for a while, since they change with every pod that ends."""
        job, state, now = self.jobs[uid], self.runtime_states[uid], self.clock()
        if state.held_back or job.status.reason == reason:
            return
        if _is_same_cause(job.status.reason, reason) and 0 <= now - state.explained_at < EXPLAINED_AGAIN_S:
            return
        state.explained_at = now
        self.jobs[uid] = account(job, with_status(job, reason=reason), now)
        self.changed(uid)

    def promise(self, event: scheduler.PlacementsPromised) -> None:
        """Record the placements of the job's next workers that an earlier controller has promised."""
        promised, at, victims = event.placements, event.at, event.victims
        self.record(msgspec.structs.replace(self.jobs[event.job], promised=promised, promised_at=at, victims=victims))

    def put_worker(self, record: WorkerRecord) -> None:
        """Add or update a worker; it holds its devices until it has exited."""
        super().put_worker(record)
        worker, held = record.worker, self._allocator.held(record.worker.id)
        if not record.alive and (state := self.runtime_states.get(worker.job_uid)) is not None:
            state.worker_ended(worker)
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


def _is_decision(before: JobRecord | None, after: JobRecord | None) -> bool:
    """Return whether more has changed than the progress of a training."""
    return before is None or after is None or before.status.progress is after.status.progress


def _is_same_cause(before: Reason | None, after: Reason | None) -> bool:
    return before is not None and after is not None and _cause(before) == _cause(after)


def _cause(reason: Reason) -> tuple[object, ...]:
    return reason.code, reason.project, reason.beneficiary
