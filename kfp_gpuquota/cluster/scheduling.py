"""What the scheduler is to be told when a record changes: derived in one place, so that nobody can forget to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Phase
from kfp_gpuquota.cluster.records import Intent, JobRecord, WorkerRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_AGAIN = 1e12
"""In seconds since the epoch: later than any run lasts."""


def job_announced(before: JobRecord | None, after: JobRecord | None) -> Iterator[scheduler.Event]:
    """A job that was not there before; to be told before anything about its workers.

    Also one that is being stopped for good, as a daemon that starts finds it: its workers hold GPUs.
    """
    if before is None and after is not None and not after.status.phase.final:
        yield scheduler.JobSubmitted(after.uid, after.spec, after.status.submitted_at)


def job_changed(before: JobRecord | None, after: JobRecord | None) -> Iterator[scheduler.Event]:
    """What became of a job; to be told after what became of its workers."""
    known = before or after
    if known is None or known.status.phase.final or (before is not None and _over(before)):
        return
    if after is None or _over(after):
        yield scheduler.JobRemoved(known.uid)
        return
    if _suspended(after) != (before is not None and _suspended(before)):
        yield scheduler.JobSuspended(after.uid) if _suspended(after) else scheduler.JobResumed(after.uid)
    if before is not None and before.spec is not after.spec and _sizes(before) != _sizes(after):
        yield scheduler.JobUpdated(after.uid, after.spec)
    if after.completing and not (before is not None and before.completing):
        yield scheduler.JobCompleting(after.uid)
    yield from _growth(before, after)
    yield from _progress(before, after)


def _growth(before: JobRecord | None, after: JobRecord) -> Iterator[scheduler.Event]:
    """A job that a growth failed for is not grown again until it has returned to the queue."""
    failed, failed_before = after.growth_failed, before.growth_failed if before else None
    if failed is not None and failed != failed_before:
        yield scheduler.JobDeferred(after.uid, NOT_AGAIN, failed)
    elif failed is None and failed_before is not None:
        yield scheduler.JobDeferred(after.uid, 0.0, failed_before)


def worker_changed(before: WorkerRecord | None, after: WorkerRecord) -> Iterator[scheduler.Event]:
    """A worker that holds its devices from now on, was told to go, or is gone."""
    worker = after.worker
    if before is None and after.alive:
        yield scheduler.WorkerStarted(worker.id, worker.job_uid, worker.node, worker.devices, worker.started_at)
    if after.alive and after.released and not (before is not None and before.released):
        yield scheduler.WorkerLeaving(worker.id, after.released_at)
    if before is not None and before.alive and not after.alive:
        yield scheduler.WorkerGone(worker.id, worker.finished_at)


def _progress(before: JobRecord | None, after: JobRecord) -> Iterator[scheduler.Event]:
    """What the training said that it had not said before."""
    said = after.status.progress
    if said is None or (before is not None and before.status.progress == said):
        return
    yield scheduler.ProgressReported(
        after.uid, said.step, said.at, said.checkpoint_at, throughput=said.throughput, workers=said.workers
    )


def _sizes(job: JobRecord) -> tuple[int, int, int, int, int]:
    """What an update of a job may change for the scheduler."""
    spec = job.spec
    return spec.smallest, spec.gpus, spec.largest, spec.worker_gpus, spec.effective_priority


def _over(job: JobRecord) -> bool:
    """It ended, or is being stopped for good."""
    return job.status.phase.final or job.ending


def _suspended(job: JobRecord) -> bool:
    return job.status.phase is Phase.SUSPENDED or job.intent is Intent.SUSPEND
