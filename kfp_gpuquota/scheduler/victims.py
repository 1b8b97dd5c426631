"""Whom to stop so that a waiting job can start: the cheapest units whose going makes room, and no more.

A *unit* is what goes together: one worker that is lent or above the gang, or a whole job at its gang. For each task a
node is chosen on which the most valuable unit that must go is the least valuable (a bottleneck order), and on that
node every unit that is not needed is spared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from kfp_gpuquota.scheduler import placement, quota
from kfp_gpuquota.scheduler.consolidation import resettle
from kfp_gpuquota.scheduler.model import NOTHING, Amount, Host, Job, Queue, Status, Task
from kfp_gpuquota.scheduler.order import dominant_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kfp_gpuquota.scheduler.ledger import Ledger


class Mode(IntEnum):
    """From whom a waiting job may take."""

    LENT = 0
    RECLAIM = 1
    PREEMPT = 2


class Stage(IntEnum):
    """How much a unit's going costs, before anything else is compared."""

    LENT = 0
    ELASTIC = 1
    WHOLE = 2


_SPARE_AT_MOST: Final = 32
"""Sparing tries each unit again: beyond this many it costs more than it can save."""

UnitKey = tuple[bool, float, float, Stage, int, float, str, int]


class Unit(NamedTuple):
    """Tasks of one job that go together; the smallest key goes first."""

    key: UnitKey
    stage: Stage
    job: Job
    tasks: tuple[Task, ...]


@dataclass(slots=True)
class Attempt:
    """One try to make room for `tasks` of `job`."""

    ledger: Ledger
    job: Job
    tasks: Sequence[Task]
    mode: Mode
    amount: Amount = NOTHING
    now: float = 0.0
    ratios: dict[Queue, float] = field(default_factory=dict)
    within: frozenset[Queue] = frozenset()

    def __post_init__(self) -> None:
        self.amount = quota.total(self.ledger, self.tasks)
        self.within = frozenset(q for q in self.job.queue.path if quota.within_guarantee(q, self.amount))

    def ratio(self, queue: Queue) -> float:
        """How far above what it keeps the queue is; the same during one attempt."""
        if queue not in self.ratios:
            self.ratios[queue] = dominant_share(queue, [queue.claim(r) for r in range(3)])
        return self.ratios[queue]


def make_room(attempt: Attempt) -> bool:
    """Evict victims and nominate all tasks in their places, or change nothing."""
    mark = attempt.ledger.mark()
    units = _find(attempt, mark)
    if units is None:
        return False
    if 1 < len(units) <= _SPARE_AT_MOST and not _spare(attempt, units, mark):
        attempt.ledger.rollback(mark)
        _find(attempt, mark)
    if attempt.mode is not Mode.LENT:
        _resettle(attempt, mark)
    return True


def _resettle(attempt: Attempt, mark: int) -> None:
    """Victims that find an idle place elsewhere move there; the most valuable are asked first."""
    gone = [t for t, before, _, _ in attempt.ledger.since(mark) if before is Status.HELD and t.job.preemptible]
    gone = [t for t in gone if t.status is Status.LEAVING and t.job.active < t.job.wanted]
    gone.sort(key=lambda t: (-t.job.priority, t.job.submitted_at, t.job.uid, t.index))
    resettle(attempt.ledger, gone)


def _find(attempt: Attempt, mark: int) -> list[Unit] | None:
    """Room for one task after the other; the units evicted for all of them."""
    units: list[Unit] = []
    for done, task in enumerate(attempt.tasks):
        if not _room_for(attempt, task, len(attempt.tasks) - done, units):
            attempt.ledger.rollback(mark)
            return None
    if not _meet_limits(attempt, units):
        attempt.ledger.rollback(mark)
        return None
    return units


def _room_for(attempt: Attempt, task: Task, more: int, units: list[Unit]) -> bool:
    ledger = attempt.ledger
    host = placement.choose_host(ledger, task, more, future=True)
    if host is None:
        found = _cheapest(attempt, task)
        if found is None:
            return False
        host, chosen = found
        for unit in chosen:
            _evict(ledger, unit)
        units.extend(chosen)
    placement.put(ledger, task, host, future=True)
    return True


def _evict(ledger: Ledger, unit: Unit) -> None:
    for task in unit.tasks:
        ledger.set(task, Status.LEAVING, task.node, task.devices)


def _cheapest(attempt: Attempt, task: Task) -> tuple[Host, list[Unit]] | None:
    best: tuple[tuple[UnitKey, int, str], Host, list[Unit]] | None = None
    for host in attempt.ledger.hosts.values():
        if not host.ready or not host.tasks or not placement.may_use(host, task):
            continue
        chosen = _needed_on(attempt, host, task)
        if chosen is None:
            continue
        cost = (chosen[-1].key, sum(len(u.tasks) for u in chosen), host.name)
        if best is None or cost < best[0]:
            best = (cost, host, chosen)
    return None if best is None else best[1:]


def _needed_on(attempt: Attempt, host: Host, task: Task) -> list[Unit] | None:
    """The cheapest units that make the task fit on the host, in order of value; None where all do not suffice."""
    chosen: list[Unit] = []
    for unit in sorted(_units(attempt, _by_job(host.tasks)), key=lambda u: u.key):
        before = [u for u in chosen if u.job is not unit.job] if unit.stage is Stage.WHOLE else chosen
        if not _allowed(attempt, unit, before):
            continue
        chosen = [*before, unit]
        if placement.fits_without(host, task, _tasks(chosen)):
            return _pruned(host, task, chosen)
    return None


