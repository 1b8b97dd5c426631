"""Decides what happens to a job when one of its workers exits. Pure; the same for every kind of cluster.

| the worker                                   | the job                                                         |
|----------------------------------------------|-----------------------------------------------------------------|
| was asked to leave                           | continues; its intent decides once no worker is left            |
| exited with 0                                | gets no more workers; succeeds once no worker is left           |
| failed, the job is not managed               | fails with its exit code, the other workers are stopped         |
| failed by itself, soon after an expansion    | continues without it, and is not expanded again in this run     |
| failed, managed, other workers are left      | continues without it, up to `max_restarts` times, then fails    |
| killed by a signal, managed, the last worker | returns to the queue, up to `max_restarts` times, then fails    |
| failed by itself, managed, the last worker   | fails with its exit code                                        |
| killed after the training, others are left   | continues: another worker has or will have its result           |
| failed by itself after the training          | fails with its exit code, the other workers are stopped         |
| ended because the machine was restarted      | returns to the queue, also if not managed; not counted          |
| lost with its node, or evicted by it         | continues while others train, else returns to the queue, and    |
|                                              | the other workers are stopped; not counted                      |

Restarts are counted by incident: workers that are lost within `INCIDENT_S` of each other are one incident, so that the
failure of a node with several workers counts once. After the job's `restart_window_s` without an incident the count
starts again at 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api import MeasuredSize, Occurrence, Phase, Progress, Reason, ReasonCode
from kfp_gpuquota.engine.records import KILLED_ABOVE, Intent, JobRecord, WorkerRecord, with_status

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE_ERROR = 2
"""The exit code of a script that uses its libraries or its arguments wrongly, as it would again after a restart."""
INCIDENT_S = 10.0
GROWTH_S = 60.0
"""A worker that fails by itself within this time of an expansion is taken to fail because of the expansion."""
MOST_SIZES = 32
"""The sizes of a training whose measurements are kept over a restart of the cluster."""
_MEANINGS = {126: ": its command cannot be executed", 127: ": its command was not found"}


def after_worker_runs(job: JobRecord) -> JobRecord:
    """Return the job after one of its workers has begun to run."""
    return with_status(job, phase=Phase.RUNNING) if job.status.phase is Phase.STARTING else job


def after_worker_exited(job: JobRecord, exited: WorkerRecord, workers: Sequence[WorkerRecord], now: float) -> JobRecord:
    """Return the job after the end of `exited`, one of `workers`, which are all of the present attempt.

    `now` is when it ended: while no process of the cluster ran, ends that were far apart are reported together.
    """
    if not exited.released and job.intent is Intent.RUN:
        job = _after_own_end(job, exited, workers, now)
    if any(worker.alive for worker in workers):
        return job
    return settled(job, workers, now)


def _after_own_end(job: JobRecord, exited: WorkerRecord, workers: Sequence[WorkerRecord], now: float) -> JobRecord:
    code = exited.worker.exit_code or 0
    if exited.lost_with:
        return _after_loss(job, exited, workers, now)
    if code == 0:
        return msgspec.structs.replace(job, completing=True)
    others = any(worker.alive or finished(worker) for worker in workers)
    if job.completing and others and not _failed_by_itself(job, exited):
        return job  # the training is over, and another worker has or will have its result
    if _is_failed_growth(job, exited, workers, now):
        return _without_growth(job, exited, code, now)
    job = _forgiven(job, now)
    counted = _is_new_incident(job, now)
    may_restart = not counted or job.status.restarts < job.spec.max_restarts
    if code == USAGE_ERROR:  # the workers that replace it would end alike, unless it was its own
        may_restart = may_restart and any(worker.alive and worker.worker.rank is not None for worker in workers)
    recoverable = job.managed and (others or code > KILLED_ABOVE) and may_restart
    recoverable = recoverable and not (job.completing and _failed_by_itself(job, exited))
    why = _failure(exited, code, job, recoverable=recoverable, counted=counted)
    job = with_status(job, restarts=job.status.restarts + (recoverable and counted), exit_code=code, reason=why)
    if counted:
        job = msgspec.structs.replace(job, incident_at=max(now, job.incident_at or now))
    job = _with_failure(job, exited, why, now)
    if not recoverable:
        return msgspec.structs.replace(job, intent=Intent.FAIL)
    return job if others else msgspec.structs.replace(job, intent=Intent.REQUEUE)


def _after_loss(job: JobRecord, lost: WorkerRecord, workers: Sequence[WorkerRecord], now: float) -> JobRecord:
    """Return the job after the loss of a worker's machine, which is no failure of its own and is not counted."""
    others = any(worker.alive or finished(worker) for worker in workers)
    goes_on = job.managed and others
    then = "the others go on" if goes_on else "the job goes back to the queue"
    why = Reason(
        code=ReasonCode.NODE_LOST,
        message=f"worker {lost.worker.index} was lost: {lost.lost_with}; {then}",
        details={"worker": lost.worker.id},
    )
    job = _with_failure(with_status(job, reason=why), lost, why, now)
    return job if goes_on else msgspec.structs.replace(job, intent=Intent.REQUEUE)


