"""Holds jobs out of the queue until the conditions of their start are met: a time, ends of jobs, a turn in an array.

Invariant: conditions are met once. A job that is free to start has its `eligible_at`, from when its age counts, and is
never held again: not after a preemption, a restart, or the deletion of a job that it has waited for.

| the job that is waited for      | "prep" (Slurm's afterok)   | "any:prep" (afterany) |
|---------------------------------|----------------------------|-----------------------|
| has succeeded                   | met                        | met                   |
| has failed or was cancelled     | the waiting job fails      | met                   |
| was deleted before its end      | the waiting job fails      | met                   |
| does not exist, and never did   | it is waited for           | it is waited for      |

A job that is waited for is found by its name once, and then by its uid: another job of that name is another job. What
follows from a change is part of the same change, so that no restart comes between a job's end and what it releases.

Rejected: a waiting job that stays when what it waits for has failed, which is Slurm's default: it could never start,
and its user's `--follow` would never return. Rejected: holding in the scheduler, which has no record of ended jobs.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kfp_gpuquota.api import Phase, Reason, ReasonCode
from kfp_gpuquota.api.start_conditions import After, parse_after
from kfp_gpuquota.engine.change_recorder import ChangeRecorder
from kfp_gpuquota.engine.records import AwaitedJob, Intent, JobRecord, with_status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.engine.job_book import Change, JobBook

SHOWN: Final = 5
"""Names of jobs in a sentence."""
UNKNOWN: Final = Reason(code=ReasonCode.WAITS_FOR_JOBS, message="waits until all jobs of the cluster are read")


def settle(book: JobBook, change: Change, now: float) -> None:
    """Add to a change what follows from it for jobs whose starts have conditions: they are held, released, or fail."""
    if not any(_matters(book.jobs.get(uid), job) for uid, job in change.jobs.items()):
        return
    settling = _Settling(book, change, now)
    while settling.settle():  # again for those that wait for one that has failed
        pass


def hold(change: Change) -> None:
    """Hold the change's jobs whose starts have conditions, for as long as not all jobs are known."""
    for uid, job in change.jobs.items():
        if job is not None and job.conditional and job.held is None:
            change.jobs[uid] = msgspec.structs.replace(job, held=job.status.reason or UNKNOWN)


def _matters(before: JobRecord | None, after: JobRecord | None) -> bool:
    """Return whether a job may be held or released, or others may be for its end or its start."""
    if before is None or after is None or after.conditional:
        return True
    return (before.over, before.status.phase.final) != (after.over, after.status.phase.final)


class _Found(NamedTuple):
    """What is known of the jobs that one waits for."""

    awaited: tuple[AwaitedJob, ...]
    unmet: tuple[After, ...]
    missing: frozenset[str]
    failed: Reason | None


