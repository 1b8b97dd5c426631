"""Converts parts of a job's status: its progress, its expected start, its changes of size, what last happened to it.

Only the last changes are kept: each change writes the whole status, which must not grow without bound.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api import ExpectedStart, JobStatus, Occurrence, Phase, Progress, Reason, ReasonCode, Resize
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import JobOccurrence, SizeChange, StartRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob, TrainingProgress

KEPT: Final = 20


def status_of_object(job: ElasticJob) -> JobStatus:
    """Return the job's status as its object has it, without its workers."""
    meta, status = job.metadata, job.status
    return JobStatus(
        phase=Phase(status.phase or Phase.PENDING),
        reason=reason_of(status.reason, status.message) if status.message else None,
        restarts=status.restarts,
        evictions=status.evictions,
        last_eviction=occurrence_of(status.last_eviction),
        last_failure=occurrence_of(status.last_failure),
        moves=status.moves,
        last_move=occurrence_of(status.last_move),
        exit_code=status.exit_code,
        submitted_at=seconds(meta.creation_timestamp) or 0.0,
        eligible_at=seconds(status.eligible_time),
        started_at=seconds(status.start_time),
        finished_at=seconds(status.completion_time),
        result_worker=status.result_worker,
        progress=progress_of(status.progress),
        resizes=tuple(map(_resize, status.resizes)),
        spent=status.spent_seconds,
        counted_until=seconds(status.counted_until),
    )


def seconds(at: datetime | None) -> float | None:
    """Return a time of an object in seconds since 1970."""
    return None if at is None else at.timestamp()


def size_changes(resizes: Sequence[Resize]) -> tuple[SizeChange, ...]:
    """Return the last changes of size, for the status."""
    return tuple(map(_size_change, resizes[-KEPT:]))


def occurrence_of(stored: JobOccurrence | None) -> Occurrence | None:
    """Return what last happened to a job from its status."""
    return (
        None
        if stored is None
        else Occurrence(at=stored.time.timestamp(), reason=reason_of(stored.reason, stored.message))
    )


def stored_occurrence(happened: Occurrence | None) -> JobOccurrence | None:
    """Return what last happened to a job, for its status."""
    if happened is None:
        return None
    at = datetime.fromtimestamp(int(happened.at), UTC)
    return JobOccurrence(time=at, reason=happened.reason.code.value, message=happened.reason.message)


def reason_of(code: str, message: str) -> Reason:
    """Return the reason; an unknown code, of another version, becomes FITS."""
    known = {each.value for each in ReasonCode}
    return Reason(code=ReasonCode(code) if code in known else ReasonCode.FITS, message=message)


def _size_change(resize: Resize) -> SizeChange:
    return SizeChange(
        time=datetime.fromtimestamp(round(resize.at, 3), UTC),
        from_gpus=resize.from_gpus,
        to_gpus=resize.to_gpus,
        generation=resize.generation,
        step=resize.step,
        reason=resize.reason.code.value,
        message=resize.reason.message,
        pause_ms=resize.pause_ms,
        lost_steps=resize.lost_steps,
    )


def _resize(stored: SizeChange) -> Resize:
    return Resize(
        at=stored.time.timestamp(),
        from_gpus=stored.from_gpus,
        to_gpus=stored.to_gpus,
        generation=stored.generation,
        step=stored.step,
        reason=reason_of(stored.reason, stored.message),
        pause_ms=stored.pause_ms,
        lost_steps=stored.lost_steps,
    )


def progress_of(stored: TrainingProgress | None) -> Progress | None:
    """Return the training's progress from the status."""
    return None if stored is None else msgspec.convert(stored, Progress, from_attributes=True)


def start_range(expected: ExpectedStart) -> StartRange:
    """Return the range in whole minutes, which is as exact as it can be."""
    earliest, latest = (round(at / 60) * 60 for at in (expected.earliest, expected.latest))
    return StartRange(datetime.fromtimestamp(earliest, UTC), datetime.fromtimestamp(latest, UTC))


def expected_start_of(stored: StartRange | None) -> ExpectedStart | None:
    """Return the expected start from the status."""
    if stored is None:
        return None
    return ExpectedStart(earliest=stored.earliest.timestamp(), latest=stored.latest.timestamp())
