"""Adds up where each job's time went, when its records change. Pure.

Invariant: the parts in `spent` add up to the time from the job's submission until `counted_until`, which is its end if
it has ended. So nothing but the sums is kept: their size does not grow, and a restart keeps them.

Rejected: sums made from the history of events when somebody asks. Events are kept for a bounded time, on Kubernetes for
an hour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.api.time_spent import Activity, activity_of
from kfp_gpuquota.engine.records import with_status

if TYPE_CHECKING:
    from kfp_gpuquota.engine.job_book import Change, JobBook
    from kfp_gpuquota.engine.records import JobRecord


def account_all(book: JobBook, change: Change, now: float) -> None:
    """Bring the sums of the change's jobs up to date."""
    for uid, job in change.jobs.items():
        if job is not None:
            change.jobs[uid] = account(book.jobs.get(uid), job, now)


def account(before: JobRecord | None, after: JobRecord, now: float) -> JobRecord:
    """Return the job after a change at `now`, with the time until then in its sums if it does something else now."""
    status = after.status
    if status.counted_until is None:
        return _first(after, now)
    was = None if before is None else activity_of(before.status)
    if before is None or was is None:  # read by another process, or ended
        return after
    if activity_of(status) is was and not _paused_s(before, after):
        return after
    until = now if status.finished_at is None else status.finished_at
    spent = dict(status.spent)
    _add(spent, was, until - status.counted_until)
    paused_s = min(_paused_s(before, after), spent.get(Activity.RUNNING, 0.0))
    _add(spent, Activity.RUNNING, -paused_s)
    _add(spent, Activity.RESIZING, paused_s)
    return with_status(after, spent=spent, counted_until=until)


def _first(job: JobRecord, now: float) -> JobRecord:
    """Return a job without sums: one that was just submitted, or that another version has recorded."""
    status = job.status
    if not job.attempt and not status.phase.final:
        return with_status(job, counted_until=status.submitted_at)
    until = now if status.finished_at is None else status.finished_at
    return with_status(job, spent={Activity.UNRECORDED: max(0.0, until - status.submitted_at)}, counted_until=until)


def _paused_s(before: JobRecord, after: JobRecord) -> float:
    """Return how long training has paused for the changes of size that are new."""
    new = after.status.resizes[len(before.status.resizes) :]
    return sum(change.pause_ms or 0.0 for change in new) / 1000


def _add(spent: dict[str, float], activity: Activity, seconds: float) -> None:
    """Add to a part. A job's end may be known after what followed it: what is too much is taken from the others."""
    spent[activity] = spent.get(activity, 0.0) + seconds
    for part in reversed(Activity):
        if part is not activity and spent[activity] < 0 and part in spent:
            taken = min(spent[part], -spent[activity])
            spent[part] -= taken
            spent[activity] += taken
    if not spent[activity]:
        del spent[activity]
