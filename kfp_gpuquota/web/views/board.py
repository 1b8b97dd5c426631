"""What pages derive from all jobs and nodes, computed again only after these have changed.

Pages with other filters share it, so that ten thousand jobs are put in order once after each change, however many pages
are shown. A job or node that did not change is the same object as before, which lets rows be kept by identity.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from typing import TYPE_CHECKING, Final, NamedTuple

from kfp_gpuquota.api import Phase, ReasonCode
from kfp_gpuquota.api.job_sentences import place_of
from kfp_gpuquota.api.queue import Queued, has_places, queued

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.wire import NodeView
    from kfp_gpuquota.web.source import Source

_ORDER: Final = {
    Phase.PENDING.value: 0,
    Phase.STARTING.value: 1,
    Phase.RUNNING.value: 2,
    Phase.STOPPING.value: 3,
    Phase.SUSPENDED.value: 4,
}
_LAST: Final = 5
_NUMBERS: Final = re.compile(r"(\d+)")


class Board:
    """The jobs and nodes of one source. For `uses_known` see `api.queue.has_places`."""

    def __init__(self, source: Source, *, uses_known: bool = True) -> None:
        self.source, self._uses_known = source, uses_known
        self._facts = JobFacts((), ())
        self._nodes: tuple[NodeView, ...] = ()
        self._read: tuple[NodeView, ...] = ()

    @property
    def facts(self) -> JobFacts:
        """Return what is derived from all jobs."""
        jobs = self.source.jobs()
        if self._facts.jobs is not jobs:
            self._facts = self._facts.followed_by(jobs)
        return self._facts

    def place(self, job: Job) -> str:
        """Return the place of a waiting job in its project; "" for another one, and where it is not known."""
        return self.places()(job)

    def places(self) -> Callable[[Job], str]:
        """Return `place` for many jobs, for which the projects are read once."""
        orders = ((view.project.name, view.project.order) for view in self.source.projects())
        without = {name for name, order in orders if not has_places(order, uses_known=self._uses_known)}
        return lambda job: "" if job.spec.project in without else self.facts.place(job)

    def nodes(self) -> tuple[NodeView, ...]:
        """Return all nodes in the order of their names; one that is equal to what it was is the same object."""
        found = self.source.nodes()
        if found is not self._read:
            before = {view.node.name: view for view in self._nodes}
            kept = [old if (old := before.get(view.node.name)) == view else view for view in found]
            kept.sort(key=lambda view: natural(view.node.name))
            self._read, self._nodes = found, tuple(kept)
        return self._nodes

    def models(self) -> list[str]:
        """Return the types of GPUs that there are."""
        return sorted({name for view in self.nodes() for name in view.types if name})


class _Fact(NamedTuple):
    """What is derived from one job. `key` is its place in the order of the queue page, `queued` in its project's."""

    key: tuple[int, float, float]
    queued: Queued | None
    fragmented: bool

    @classmethod
    def of(cls, job: Job) -> _Fact:
        reason = job.status.reason
        waits = job.status.phase is Phase.PENDING
        fragmented = waits and reason is not None and reason.code is ReasonCode.FRAGMENTED
        return cls(_key(job), queued(job) if waits else None, fragmented)


class JobFacts:
    """What is derived from one list of jobs, oldest first, each when it is first read.

    `facts` are those of each job, and `order` are the indices of the jobs in an order that is nearly that of the queue.
    """

    def __init__(self, jobs: tuple[Job, ...], facts: Sequence[_Fact], order: Iterable[int] = ()) -> None:
        self.jobs = jobs
        self._facts, self._order = facts, order

    def followed_by(self, jobs: tuple[Job, ...]) -> JobFacts:
        """Return the facts of the next list: only those of jobs that differ are computed."""
        if len(jobs) < len(self.jobs):
            return JobFacts(jobs, [_Fact.of(job) for job in jobs], range(len(jobs)))
        facts = [fact if job is old else _Fact.of(job) for fact, job, old in zip(self._facts, jobs, self.jobs)]  # noqa: B905
        added = range(len(self.jobs), len(jobs))
        facts += [_Fact.of(jobs[i]) for i in added]
        return JobFacts(jobs, facts, [*self._order, *added])

    @functools.cached_property
    def in_order(self) -> Sequence[Job]:
        """Return the jobs in the queue's order: those that wait by priority and age, ended ones last."""
        self._order = sorted(
            self._order, key=lambda i: (self._facts[i].key, i)
        )  # what is in order already costs little
        return [self.jobs[i] for i in self._order]

    @functools.cached_property
    def holders(self) -> Mapping[str, Job]:
        """Return the jobs by their workers' ids, and by "project/worker"."""
        found = {}
        for job in self.jobs:
            if job.status.workers:
                for worker in job.status.workers:
                    found[worker.id] = found[f"{job.spec.project}/{worker.id}"] = job
        return found

    @functools.cached_property
    def fragmented(self) -> tuple[Job, ...]:
        """Return the jobs that wait because idle GPUs are on too many nodes."""
        return tuple(job for job, fact in zip(self.jobs, self._facts, strict=True) if fact.fragmented)

    @functools.cached_property
    def waiting(self) -> int:
        """Return how many jobs wait."""
        return sum(job.status.phase is Phase.PENDING for job in self.jobs)

    @functools.cached_property
    def users(self) -> Sequence[str]:
        """Return the users who own jobs."""
        return sorted({job.owner for job in self.jobs if job.owner})

    def place(self, job: Job) -> str:
        """Return a waiting job's place in its project's own order, and which jobs come before it; "" for another."""
        mine = queued(job)
        if mine is None:
            return ""
        waiting = self._queues.get((job.spec.project, mine.pool), [])
        return place_of(waiting, bisect_left(waiting, mine.key, key=lambda one: one.key))

    @functools.cached_property
    def _queues(self) -> Mapping[tuple[str, str], Sequence[Queued]]:
        queues: dict[tuple[str, str], list[Queued]] = {}
        for job, fact in zip(self.jobs, self._facts, strict=True):
            if fact.queued is not None:
                queues.setdefault((job.spec.project, fact.queued.pool), []).append(fact.queued)
        for waiting in queues.values():
            waiting.sort(key=lambda one: one.key)
        return queues


@functools.lru_cache(65_536)
def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts names as people do: node-9 before node-10."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in _NUMBERS.split(name[:500]))


def label_keys(nodes: Iterable[NodeView], most: int = 200) -> list[str]:
    """Return the labels that group nodes: those with few values, and more nodes than values."""
    values: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for view in nodes:
        for key, value in view.node.labels.items():
            values.setdefault(key, set()).add(value)
            counts[key] = counts.get(key, 0) + 1
    return sorted(key for key, found in values.items() if 1 < len(found) <= most and len(found) < counts[key])


def _key(job: Job) -> tuple[int, float, float]:
    status = job.status
    order = _ORDER.get(status.phase.value, _LAST)
    if order == _LAST:
        return order, 0, -(status.finished_at or 0.0)
    return order, -job.spec.effective_priority, status.submitted_at
