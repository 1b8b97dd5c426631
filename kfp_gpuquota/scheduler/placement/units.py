"""Units of eviction, and the cheapest set of them that makes a task fit on one host.

A *unit* is evicted as a whole: one worker above the request (over quota) or above the gang, or a whole job.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from kfp_gpuquota.scheduler.fairness import quota
from kfp_gpuquota.scheduler.placement import placement
from kfp_gpuquota.scheduler.state.groups import loose_units
from kfp_gpuquota.scheduler.state.model import UNLIMITED, Amount, Host, Job, Queue, Status, Task
from kfp_gpuquota.scheduler.state.order import dominant_share

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kfp_gpuquota.scheduler.state.ledger import Ledger

UnitKey = tuple[bool, tuple[float, ...], "Stage", tuple[int, bool, float, float, str], float]

Margin = tuple[Queue | None, int, tuple[tuple[int, float, float], ...]]
"""Of a victim's queue: it or the one above it that competes with the reclaiming queue (None: none does), the version of
that queue, and of each resource its index, what it holds and what it keeps."""


class Mode(IntEnum):
    """From which jobs a pending job may take devices."""

    LENT = 0
    RECLAIM = 1
    PREEMPT = 2


class Stage(IntEnum):
    """The first criterion of a unit's cost."""

    LENT = 0
    ELASTIC = 1
    WHOLE = 2


class Unit(NamedTuple):
    """Tasks of one job that are evicted together; the unit with the smallest key is evicted first."""

    key: UnitKey
    stage: Stage
    job: Job
    tasks: tuple[Task, ...]


@dataclass(slots=True)
class Attempt:
    """One attempt to free devices for `tasks` of `job`. The `sheltered` jobs cannot be stopped as a whole.

    `kept` are workers that do not run yet: their placements were promised by an earlier plan. `now` is the plan's time.
    """

    ledger: Ledger
    job: Job
    tasks: Sequence[Task]
    mode: Mode
    amount: Amount
    ratios: dict[Queue, tuple[float, ...]] = field(default_factory=dict)
    margins: dict[Queue, Margin] = field(default_factory=dict)
    within: frozenset[Queue] = frozenset()
    sheltered: Collection[Job] = ()
    kept: Collection[Task] = ()
    now: float = 0.0
    evicted: bool = False
    limited: bool = False

    def __post_init__(self) -> None:
        self.within = frozenset([q for q in self.job.queue.path if quota.within_guarantee(q, self.amount)])

    def evictable(self, task: Task) -> bool:
        """Return whether the task runs, or was only promised its placement."""
        return task.status is Status.HELD or (task.status is Status.NOMINATED and task in self.kept)

    def evictable_on(self, host: Host) -> int:
        """Return the number of such tasks on the host."""
        return len([task for task in host.tasks if task.status is Status.HELD or self.evictable(task)])

    def margin(self, queue: Queue) -> Margin:
        """Return what the queue's branch holds and keeps, of the resources that the pending job needs."""
        found = self.margins.get(queue)
        if found is not None and (found[0] is None or found[0].version == found[1]):
            return found
        levels = quota.rivals(self.job.queue, queue)
        if levels is None:
            found = (None, 0, ())
        else:
            reclaimer, victim = levels
            needed = [r for r, value in enumerate(self.amount) if value]
            if reclaimer in self.within:
                kept = [min(victim.deserved[r], victim.granted[r]) for r in needed]  # its guarantee
            else:
                kept = [victim.keeps[r] for r in needed]
            resources = [(r, victim.claim(r), keeps) for r, keeps in zip(needed, kept, strict=True)]
            found = (victim, victim.version, tuple(resources))
        self.margins[queue] = found
        return found

    def below_share(self, queue: Queue) -> tuple[float, ...]:
        """Return the negative dominant share of what each of its branches keeps, from the root to the queue.

        The branch furthest above its share sorts first, at each level. Constant during one attempt.
        """
        if queue not in self.ratios:
            above = () if queue.parent is None else self.below_share(queue.parent)
            self.ratios[queue] = (*above, -dominant_share(queue, [queue.claim(r) for r in range(3)]))
        return self.ratios[queue]


def units_on(attempt: Attempt, host: Host) -> list[Unit]:
    """Return the units on the host, the cheapest first."""
    return sorted(_units(attempt, _by_job(attempt, host.tasks)), key=lambda u: u.key)


