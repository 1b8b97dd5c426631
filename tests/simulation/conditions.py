"""What must hold of jobs whose starts have conditions or whose projects are held, on each kind of cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.api import Phase, StopPolicy
from kfp_gpuquota.api.start_conditions import parse_after

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kfp_gpuquota.api import Project
    from kfp_gpuquota.engine.job_book import Change
    from kfp_gpuquota.engine.records import JobRecord


def line_of(projects: Mapping[str, Project], name: str) -> list[Project]:
    """Return a project and the departments that it belongs to, from below; [] if it does not exist."""
    found: list[Project] = []
    while (project := projects.get(name)) is not None:
        found.append(project)
        name = project.parent or ""
    return found


def stop_policy_of(projects: Mapping[str, Project], name: str) -> StopPolicy:
    """Return the stop policy that applies in a project: of itself or of one above it, the strictest."""
    found = {project.stop_policy for project in line_of(projects, name)}
    return next((one for one in (StopPolicy.HOLD_AND_DRAIN, StopPolicy.HOLD) if one in found), StopPolicy.NONE)


class Conditions:
    """Remembers how jobs have ended, by name: no name is used twice in a history."""

    def __init__(self) -> None:
        self._ends: dict[str, Phase | None] = {}

    def deleted(self, names: Iterable[str]) -> None:
        """Note jobs that were deleted while no process of the cluster ran."""
        for name in names:
            self._ends.setdefault(name, None)

    def observe(self, jobs: Mapping[str, JobRecord], change: Change, now: float) -> Iterator[str]:
        """Note a change before it is applied; yield what starts before its conditions are met."""
        for uid, job in change.jobs.items():
            before = jobs.get(uid)
            if job is None and before is not None:
                self.deleted([before.spec.name])
            elif job is not None and job.status.phase.final:
                self._ends[job.spec.name] = job.status.phase
            elif job is not None and self._ends.get(job.spec.name, Phase.FAILED) is None:
                del self._ends[job.spec.name]  # it was submitted again, with another specification
        after = {**jobs, **change.jobs}
        for uid, job in change.jobs.items():
            before = jobs.get(uid)
            if job is not None and before is not None and not before.attempt and job.attempt:
                yield from (f"{job.spec.name} starts, but {why}" for why in self._unmet(job, now))
                yield from self._beyond_limit(job, [one for one in after.values() if one is not None])

    def wrong_at_rest(self, jobs: Iterable[JobRecord], now: float) -> Iterator[str]:
        """Yield which jobs are held for nothing."""
        listed = list(jobs)
        names = {job.spec.name for job in listed}
        for job in listed:
            found = names | {one.name for one in job.awaited}
            waits = any(self._unmet(job, now)) or any(parse_after(text).name not in found for text in job.spec.after)
            if job.status.phase is Phase.PENDING and job.held is not None and not waits and self._has_turn(job, listed):
                yield f"{job.spec.name} is held, and nothing is missing: {job.held}"

    def _has_turn(self, job: JobRecord, jobs: Iterable[JobRecord]) -> bool:
        if job.spec.array is None or job.spec.array.limit is None:
            return True
        in_turn = [one for one in _members(job, jobs) if one.attempt or one.status.eligible_at is not None]
        return len(in_turn) < job.spec.array.limit

    def _unmet(self, job: JobRecord, now: float) -> Iterator[str]:
        if job.spec.begin_at is not None and job.spec.begin_at > now:
            yield f"it begins at {job.spec.begin_at}, and it is {now}"
        for name, any_end in map(parse_after, job.spec.after):
            if name not in self._ends or (not any_end and self._ends[name] is not Phase.SUCCEEDED):
                yield f"it waits for {name}"

    def _beyond_limit(self, started: JobRecord, jobs: Iterable[JobRecord]) -> Iterator[str]:
        array = started.spec.array
        running = sum(job.attempt > 0 for job in _members(started, jobs))
        if array is not None and array.limit is not None and running > array.limit:
            yield f"{running} jobs of an array run with {started.spec.name}, at most {array.limit} may"


def _members(of: JobRecord, jobs: Iterable[JobRecord]) -> Iterator[JobRecord]:
    for job in jobs:
        same = job.spec.project == of.spec.project and job.spec.array is not None and of.spec.array is not None
        if same and not job.status.phase.final:
            yield job
