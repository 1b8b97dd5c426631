"""What a restarted engine must know of each job: the same for each kind of cluster."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kfp_gpuquota.api.time_spent import time_spent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.api import Occurrence
    from kfp_gpuquota.engine.records import JobRecord


EXACT_S = 1e-4
"""Times in an object's status are in microseconds."""


def facts_of(jobs: Iterable[JobRecord], *, of_a_cluster: bool = True) -> list[str]:
    """Return the facts of each job; times in seconds, and of reasons the sentences.

    Without those `of_a_cluster` (names, times, limits, how a node was lost) they are the same on each kind.
    """
    return sorted(repr(_facts(job) if of_a_cluster else _story(job)) for job in jobs)


def _story(job: JobRecord) -> tuple[object, ...]:
    status = job.status
    last = status.last_eviction, status.last_failure, status.last_move
    return (
        job.spec.name,
        (job.intent, job.attempt, job.managed, job.completing, job.size),
        sorted(member.rpartition("-")[2] for member in job.members),
        job.growth_failed and job.growth_failed.message,
        (status.phase, status.restarts, status.evictions, status.moves, status.exit_code),
        status.result_worker and status.result_worker.rpartition("-")[2],
        [one and _common(one.reason.message) for one in last],
        [(one.from_gpus, one.to_gpus, _common(one.reason.message)) for one in status.resizes],
        status.reason and _common(status.reason.message),
    )


def _common(message: str) -> str:
    return re.sub(r"worker \d+ was lost: [^;]*", "a worker was lost", re.sub(r"more than \d+ s", "too long", message))


def _facts(job: JobRecord) -> tuple[object, ...]:
    status = job.status
    last = status.last_eviction, status.last_failure, status.last_move
    return (
        job.spec.name,
        (job.intent, job.attempt, job.next_index, job.managed, job.completing, job.size, job.members),
        _whole(job.incident_at),
        job.growth_failed and job.growth_failed.message,
        (status.phase, status.restarts, status.evictions, status.moves, status.exit_code),
        tuple(_occurred(one) for one in last),
        tuple((_whole(one.at), one.from_gpus, one.to_gpus, one.reason.message) for one in status.resizes),
    )


def _occurred(occurrence: object) -> tuple[object, str] | None:
    found: Occurrence | None = occurrence  # type: ignore[assignment]
    return None if found is None else (_whole(found.at), found.reason.message)


def _whole(at: float | None) -> int | None:
    return None if at is None else int(at)


def wrongly_accounted(job: JobRecord, now: float) -> str:
    """Return what is wrong with where the job's time went: its parts add up to its life; "" if nothing.

    The end of a job is in whole seconds in an object's status, for a restarted controller.
    """
    status = job.status
    end = now if status.finished_at is None or status.counted_until is None else status.counted_until
    parts, life = time_spent(status, now), end - status.submitted_at
    if status.finished_at is not None and not 0 <= end - status.finished_at <= 1 + EXACT_S:
        return f"{job.spec.name} has ended at {status.finished_at}, and is counted until {end}"
    if any(seconds < -EXACT_S for seconds in parts.values()) or abs(sum(parts.values()) - life) > EXACT_S:
        return f"{job.spec.name} has lived for {life:.3f} s, and spent {parts}"
    return ""


def only_in(these: list[str] | dict[str, list[str]], those: list[str] | dict[str, list[str]]) -> str:
    """Return what is in one of them only."""
    if isinstance(these, dict):
        return str({key: value for key, value in these.items() if value != those[key]})  # type: ignore[call-overload]
    return str([one for one in these if one not in those])