def _pruned(host: Host, task: Task, chosen: list[Unit]) -> list[Unit]:
    """Without the units that turn out not to be needed, the most valuable spared first."""
    for unit in chosen[-2::-1]:
        fewer = [u for u in chosen if u is not unit]
        if placement.fits_without(host, task, _tasks(fewer)):
            chosen = fewer
    return chosen


def _tasks(units: Iterable[Unit]) -> Iterable[Task]:
    return (task for unit in units for task in unit.tasks)


def _by_job(tasks: Iterable[Task]) -> dict[Job, list[Task]]:
    grouped: dict[Job, list[Task]] = {}
    for task in tasks:
        if task.status is Status.HELD:
            grouped.setdefault(task.job, []).append(task)
    return grouped


def _units(attempt: Attempt, grouped: dict[Job, list[Task]]) -> Iterable[Unit]:
    for job, tasks in grouped.items():
        if job is attempt.job:
            continue
        yield from _units_of(attempt, job, sorted(tasks, key=lambda t: (t.priority, -t.index)))


def _units_of(attempt: Attempt, job: Job, tasks: list[Task]) -> Iterable[Unit]:
    lent, surplus = job.lent, job.surplus
    whole = attempt.mode is not Mode.LENT and may_be_victim(attempt, job)
    for i, task in enumerate(tasks):
        if i < lent:
            yield _unit(attempt, Stage.LENT, job, (task,))
        elif whole and i < surplus:
            yield _unit(attempt, Stage.ELASTIC, job, (task,))
    if whole and len(tasks) > surplus:
        everything = tuple(t for t in job.tasks.values() if t.status is Status.HELD)
        if len(everything) == job.active:
            yield _unit(attempt, Stage.WHOLE, job, everything)


def may_be_victim(attempt: Attempt, job: Job) -> bool:
    """The rules that do not depend on how much was taken already."""
    if not job.preemptible:
        return False
    same = job.queue is attempt.job.queue
    if attempt.mode is Mode.PREEMPT:
        return same and job.priority < attempt.job.priority
    return not same


def _unit(attempt: Attempt, stage: Stage, job: Job, tasks: tuple[Task, ...]) -> Unit:
    key = (
        stage is not Stage.LENT,
        -attempt.ratio(job.queue),
        -job.queue.created,
        stage,
        job.priority,
        -job.submitted_at,
        job.uid,
        -tasks[0].index,
    )
    return Unit(key, stage, job, tasks)


def _allowed(attempt: Attempt, unit: Unit, before: Sequence[Unit]) -> bool:
    """A queue may lose the unit, after those before it, only while it holds more than it keeps."""
    if unit.stage is Stage.LENT or attempt.mode is not Mode.RECLAIM:
        return True
    levels = quota.rivals(attempt.job.queue, unit.job.queue)
    if levels is None:
        return False
    reclaimer, victim = levels
    gone = [t for u in before if u.stage is not Stage.LENT and victim in u.job.queue.path for t in u.tasks]
    if unit.stage is Stage.WHOLE:
        # The gang is looked at as what is left when everything above it has gone.
        gone.extend(unit.tasks[: unit.job.surplus - unit.job.lent])
    return quota.may_lose(
        victim, quota.total(attempt.ledger, gone), attempt.amount, guaranteed=reclaimer in attempt.within
    )


def _meet_limits(attempt: Attempt, units: list[Unit]) -> bool:
    """Evict more where a limit or a department's fair share, and not the devices, stands in the way."""
    for queue in attempt.job.queue.path:
        while quota.exceeds(queue, attempt.amount, fairly=attempt.mode is Mode.RECLAIM):
            unit = _next_below(attempt, queue)
            if unit is None:
                return False
            _evict(attempt.ledger, unit)
            units.append(unit)
    return True


def _next_below(attempt: Attempt, queue: Queue) -> Unit | None:
    """The cheapest unit in the subtree of the queue."""
    held = {job: [t for t in job.tasks.values() if t.status is Status.HELD] for job in _jobs_below(queue)}
    units = (u for u in _units(attempt, {j: t for j, t in held.items() if t}) if _allowed(attempt, u, ()))
    return min(units, key=lambda u: u.key, default=None)


def _jobs_below(queue: Queue) -> Iterable[Job]:
    yield from queue.running
    for child in queue.children.values():
        yield from _jobs_below(child)


def _spare(attempt: Attempt, units: list[Unit], mark: int) -> bool:
    """Try again without each unit, the most valuable first, and keep what still works."""
    ledger, needed = attempt.ledger, list(units)
    for unit in sorted(units, key=lambda u: u.key, reverse=True):
        fewer = [u for u in needed if u is not unit]
        ledger.rollback(mark)
        if _works(attempt, fewer):
            needed = fewer
    ledger.rollback(mark)
    return _works(attempt, needed)


def _works(attempt: Attempt, units: Sequence[Unit]) -> bool:
    for unit in units:
        _evict(attempt.ledger, unit)
    if any(0 < unit.job.active < unit.job.gang for unit in units):
        return False
    if not placement.place_all(attempt.ledger, attempt.tasks, future=True):
        return False
    fairly = attempt.mode is Mode.RECLAIM
    return not any(quota.exceeds(queue, attempt.amount, fairly=fairly) for queue in attempt.job.queue.path)