class Whole(NamedTuple):
    """The units of a host, the cheapest first, if all are whole jobs of one queue that run only there.

    What is evicted elsewhere changes neither them nor their order. `freed` are the devices of the units up to each of
    them, `before` the micro-GPUs of those before it.
    """

    version: int
    units: list[Unit]
    freed: list[int]
    before: list[float]

    @staticmethod
    def of(attempt: Attempt, host: Host, units: list[Unit]) -> Whole | None:
        """Return the record of these units of the host; None if they are not all that may be evicted there."""
        workers, devices, gpus = 0, 0, 0.0
        freed: list[int] = []
        before: list[float] = []
        for unit in units:
            before.append(gpus)
            for task in unit.tasks:
                workers += 1
                devices += len(task.devices)
                gpus += attempt.ledger.amount(task).gpu
            freed.append(devices)
        return Whole(host.version, units, freed, before) if units and workers == attempt.evictable_on(host) else None

    def present(self, attempt: Attempt, host: Host) -> Whole | None:
        """Return the record without what was evicted since; None if anything else has changed."""
        left = [unit for unit in self.units if unit.job.active == len(unit.tasks) and attempt.evictable(unit.tasks[0])]
        if len(left) < len(self.units) or self.version != host.version:
            return Whole.of(attempt, host, left)
        return self


def cheapest_whole(attempt: Attempt, host: Host, task: Task, whole: Whole) -> list[Unit] | None:
    """Return what `needed_on` returns: the first units that have enough devices, if their queue may lose them all."""
    capacity = placement.Capacity(host, task)
    if not capacity.countable:
        return needed_on(attempt, host, task, whole.units)
    last = bisect_left(whole.freed, capacity.short)
    if last == len(whole.freed):
        return None
    if attempt.mode is Mode.RECLAIM:
        victim, _, resources = attempt.margin(whole.units[0].job.queue)
        # The task requests devices alone.
        if victim is None or not any(holds - whole.before[last] > keeps for _, holds, keeps in resources):
            return None
    spare = whole.freed[last] - capacity.short
    return _without_unneeded(whole.units[: last + 1], spare) if last else whole.units[:1]


def _without_unneeded(chosen: list[Unit], spare: int) -> list[Unit]:
    """Return the units without those whose devices are to spare, the most valuable spared first."""
    kept = chosen[-1:]
    for unit in chosen[-2::-1]:
        devices = sum([len(task.devices) for task in unit.tasks])
        if devices > spare:
            kept.append(unit)
        else:
            spare -= devices
    return kept[::-1]


def needed_on(attempt: Attempt, host: Host, task: Task, units: Sequence[Unit]) -> list[Unit] | None:
    """Return the host's cheapest units that make the task fit, in ascending order; None where all do not suffice."""
    capacity = placement.Capacity(host, task)
    chosen: list[Unit] = []
    for unit in units:
        before = [u for u in chosen if u.job is not unit.job] if unit.stage is Stage.WHOLE else chosen
        if not _allowed(attempt, unit, before):
            continue
        chosen = [*before, unit]
        if capacity.suffices(t for u in chosen for t in u.tasks):
            return _pruned(capacity, chosen)
    return None


def _pruned(capacity: placement.Capacity, chosen: list[Unit]) -> list[Unit]:
    """Return the units without those that are not needed, the most valuable spared first."""
    for unit in chosen[-2::-1]:
        fewer = [u for u in chosen if u is not unit]
        if capacity.suffices(t for u in fewer for t in u.tasks):
            chosen = fewer
    return chosen


def all_allowed(attempt: Attempt, chosen: Sequence[Unit]) -> bool:
    """Return whether the queues may still lose these units, one after the other."""
    if attempt.mode is not Mode.RECLAIM:
        return True
    if len(chosen) == 1:
        return _allowed(attempt, chosen[0], ())
    return all(_allowed(attempt, unit, chosen[:i]) for i, unit in enumerate(chosen))


def cheapest_below(attempt: Attempt, queue: Queue) -> Unit | None:
    """Return the cheapest unit in the subtree of the queue, on any host; None where there is none."""
    running = (task for job in _jobs_below(queue) for task in job.tasks.values())
    promised = (task for task in attempt.kept if queue in task.job.queue.path)
    units = (u for u in _units(attempt, _by_job(attempt, chain(running, promised))) if _allowed(attempt, u, ()))
    return min(units, key=lambda u: u.key, default=None)


