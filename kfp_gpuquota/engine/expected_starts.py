"""When waiting jobs are expected to start, from the records of a cluster: on every kind of cluster the same.

How long a job runs is known, in this order: from its own steps that are left, at the rate of its last steps; from the
jobs that have ended of the same pipeline step, else of the same name (but for a number or a hash at its end), else with
the same command, else of the same project. The maximum run time bounds all of them. Of a job of which none of that is
known the run time is unknown, and so is the start of each job that needs what it holds.

An estimate is replaced only by one that differs materially: it is part of an object that others watch.
"""

from __future__ import annotations

import re
from math import inf
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Order, Phase
from kfp_gpuquota.api.job import COMMAND_OF_PODS
from kfp_gpuquota.api.pipeline_labels import TASK
from kfp_gpuquota.engine.notifications import late_notification
from kfp_gpuquota.scheduler import RunTimeExpected
from kfp_gpuquota.scheduler.forecast import UNKNOWN, RunTime, examples_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kfp_gpuquota.api import ExpectedStart, JobSpec
    from kfp_gpuquota.engine.job_book import JobBook
    from kfp_gpuquota.engine.records import JobRecord
    from kfp_gpuquota.scheduler import State

FEWEST: Final = 3
"""Jobs that have ended, fewer of which are no distribution."""
MOST: Final = 200
"""The latest of them that count."""
MATERIAL_S: Final = 60.0
MATERIAL_PART: Final = 0.2
"""An estimate has changed if an end of its range moved by this part of the time until then, and by so many seconds."""

_RUN: Final = r"(?=[0-9a-f]*\d)([0-9a-f]{4,}|\d{1,3})(?![0-9a-f])"
_NUMBER: Final = re.compile(rf"[-._]?{_RUN}([-._]{_RUN})*$")
"""Numbers and hashes at the end. No name can be divided into them in two ways, else a search took exponential time."""

Key = tuple[str, str, str]


def run_times(book: JobBook, now: float) -> Callable[[str], RunTime]:
    """Return what is known of a job's run time, as a function of its uid."""
    ended: dict[Key, list[float]] = {}
    running: dict[Key, list[float]] = {}
    for job in sorted(book.jobs.values(), key=lambda job: job.status.finished_at or now):
        found = ended if job.status.phase is Phase.SUCCEEDED else running if job.status.phase is Phase.RUNNING else {}
        for key in _keys(job):
            found.setdefault(key, []).append(_ran_s(job, job.status.finished_at or now))
    examples = {
        key: examples_of(times[-MOST:], running.get(key, ())[:MOST])
        for key, times in ended.items()
        if len(times) >= FEWEST
    }
    return lambda uid: _run_time(book.jobs[uid], examples, now) if uid in book.jobs else UNKNOWN


class RunTimesOfWaiting:
    """Passes the expected run times of waiting jobs to the scheduler, in projects that start the shortest one first.

    The median of jobs that have ended is what counts: those that run change it with every second. It follows from the
    records alone, so that a restarted process has the same, and is computed again only once another job of the project
    has ended. What the scheduler has is compared with it each time: a job that was submitted to it again has no run
    time any more.
    """

    def __init__(self, book: JobBook) -> None:
        self._book = book
        self._known: dict[str, _RunTimesOfProject] = {}

    def changes(self, state: State) -> list[RunTimeExpected]:
        """Return the events for jobs whose expected run time is new or has changed."""
        found: list[RunTimeExpected] = []
        for queue in state.ledger.queues.values():
            if queue.order is Order.SHORTEST and queue.waiting:
                known = self._of(queue.name)
                for job in (job for entries in queue.waiting.values() for _, job in entries):
                    if (record := self._book.jobs.get(job.uid)) is not None:
                        seconds = known.expected(record)
                        if job.expected_s != (inf if seconds is None else seconds):
                            found.append(RunTimeExpected(job.uid, seconds))
        return found

    def _of(self, project: str) -> _RunTimesOfProject:
        known, changes = self._known.get(project), self._book.successes[project]
        if known is None or known.changes != changes:
            known = self._known[project] = _RunTimesOfProject(changes, self._book.succeeded.get(project, {}).values())
        return known


