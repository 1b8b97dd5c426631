"""Derives the scheduler's events from changes of records, in one module so that no change is missed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota import scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kfp_gpuquota.api import JobSpec
    from kfp_gpuquota.engine.records import JobRecord, WorkerRecord

NEVER_AGAIN = 1e12
"""A time in seconds since the epoch, later than the end of any run."""


def job_announced(before: JobRecord | None, after: JobRecord | None) -> Iterator[scheduler.Event]:
    """Yield the event for a new job, which must precede the events of its workers.

    Also for a job that is being stopped permanently when the cluster's process starts: its workers hold GPUs.
    """
    if before is None and after is not None and not after.status.phase.final:
        yield scheduler.JobSubmitted(after.uid, after.spec, after.status.queued_at, user=after.submitter)


def job_changed(before: JobRecord | None, after: JobRecord | None) -> Iterator[scheduler.Event]:
    """Yield the events for a changed job, which must follow the events of its workers."""
    job = before or after
    if job is None or job.status.phase.final or (before is not None and before.over):
        return
    if after is None or after.over:
        yield scheduler.JobRemoved(job.uid)
        return
    if before is not None and before.submitter != after.submitter:
        yield scheduler.UserChanged(after.uid, after.submitter)
    yield from _kept_out(before, after)
    if before is not None and before.spec is not after.spec:
        yield from _spec_changed(before, after)
    if after.completing != (before is not None and before.completing):
        yield scheduler.JobCompleting(after.uid, after.completing)
    if after.promised != (() if before is None else before.promised):
        yield scheduler.PlacementsPromised(after.uid, after.promised, after.promised_at, after.victims)
    yield from _growth(before, after)
    yield from _progress(before, after)


def _kept_out(before: JobRecord | None, after: JobRecord) -> Iterator[scheduler.Event]:
    """Keep a job out of the queue that a user has suspended, or that is held.

    Of one that was suspended because its GPUs were unused the reason is kept.
    """
    was = None if before is None or not (before.suspended or before.held) else (before.suspended, before.held)
    if after.suspended or after.held:
        if was != (after.suspended, after.held):
            unused = after.status.reason if after.status.gpus_unused else None
            yield scheduler.JobSuspended(after.uid, unused if after.suspended else after.held)
    elif was is not None:
        yield scheduler.JobResumed(after.uid, after.status.eligible_at)


def _growth(before: JobRecord | None, after: JobRecord) -> Iterator[scheduler.Event]:
    """Defer a job after a failed expansion, until it has returned to the queue."""
    failed, failed_before = after.growth_failed, before.growth_failed if before else None
    if failed is not None and failed != failed_before:
        yield scheduler.JobDeferred(after.uid, NEVER_AGAIN, failed)
    elif failed is None and failed_before is not None:
        yield scheduler.JobDeferred(after.uid, 0.0, failed_before)


def worker_changed(before: WorkerRecord | None, after: WorkerRecord) -> Iterator[scheduler.Event]:
    """Yield the events for a worker that was started, was moved before it ran, was asked to leave, or has exited."""
    worker = after.worker
    if before is not None and before.alive and before.worker.node != worker.node:
        yield scheduler.WorkerMoved(worker.id, worker.node, worker.devices)
    if before is None and after.alive:
        yield scheduler.WorkerStarted(worker.id, worker.job_uid, worker.node, worker.devices, worker.started_at)
    if after.alive and after.released and not (before is not None and before.released):
        yield scheduler.WorkerLeaving(worker.id, after.released_at)
    if before is not None and before.alive and not after.alive:
        yield scheduler.WorkerGone(worker.id, worker.finished_at)


def run_recalled(job: JobRecord, workers: Iterable[WorkerRecord]) -> Iterator[scheduler.Event]:
    """Yield the events of the job's present run again, in the order of their times.

    So the scheduler of a restarted cluster learns also from workers that have exited: when the job grew, shrank, or
    fell below its minimum. Workers of earlier runs that are still exiting come with it.
    """
    if job.status.phase.final:
        return
    found: list[tuple[float, int, scheduler.Event]] = []
    if job.updated_at:
        found.append((job.updated_at, 3, scheduler.JobUpdated(job.uid, job.spec, job.updated_at)))
    for record in workers:
        if record.alive or record.attempt == job.attempt:
            found += _events_of(record)
    yield from (event for _, _, event in sorted(found, key=lambda each: each[:2]))


def _events_of(record: WorkerRecord) -> Iterator[tuple[float, int, scheduler.Event]]:
    worker = record.worker
    at = worker.started_at
    yield at, 0, scheduler.WorkerStarted(worker.id, worker.job_uid, worker.node, worker.devices, at)
    if record.released:
        at = max(at, record.released_at or at)
        yield at, 1, scheduler.WorkerLeaving(worker.id, record.released_at)
    if not record.alive:
        yield max(at, worker.finished_at or at), 2, scheduler.WorkerGone(worker.id, worker.finished_at)


def _progress(before: JobRecord | None, after: JobRecord) -> Iterator[scheduler.Event]:
    """Yield an event for progress that was not reported before; for a job that is read, for each measured size."""
    new = after.status.progress
    if new is None or (before is not None and before.status.progress == new):
        return
    for size in new.sizes if before is None else ():
        yield scheduler.ProgressReported(
            after.uid,
            new.step,
            new.at,
            throughput=size.throughput,
            workers=size.workers,
            batch_size=size.batch_size,
        )
    changes = reversed(after.status.resizes)
    pause_ms = next((change.pause_ms for change in changes if change.pause_ms is not None), None)
    yield scheduler.ProgressReported(
        after.uid,
        new.step,
        new.at,
        new.checkpoint_at,
        throughput=new.throughput,
        workers=new.workers if new.workers is not None or not new.sizes else new.sizes[-1].workers,
        batch_size=new.batch_size,
        noise_scale=new.noise_scale,
        pause_s=None if pause_ms is None else pause_ms / 1000,
    )


def _spec_changed(before: JobRecord, after: JobRecord) -> Iterator[scheduler.Event]:
    """Yield the events for what may change while a job runs; nodes are chosen again for its next workers only."""
    old, new = before.spec, after.spec
    if (sizes(old), old.effective_priority) != (sizes(new), new.effective_priority):
        at = after.updated_at if after.updated_at != before.updated_at else None
        yield scheduler.JobUpdated(after.uid, new, at)
    if _constraints(old) != _constraints(new):
        yield scheduler.ConstraintsChanged(after.uid, new)


def sizes(spec: JobSpec) -> tuple[int, int, int, int]:
    """Return the sizes that an update of a job can change."""
    return spec.smallest, spec.gpus, spec.largest, spec.worker_gpus


def _constraints(spec: JobSpec) -> tuple[object, ...]:
    return spec.node_selector, spec.node_affinity, spec.tolerations
