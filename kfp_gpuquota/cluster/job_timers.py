"""What becomes due for a job without an event: its begin comes, its lease ends, it ran or was kept for long enough.

A timer says when to look, and the records decide, so that one which fires early does no harm.
"""

from __future__ import annotations

import asyncio
import logging
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from kfp_gpuquota.engine import requests
from kfp_gpuquota.engine.job_book import Change
from kfp_gpuquota.engine.records import Intent
from kfp_gpuquota.errors import StateFileError

if TYPE_CHECKING:
    from kfp_gpuquota.engine.decisions import Decisions
    from kfp_gpuquota.engine.protocols import Store
    from kfp_gpuquota.engine.records import JobRecord

RETRY_S: Final = 2.0
"""Between attempts to record what was due."""

log = logging.getLogger(__name__)


class Due(StrEnum):
    """The event of a deadline."""

    LEASE_ENDED = "its lease has ended"
    RAN_TOO_LONG = "it has run for its maximum run time"
    BEGINS = "its begin has come"
    FORGET = "it was kept long enough after its end"


class Deadline(NamedTuple):
    """A job's next deadline, in seconds since 1970."""

    at: float
    due: Due


def next_deadline(job: JobRecord, *, lease_until: float | None, keep_s: float | None) -> Deadline | None:
    """Return the job's next deadline; of an ended one when it was kept for `keep_s`, None: it is kept."""
    if job.status.phase.final:
        if keep_s is None or job.status.finished_at is None:
            return None
        return Deadline(job.status.finished_at + keep_s, Due.FORGET)
    ends = ((lease_until, Due.LEASE_ENDED), (job.runs_until, Due.RAN_TOO_LONG), (job.begins_at, Due.BEGINS))
    due = [Deadline(at, due) for at, due in ends if at is not None]
    return None if job.ending else min(due, default=None)


class JobTimers:
    """A timer for each job's next deadline. A subclass adds rules for leases and ended jobs."""

    def __init__(self, store: Store, decisions: Decisions) -> None:
        self._store, self._decisions = store, decisions
        self._renewed_at: dict[str, float] = {}  # by the loop's clock, so that a clock that jumps ends no lease
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def renewed(self, uid: str) -> None:
        """Start the job's lease again."""
        self._renewed_at[uid] = asyncio.get_running_loop().time()
        self.set(uid)

    def set(self, uid: str) -> None:
        """Set the timer of the job's next deadline."""
        self._cancel(uid)
        if (deadline := self._next(uid)) is not None:
            self._look_in(deadline.at - self._store.clock(), uid)

    def forget(self, uid: str) -> None:
        """Cancel the timer of a job that is deleted."""
        self._cancel(uid)
        self._renewed_at.pop(uid, None)

    def close(self) -> None:
        """Cancel all timers."""
        for uid in list(self._timers):
            self._cancel(uid)

    def lease_s(self, job: JobRecord) -> float | None:
        """Return for how long the job's lease is valid after its renewal; None: it has none."""
        return job.lease_s if job.lease_holder else None

    def keep_s(self, job: JobRecord) -> float | None:  # noqa: ARG002 (for a subclass)
        """Return for how long the job is kept after its end; None: until a user deletes it."""
        return None

    def lease_ended(self, job: JobRecord) -> None:
        """Cancel the job: its lease has ended."""
        self._decisions.stop(job, Intent.CANCEL, requests.lease_ended(job.lease_s))

    def kept_long_enough(self, job: JobRecord) -> None:
        """Delete an ended job."""

    def _next(self, uid: str) -> Deadline | None:
        job = self._store.jobs.get(uid)
        if job is None:
            return None
        lease_s, now = self.lease_s(job), asyncio.get_running_loop().time()
        lease_left_s = None if lease_s is None else self._renewed_at.setdefault(uid, now) + lease_s - now
        lease_until = None if lease_left_s is None else self._store.clock() + lease_left_s
        return next_deadline(job, lease_until=lease_until, keep_s=self.keep_s(job))

    def _due(self, uid: str) -> None:
        self._timers.pop(uid, None)
        deadline = self._next(uid)
        if deadline is None or deadline.at > self._store.clock():
            self.set(uid)
            return
        job = self._store.jobs[uid]
        try:
            match deadline.due:
                case Due.LEASE_ENDED:
                    self.lease_ended(job)
                case Due.RAN_TOO_LONG:
                    self._decisions.stop(job, Intent.FAIL, requests.ran_too_long(job))
                case Due.BEGINS:
                    self._store.commit(Change(jobs={uid: job}))
                    self.set(uid)
                case Due.FORGET:
                    self.kept_long_enough(job)
        except StateFileError as error:
            log.error("job %s: %s, which is recorded in %g s: %s", job.spec.name, deadline.due, RETRY_S, error)
            self._look_in(RETRY_S, uid)

    def _look_in(self, delay_s: float, uid: str) -> None:
        self._cancel(uid)
        self._timers[uid] = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._due, uid)

    def _cancel(self, uid: str) -> None:
        if timer := self._timers.pop(uid, None):
            timer.cancel()