def _is_failed_growth(job: JobRecord, exited: WorkerRecord, workers: Sequence[WorkerRecord], now: float) -> bool:
    """Return whether a worker failed by itself while joining a training, or within GROWTH_S of the expansion."""
    code = exited.worker.exit_code or 0
    if not job.managed or not job.size or code > KILLED_ABOVE or not any(worker.alive for worker in workers):
        return False
    if exited.worker.rank is None:
        return True
    last = job.status.resizes[-1] if job.status.resizes else None
    return last is not None and last.to_gpus > last.from_gpus and 0 <= now - last.at <= GROWTH_S


def _with_failure(job: JobRecord, exited: WorkerRecord, why: Reason, now: float) -> JobRecord:
    """The job with the loss of `exited` as its last failure, and as the reason of the change of size that it caused."""
    resizes = job.status.resizes
    last = resizes[-1].reason if resizes else None
    if last and last.code is ReasonCode.WORKER_ENDED and last.details.get("worker") == exited.worker.id:
        resizes = (*resizes[:-1], msgspec.structs.replace(resizes[-1], reason=why))
    return with_status(job, last_failure=Occurrence(at=now, reason=why), resizes=resizes)


def _without_growth(job: JobRecord, exited: WorkerRecord, code: int, now: float) -> JobRecord:
    reason = Reason(
        code=ReasonCode.WORKER_FAILED,
        message=(
            f"worker {exited.worker.index} ended with exit code {code} when the job grew{_error_of(exited)}; "
            "the others train on, and it does not grow again in this run: "
            f"see gpuquota logs {job.spec.name} --worker {exited.worker.index}"
        ),
        details={"exit_code": code, "worker": exited.worker.id},
    )
    job = msgspec.structs.replace(job, growth_failed=reason)
    return _with_failure(with_status(job, reason=reason), exited, reason, now)


def _is_new_incident(job: JobRecord, now: float) -> bool:
    """Return whether a loss now is a new incident, not a part of the one that was counted last."""
    return job.incident_at is None or not abs(now - job.incident_at) <= INCIDENT_S


def _forgiven(job: JobRecord, now: float) -> JobRecord:
    """Return the job with its restarts reset to 0 if the last incident is longer than its restart window ago."""
    if job.incident_at is None or now - job.incident_at < job.spec.restart_window_s:
        return job
    return with_status(job, restarts=0)


def after_reboot(job: JobRecord) -> JobRecord:
    """Return the job after a restart of the machine has ended its workers: it returns to the queue."""
    if job.status.phase.final or job.intent is not Intent.RUN:
        return job
    message = "the machine was restarted; the job returns to the queue"
    reason = Reason(code=ReasonCode.WORKER_FAILED, message=message)
    job = msgspec.structs.replace(job, intent=Intent.REQUEUE)
    return with_status(job, phase=Phase.STOPPING, reason=reason)


def _failed_by_itself(job: JobRecord, exited: WorkerRecord) -> bool:
    """Return whether the worker's program failed (not a signal) and it took part in the training, if there is one."""
    trained = exited.worker.rank is not None or not job.managed
    return trained and 0 < (exited.worker.exit_code or 0) <= KILLED_ABOVE


def missing_workers(job: JobRecord, alive: int, ended: int) -> int:
    """Return how many workers the job lacks that start together, if it cannot continue without them; else 0.

    With a membership the others continue; after a worker has finished, the others end as well.
    """
    if job.managed or job.completing or job.over or job.intent is not Intent.RUN:
        return 0
    return max(0, job.spec.workers_of(job.spec.smallest) - alive - ended)


def members_reported(
    job: JobRecord, workers: Sequence[WorkerRecord], members: Sequence[str]
) -> tuple[JobRecord, list[WorkerRecord]]:
    """Return the job and its `unseen` workers, after a generation's members were reported.

    A worker that ended with 0 while no process of the cluster ran, and is no member, was released: it has not finished.
    """
    unseen = {record.worker.id: record for record in workers if record.unseen}
    judged = [
        msgspec.structs.replace(record, unseen=False, released=record.released or worker not in members)
        for worker, record in unseen.items()
    ]
    others = (record for record in workers if record.worker.id not in unseen)
    if any(record.released for record in judged) and not any(finished(record) for record in (*judged, *others)):
        job = msgspec.structs.replace(job, completing=False)
    return job, judged


