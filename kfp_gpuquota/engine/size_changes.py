"""Records each change of a running job's size, with its own cause; the same for every kind of cluster.

Invariant: an entry leads from the size before to the size after, and its reason is of the workers that made the
difference: what they were started or released for, or how they were lost.

Rejected: one pending reason of the job, set by a decision and used by the next change. A decision reaches the training
in pieces (two workers that join at different times), late, or together with the loss of another worker: the reasons of
other changes, in the wrong direction, were the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api import Reason, ReasonCode, Resize, WorkerPhase
from kfp_gpuquota.api.quantity import show_gpus
from kfp_gpuquota.engine.records import Intent, JobRecord, WorkerRecord, with_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.membership import AnnounceCommit


def after_commit(
    job: JobRecord, workers: Sequence[WorkerRecord], commit: AnnounceCommit, now: float
) -> tuple[JobRecord, list[WorkerRecord]]:
    """Return the job and its ranked workers after a complete generation; `workers` are those of the present attempt."""
    ranks = {worker: rank for rank, worker in enumerate(commit.members)}
    ranked = [_with_rank(record, ranks[record.worker.id]) for record in workers if record.worker.id in ranks]
    before = set(job.members) if job.managed else set()
    if job.managed and not before:  # recorded by an earlier version, or by a controller that is gone
        before = {record.worker.id for record in workers if record.worker.rank is not None}
    # Until its first generation a job's size was that of its processes, which is not what it trained with.
    size = job.size if job.managed else 0
    job = msgspec.structs.replace(job, managed=True, size=size, generation=commit.generation, members=commit.members)
    change = Resize(
        at=now,
        from_gpus=size,
        to_gpus=len(commit.members) * job.spec.worker_gpus,
        generation=commit.generation,
        step=commit.step,
        reason=_NONE,
        pause_ms=round(commit.pause_ms, 1),
        lost_steps=commit.lost_steps,
    )
    joined = [record for record in workers if record.worker.id in ranks and record.worker.id not in before]
    left = [record for record in workers if record.worker.id in before and record.worker.id not in ranks]
    return _resized(job, change, joined, left), ranked


def unmanaged_size(
    job: JobRecord, workers: Sequence[WorkerRecord], now: float, exited: WorkerRecord | None = None
) -> JobRecord:
    """Return the job with the size of its running workers, if it has no membership; `workers` are of its attempt.

    `exited` is the worker whose end was recorded just now: several may have ended at the same moment.

    It has no size until all workers that it starts with run: one that is slower than the others is not a growth.
    """
    if job.managed or job.intent is not Intent.RUN:
        return job
    kept = [record for record in workers if record.alive and not record.released]
    running = [record for record in kept if record.worker.phase is WorkerPhase.RUNNING]
    if job.size == 0 and len(running) < len(kept):
        return job
    return after_processes_changed(job, workers, running, now, exited)


def after_processes_changed(
    job: JobRecord,
    workers: Sequence[WorkerRecord],
    running: Sequence[WorkerRecord],
    now: float,
    exited: WorkerRecord | None = None,
) -> JobRecord:
    """Return a job without a membership: it has the size of its `running` processes, of all `workers` of its attempt.

    Of an equal size nothing is recorded, as at its start and its end.
    """
    gpus = len(running) * job.spec.worker_gpus
    change = Resize(at=now, from_gpus=job.size, to_gpus=gpus, generation=0, step=0, reason=_NONE)
    if gpus >= job.size:
        return _resized(job, change, running, ())
    kept = {record.worker.id for record in running}
    lost = [record for record in workers if record.worker.id not in kept]
    latest = exited if exited in lost else max(lost, key=_left_at, default=None)
    return _resized(job, change, (), () if latest is None else (latest,))


_NONE = Reason(code=ReasonCode.FITS, message="")


def _resized(job: JobRecord, change: Resize, joined: Sequence[WorkerRecord], left: Sequence[WorkerRecord]) -> JobRecord:
    before, after = change.from_gpus, change.to_gpus
    job = msgspec.structs.replace(job, size=after)
    if before in {0, after} or after == 0:
        return job
    cause = _cause_of_growth(joined, before, after) if after > before else _cause_of_loss(job, left, before, after)
    change = msgspec.structs.replace(change, reason=cause)
    return with_status(job, resizes=(*job.status.resizes, change))


def _cause_of_growth(joined: Sequence[WorkerRecord], before: int, after: int) -> Reason:
    newest = max(joined, key=lambda record: record.worker.started_at, default=None)
    cause = None if newest is None else newest.started_for
    if cause is None or newest is None or cause.code is ReasonCode.FITS:
        index = "a worker" if newest is None else f"worker {newest.worker.index}"
        why = f"{index} was ready later than the others"
    elif cause.code is ReasonCode.IDLE_GPUS:
        why = f"{show_gpus(after - before)} {'is' if after - before == 1 else 'are'} idle"
    else:
        why = cause.message
    cause = cause or _NONE
    return msgspec.structs.replace(cause, message=f"expanded from {before} to {after} GPUs: {why}")


def _cause_of_loss(job: JobRecord, left: Sequence[WorkerRecord], before: int, after: int) -> Reason:
    """Return why workers are missing: a loss, which nobody asked for, before a release."""
    lost = [record for record in left if not record.released]
    if lost:
        return _loss(job, lost[-1])
    newest = max(left, key=lambda record: record.released_at or 0.0, default=None)
    cause = None if newest is None else newest.released_for
    if newest is None or cause is None:
        return Reason(code=ReasonCode.WORKER_ENDED, message=f"shrunk from {before} to {after} GPUs: asked to leave")
    why = cause.details.get("why")
    message = f"shrunk from {before} to {after} GPUs: {why}" if why else cause.message
    return msgspec.structs.replace(cause, message=message)


def _loss(job: JobRecord, lost: WorkerRecord) -> Reason:
    """Return how a worker was lost; the exit of one whose process still exists follows, and replaces this."""
    worker, failure = lost.worker, job.status.last_failure
    if failure is not None and failure.reason.details.get("worker") == worker.id:
        return failure.reason
    message = f"worker {worker.index} left by itself, or was lost"
    if lost.killed_for:
        message = f"worker {worker.index} was killed: {lost.killed_for}"
    elif worker.exit_code == 0:
        message = f"worker {worker.index} has ended with exit code 0"
    return Reason(code=ReasonCode.WORKER_ENDED, message=message, details={"worker": worker.id})


def _left_at(record: WorkerRecord) -> float:
    return max(record.released_at or 0.0, record.worker.finished_at or 0.0)


def _with_rank(record: WorkerRecord, rank: int) -> WorkerRecord:
    return msgspec.structs.replace(record, worker=msgspec.structs.replace(record.worker, rank=rank))