class _Settling:
    """The records as they are after a change, to which it adds."""

    def __init__(self, book: JobBook, change: Change, now: float) -> None:
        self._book, self._change, self._now = book, change, now
        self._recorder = ChangeRecorder(book, change, now)
        self._new = {
            (job.spec.project, job.spec.name): uid
            for uid, job in change.jobs.items()
            if job is not None and uid not in book.jobs
        }
        self._free: dict[tuple[str, str, int], int] = {}

    def settle(self) -> bool:
        """Hold, release or fail the jobs that the change concerns; return whether any has failed."""
        failed = False
        for job in sorted(self._concerned(), key=lambda job: job.spec.array.index if job.spec.array else 0):
            failed |= self._settle(job)
        return failed

    def _concerned(self) -> Iterator[JobRecord]:
        """Yield the jobs with conditions that were changed, wait for changed ones, or for a turn in their array."""
        found = dict.fromkeys(self._change.jobs)
        for uid, after in self._change.jobs.items():
            if (job := after or self._book.jobs.get(uid)) is not None:
                found.update(self._book.dependents.get((job.spec.project, job.spec.name), {}))
                if (key := job.array_key) is not None and (after is None or after.status.phase.final):
                    found.update(self._book.array_jobs.get(key, {}))
        for uid in found:
            if (job := self._job(uid)) is not None and job.conditional:
                yield job

    def _job(self, uid: str) -> JobRecord | None:
        return self._change.jobs[uid] if uid in self._change.jobs else self._book.jobs.get(uid)

    def _settle(self, job: JobRecord) -> bool:
        found = self._awaited_of(job)
        if found.failed is not None:
            job = msgspec.structs.replace(job, awaited=found.awaited, held=None)
            self._change.jobs[job.uid] = job
            self._recorder.stop(job, Intent.FAIL, found.failed)
            return True
        held = self._begins(job) or _waits_for(found) or self._array_limit(job)
        after = msgspec.structs.replace(job, awaited=found.awaited, held=held)
        if held is None and not job.suspended:  # a suspended job's age begins when it is resumed
            after = with_status(after, eligible_at=round(self._now, 6))  # as an object's status has it
        if held != job.held and not job.suspended:
            after = with_status(after, reason=held)
        if after != job:
            self._change.jobs[job.uid] = after
        return False

    def _awaited_of(self, job: JobRecord) -> _Found:
        known = {one.name: one for one in job.awaited}
        awaited: list[AwaitedJob] = []
        unmet: list[After] = []
        missing: set[str] = set()
        failed: Reason | None = None
        for after in map(parse_after, job.spec.after):
            one = known.get(after.name) or self._find(job.spec.project, after.name)
            if one is None:
                unmet.append(after)
                missing.add(after.name)
                continue
            if not one.met:
                ended = self._end_of(one)
                one = msgspec.structs.replace(one, met=ended == "" or (ended is not None and after.any_end))
                failed = failed or (_failed(one.name, ended) if ended and not one.met else None)
            awaited.append(one)
            if not one.met:
                unmet.append(after)
        return _Found(tuple(awaited), tuple(unmet), frozenset(missing), failed)

    def _find(self, project: str, name: str) -> AwaitedJob | None:
        uid = self._new.get((project, name)) or self._book.uid_of(project, name)
        return None if uid is None else AwaitedJob(name, uid)

    def _end_of(self, awaited: AwaitedJob) -> str | None:
        """Return "" if the job has succeeded, how it has ended otherwise, or None while it has not ended."""
        job = self._job(awaited.uid)
        if job is None:
            return "was deleted"
        if not job.status.phase.final:
            return None
        ends = {Phase.SUCCEEDED: "", Phase.FAILED: "has failed", Phase.CANCELLED: "was cancelled"}
        return ends[job.status.phase]

    def _begins(self, job: JobRecord) -> Reason | None:
        at = job.spec.begin_at
        if at is None or at <= self._now:
            return None
        text = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return Reason(code=ReasonCode.BEGINS_LATER, message=f"waits until {text} (begin)", details={"begin_at": at})

    def _array_limit(self, job: JobRecord) -> Reason | None:
        """Return why it is not the job's turn in its array; else it occupies one of the array's places."""
        array, key = job.spec.array, job.array_key
        if array is None or array.limit is None or key is None:
            return None
        if key not in self._free:
            self._free[key] = array.limit - self._occupied(key)
        if self._free[key] > 0 and not job.suspended:
            self._free[key] -= 1
            return None
        several = "1 job" if array.limit == 1 else f"{array.limit} jobs"
        message = f"waits for its turn: array {array.name} has at most {several} in the queue and running"
        return Reason(code=ReasonCode.ARRAY_LIMIT, message=message, details={"limit": array.limit})

    def _occupied(self, key: tuple[str, str, int]) -> int:
        members = (self._job(uid) for uid in self._book.array_jobs.get(key, ()))
        return sum(job is not None and not job.status.phase.final and not _is_new(job) for job in members)


def _is_new(job: JobRecord) -> bool:
    return job.status.eligible_at is None and not job.attempt


def _waits_for(found: _Found) -> Reason | None:
    """Return which jobs have to end first."""
    if not found.unmet:
        return None
    shown = [_named(after, found.missing) for after in found.unmet[:SHOWN]]
    if (more := len(found.unmet) - SHOWN) > 0:
        shown.append(f"{more} more")
    return Reason(
        code=ReasonCode.WAITS_FOR_JOBS,
        message=f"waits for {', '.join(shown)} (after)",
        details={"jobs": len(found.unmet)},
    )


def _named(after: After, missing: frozenset[str]) -> str:
    if after.name in missing:
        return f"job {after.name}, which does not exist yet"
    return f"the end of job {after.name}" if after.any_end else f"the success of job {after.name}"


def _failed(name: str, how: str) -> Reason:
    message = f"job {name} {how}, and this one starts only after its success (after)"
    return Reason(code=ReasonCode.DEPENDENCY_FAILED, message=message, details={"job": name})
