"""Why a request, or the end of a launcher or a controller, stops a job; the same sentences on every kind of cluster."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Reason, ReasonCode

if TYPE_CHECKING:
    from kfp_gpuquota.engine.records import JobRecord

DELETED: Final = Reason(code=ReasonCode.USER, message="deleted by a user")
SUSPENDED: Final = Reason(code=ReasonCode.SUSPENDED, message="suspended by a user")
CANCELLED: Final = Reason(code=ReasonCode.USER, message="cancelled by a user")


def ran_too_long(job: JobRecord) -> Reason:
    """Return why a job fails that has run for its maximum run time."""
    starts = " in all its starts" if job.ran_s else ""
    message = f"it has run for {job.spec.max_runtime_s:g} s{starts}, which is its maximum run time"
    return Reason(code=ReasonCode.RAN_TOO_LONG, message=message)


def gpus_unused(
    policy: str, since: float, suspended_at: float | None, *, preemptible_at: float | None = None, needed_by: str = ""
) -> Reason:
    """Return why a job's owner is warned, or without `suspended_at` why it is suspended; times since the epoch.

    `preemptible_at` is from when on others may have its GPUs, `needed_by` the project that needs them now.
    """
    began = _utc(since)
    message = f"its GPUs have been unused since {began} (policy {policy})"
    if suspended_at is None:
        message = f"its GPUs had been unused since {began} (policy {policy})"
        message += f", and a job of project {needed_by} starts in its place" if needed_by else ""
        return Reason(code=ReasonCode.GPUS_UNUSED, message=message, details={"unused_since": since})
    message += f"; unless it uses one, it is suspended at {_utc(suspended_at)}"
    details: dict[str, str | int | float] = {"unused_since": since, "suspended_at": suspended_at}
    if preemptible_at is not None:
        message += f", or from {_utc(preemptible_at)} on for a job that needs them"
        details["preemptible_at"] = preemptible_at
    return Reason(code=ReasonCode.GPUS_UNUSED, message=message, details=details)


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def lease_ended(duration_s: float) -> Reason:
    """Return why a job is cancelled whose lease of `duration_s` was not renewed."""
    message = f"its lease of {duration_s:g} s has expired: its launcher has ended, and none has taken over"
    return Reason(code=ReasonCode.LEASE_ENDED, message=message)


def workers_missing(job: JobRecord, count: int) -> Reason:
    """Return why a job returns to the queue that lacks `count` workers of those that start together."""
    several = "1 worker" if count == 1 else f"{count} workers"
    message = (
        f"{several} of job {job.spec.name} ended or did not start while no controller ran; it returns to the queue"
    )
    return Reason(code=ReasonCode.WORKER_FAILED, message=message, details={"workers": count})
