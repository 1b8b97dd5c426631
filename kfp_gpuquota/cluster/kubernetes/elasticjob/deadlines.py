"""Computes an ElasticJob's next deadline. Pure. Times are in seconds since 1970."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob
    from kfp_gpuquota.engine.records import JobRecord


class Due(StrEnum):
    """The event of a deadline."""

    LEASE_ENDED = "lease-ended"
    RAN_TOO_LONG = "ran-too-long"
    FORGET = "forget"


class Deadline(NamedTuple):
    """A job's next deadline."""

    at: float
    due: Due


def next_deadline(job: ElasticJob, record: JobRecord, *, lease_seen_at: float) -> Deadline | None:
    """Return the job's next deadline, if any.

    `lease_seen_at` is when this process saw the lease's renewal, since the client's clock may differ.
    """
    status, spec = record.status, job.spec
    if status.phase.final:
        if spec.ttl_seconds_after_finished is None or status.finished_at is None:
            return None
        return Deadline(status.finished_at + spec.ttl_seconds_after_finished, Due.FORGET)
    if record.ending:
        return None
    due: list[Deadline] = []
    if spec.lease is not None and spec.lease.holder:
        due.append(Deadline(lease_seen_at + spec.lease.duration_seconds, Due.LEASE_ENDED))
    if record.runs_until is not None:
        due.append(Deadline(record.runs_until, Due.RAN_TOO_LONG))
    return min(due, default=None)