def trained(job: JobRecord, step: int, now: float) -> JobRecord:
    """Return the job after its last step was applied: rank 0 may have been lost with its report of that step."""
    progress = job.status.progress or Progress()
    if progress.step < step:
        job = with_status(job, progress=msgspec.structs.replace(progress, step=step, at=now))
    return msgspec.structs.replace(job, completing=True)


def progressed(job: JobRecord, progress: Progress) -> JobRecord:
    """Return the job with the reported progress.

    A new rank 0 does not report checkpoints that another worker saved. What was measured at other sizes is kept: a
    restarted cluster chooses sizes by it.
    """
    before = job.status.progress or Progress()
    saved_at = before.checkpoint_at if progress.checkpoint_at is None else progress.checkpoint_at
    sizes = before.sizes
    if progress.throughput is not None and progress.workers:
        size = MeasuredSize(workers=progress.workers, throughput=progress.throughput, batch_size=progress.batch_size)
        sizes = (*(one for one in sizes if one.workers != size.workers), size)[-MOST_SIZES:]
    return with_status(job, progress=msgspec.structs.replace(progress, checkpoint_at=saved_at, sizes=sizes))


def settled(job: JobRecord, workers: Sequence[WorkerRecord], now: float) -> JobRecord:
    """Return the job after its last worker has exited: its intent decides its phase."""
    match job.intent:
        case Intent.REQUEUE:
            return _requeued(job, now)
        case Intent.SUSPEND:
            return with_status(_requeued(job, now), phase=Phase.SUSPENDED)
        case Intent.CANCEL | Intent.DELETE:
            return with_status(job, phase=Phase.CANCELLED, finished_at=now)
        case Intent.FAIL:
            return with_status(job, phase=Phase.FAILED, finished_at=now)
        case Intent.RUN:
            return _completed(job, workers, now)


def _completed(job: JobRecord, workers: Sequence[WorkerRecord], now: float) -> JobRecord:
    finishers = [worker for worker in workers if finished(worker)]
    if not finishers:  # every worker was asked to leave, one by one
        return _requeued(job, now)
    result = min(finishers, key=lambda w: (w.worker.rank is None, w.worker.rank or 0, w.worker.index))
    return with_status(
        job, phase=Phase.SUCCEEDED, reason=None, exit_code=0, finished_at=now, result_worker=result.worker.id
    )


def _requeued(job: JobRecord, now: float) -> JobRecord:
    ran_s = 0.0 if job.status.started_at is None else max(0.0, now - job.status.started_at)
    job = msgspec.structs.replace(
        job,
        intent=Intent.RUN,
        completing=False,
        managed=False,
        size=0,
        generation=0,
        members=(),
        growth_failed=None,
        ran_s=job.ran_s + ran_s,
    )
    return with_status(job, phase=Phase.PENDING, started_at=None)


def finished(worker: WorkerRecord) -> bool:
    """Return whether the worker has ended with exit code 0 without having been asked to leave."""
    return not worker.alive and not worker.released and worker.worker.exit_code == 0


def _failure(exited: WorkerRecord, code: int, job: JobRecord, *, recoverable: bool, counted: bool) -> Reason:
    how = f"was killed by signal {code - KILLED_ABOVE}" if code > KILLED_ABOVE else f"ended with exit code {code}"
    how += f" ({exited.killed_for})" if exited.killed_for else ""
    how += _error_of(exited) or _MEANINGS.get(code, "")
    then = ""
    if job.completing and _failed_by_itself(job, exited):
        then = ", after its training had ended" if job.managed else ", after another one had ended with 0"
    elif recoverable:
        then = f"; restart {job.status.restarts + counted} of at most {job.spec.max_restarts}"
    elif job.managed and code == USAGE_ERROR:
        then = "; a restart would repeat this error of its script"
    elif job.managed and job.spec.max_restarts and job.status.restarts >= job.spec.max_restarts:
        restarts = "restart is" if job.spec.max_restarts == 1 else f"{job.spec.max_restarts} restarts are"
        then = f"; its {restarts} used up (max_restarts)"
    return Reason(
        code=ReasonCode.WORKER_FAILED,
        message=f"worker {exited.worker.index} {how}{then}",
        details={"exit_code": code, "worker": exited.worker.id},
    )


def _error_of(exited: WorkerRecord) -> str:
    return f": {exited.error}" if exited.error else ""
