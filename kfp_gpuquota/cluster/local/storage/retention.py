"""Which ended jobs are deleted by themselves, with their logs and checkpoints. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.engine.records import JobRecord

INTERVAL_S: Final = 600.0


def outdated(jobs: Iterable[JobRecord], now: float, keep_s: float, keep_jobs: int) -> list[JobRecord]:
    """Return the jobs that ended longer than `keep_s` ago, and of each user's the oldest beyond the newest `keep_jobs`.

    On a cluster that several users share, nobody's jobs make the logs and checkpoints of others' disappear.
    `now` in seconds since the epoch: a clock that is set forward by days deletes early, one that is set back never.
    """
    ended = [job for job in jobs if job.status.phase.final and job.status.finished_at is not None]
    ended.sort(key=lambda job: job.status.finished_at or 0.0, reverse=True)
    newer: Counter[int | None] = Counter()
    found = []
    for job in ended:
        owner = job.owner.uid if job.owner else None
        newer[owner] += 1
        if newer[owner] > keep_jobs or now - (job.status.finished_at or 0.0) >= keep_s:
            found.append(job)
    return found