class _RunTimesOfProject:
    """The medians of the jobs of a project that have ended, after so many `changes` of these."""

    def __init__(self, changes: int, ended: Iterable[JobRecord]) -> None:
        self.changes = changes
        ran: dict[Key, list[float]] = {}
        for at, _, job in sorted((job.status.finished_at or 0.0, job.uid, job) for job in ended):
            for key in _keys(job):
                ran.setdefault(key, []).append(_ran_s(job, at))
        several = {key: times[-MOST:] for key, times in ran.items() if len(times) >= FEWEST}
        self._medians = {key: RunTime(tuple(sorted(times))).left(0.5) for key, times in several.items()}
        self._expected: dict[str, tuple[JobSpec, float | None]] = {}

    def expected(self, job: JobRecord) -> float | None:
        """Return how long the job is expected to run, in seconds; None if that is not known."""
        before = self._expected.get(job.uid)
        if before is None or before[0] is not job.spec:
            median = next((self._medians[key] for key in _closer_keys(job) if key in self._medians), None)
            before = self._expected[job.uid] = (job.spec, median)
        return before[1]


def _closer_keys(job: JobRecord) -> Iterator[Key]:
    """Yield the keys that say more about the job's run time than its own declared maximum does."""
    return (key for key in _keys(job) if key[1] != "project" or job.spec.max_runtime_s is None)


def _run_time(job: JobRecord, examples: Mapping[Key, tuple[float, ...]], now: float) -> RunTime:
    most_s = job.spec.max_runtime_s
    return RunTime(
        examples=next((examples[key] for key in _keys(job) if key in examples), ()),
        most_s=inf if most_s is None else most_s,
        ran_s=_ran_s(job, now),
        left_s=_left_s(job, now),
    )


def _keys(job: JobRecord) -> Iterator[Key]:
    """Yield what the job has in common with others, the closest first."""
    spec = job.spec
    if task := spec.labels.get(TASK):
        yield spec.project, "step", task
    yield spec.project, "name", _NUMBER.sub("", spec.name)
    if spec.command != COMMAND_OF_PODS:
        yield spec.project, "command", "\0".join(spec.command)
    yield spec.project, "project", ""


def _ran_s(job: JobRecord, until: float) -> float:
    began = job.status.started_at
    return job.ran_s + (0.0 if began is None else max(0.0, until - began))


def _left_s(job: JobRecord, now: float) -> float | None:
    """Return the time of the steps that are left, in seconds; None where the training does not report them."""
    progress = job.status.progress
    if progress is None or not progress.total_steps or not progress.step_ms or job.status.started_at is None:
        return None
    left = max(0, progress.total_steps - progress.step) * progress.step_ms / 1000
    return max(0.0, left - max(0.0, now - progress.at))


def note_expected(book: JobBook, played: Mapping[str, ExpectedStart], now: float, most: int | None = None) -> list[str]:
    """Record the expected starts that plays gave to waiting jobs; return the uids of those that changed materially.

    Of more than `most` that did, only those that start first are recorded.
    """
    accuracy = book.accuracy
    waiting = [uid for uid, job in book.jobs.items() if job.status.phase is Phase.PENDING]
    accuracy.keep(waiting)
    for uid, latest in accuracy.newly_late(now).items():
        book.notify(late_notification(book.jobs[uid], latest, now))
    new = {uid: accuracy.ranged(played[uid], now) for uid in waiting if uid in played}
    changed = [uid for uid in waiting if _differ(book.expected_starts.get(uid), new.get(uid), now)]
    if most is not None and len(changed) > most:
        changed.sort(key=lambda uid: new[uid].earliest if uid in new else now)
        del changed[most:]
    for uid in changed:
        if uid in new:
            book.expected_starts[uid] = new[uid]
        else:
            del book.expected_starts[uid]
    for uid in new.keys() & book.expected_starts.keys():
        accuracy.state(uid, book.expected_starts[uid])
    return changed


def _differ(old: ExpectedStart | None, new: ExpectedStart | None, now: float) -> bool:
    if old is None or new is None:
        return old is not new
    ends = ((old.earliest, new.earliest), (old.latest, new.latest))
    return any(abs(a - b) > max(MATERIAL_S, MATERIAL_PART * max(0.0, b - now)) for a, b in ends)