def _jobs_below(queue: Queue) -> Iterable[Job]:
    yield from queue.running
    for child in queue.children.values():
        yield from _jobs_below(child)


def _by_job(attempt: Attempt, tasks: Iterable[Task]) -> dict[Job, list[Task]]:
    grouped: dict[Job, list[Task]] = {}
    for task in tasks:
        if attempt.evictable(task):
            grouped.setdefault(task.job, []).append(task)
    return grouped


def _units(attempt: Attempt, grouped: dict[Job, list[Task]]) -> list[Unit]:
    units: list[Unit] = []
    for job, tasks in grouped.items():
        if job is attempt.job:
            continue
        single: list[tuple[Task, ...]] = []
        if job.active > job.gang:
            tasks.sort(key=lambda t: (t.priority, _newest_first(t)))
            single = loose_units(job, tasks, attempt.evictable)
            _add_single(attempt, job, single, units)
        whole = not job.core and len(tasks) > (len(single) if job.segment <= 1 else _tasks_in(single, tasks))
        if whole and attempt.mode is not Mode.LENT and may_be_victim(attempt, job):
            everything = tasks if job.active == 1 else _all_of(attempt, job)
            if len(everything) == job.active and job not in attempt.sheltered:
                units.append(_unit(attempt, Stage.WHOLE, job, tuple(everything)))
    return units


def _tasks_in(units: Sequence[tuple[Task, ...]], tasks: Collection[Task]) -> int:
    return sum(task in tasks for unit in units for task in unit)


def _all_of(attempt: Attempt, job: Job) -> list[Task]:
    """Return the job's workers, first those that hold devices, then those that this plan would start or keeps."""
    held = [t for t in job.tasks.values() if t.status is Status.HELD]
    if len(held) == job.active:
        return held
    return held + [t for t in job.pending if t.status is Status.BOUND or attempt.evictable(t)]


def _add_single(attempt: Attempt, job: Job, single: list[tuple[Task, ...]], units: list[Unit]) -> None:
    lent = job.lent
    elastic = attempt.mode is not Mode.LENT and may_be_victim(attempt, job)
    for tasks in single:
        lent -= len(tasks)
        if lent >= 0:
            units.append(_unit(attempt, Stage.LENT, job, tasks))
        elif elastic:
            units.append(_unit(attempt, Stage.ELASTIC, job, tasks))


def may_be_victim(attempt: Attempt, job: Job) -> bool:
    """Return whether the job may lose workers that it requests, by the rules that no eviction changes."""
    same = job.queue is attempt.job.queue
    if attempt.mode is Mode.PREEMPT:
        return same and job.priority < attempt.job.priority
    return not same


def _unit(attempt: Attempt, stage: Stage, job: Job, tasks: tuple[Task, ...]) -> Unit:
    key = (
        stage is not Stage.LENT,
        attempt.below_share(job.queue),
        stage,
        # A job that does not return to the queue loses all of its work; others lose the work since their last
        # checkpoint. A worker above the gang loses nothing.
        (job.priority, not job.movable, -job.saved_at if stage is Stage.WHOLE else 0.0, -job.submitted_at, job.uid),
        _newest_first(tasks[0]),
    )
    return Unit(key, stage, job, tasks)


def _newest_first(task: Task) -> float:
    """Return the order of a job's workers as victims: first those that do not run yet, which lose nothing."""
    return -task.index if task.status is Status.HELD else -UNLIMITED


def _allowed(attempt: Attempt, unit: Unit, before: Sequence[Unit]) -> bool:
    """Return whether the queue, after losing the units `before`, holds more than it keeps and may lose this one.

    A job within its queue's guaranteed quota may reclaim all above the victim's guaranteed quota; a job above it only
    what is above the victim's fair share.
    """
    if unit.stage is Stage.LENT or attempt.mode is not Mode.RECLAIM:
        return True
    victim, _, resources = attempt.margin(unit.job.queue)
    if victim is None:
        return False
    if not before and unit.job.surplus <= unit.job.lent:
        return any(holds > keeps for _, holds, keeps in resources)
    stopped = [t for u in before if u.stage is not Stage.LENT and victim in u.job.queue.path for t in u.tasks]
    if unit.stage is Stage.WHOLE:
        # The gang is evicted last, after all workers above it.
        stopped.extend(unit.tasks[: unit.job.surplus - unit.job.lent])
    lost = quota.total(attempt.ledger, stopped)
    return any(holds - lost[r] > keeps for r, holds, keeps in resources)
