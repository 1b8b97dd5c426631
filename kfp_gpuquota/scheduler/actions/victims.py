"""Selects victims for a pending job: the cheapest units whose eviction lets it start, and no more.

For each task the host is chosen whose most valuable victim is the least valuable (a bottleneck order), and on that host
every unit that need not be evicted is spared. Invariant: if the job cannot be placed, nothing is changed; if it can, no
victim can be spared without losing the placement. Rejected: the cheapest victims over all hosts, which may be spread
so that no host becomes free enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kfp_gpuquota.scheduler.actions.consolidation import resettle
from kfp_gpuquota.scheduler.fairness import quota
from kfp_gpuquota.scheduler.placement import domains, placement
from kfp_gpuquota.scheduler.placement.units import Attempt, Mode, Unit, cheapest_below
from kfp_gpuquota.scheduler.state.groups import below
from kfp_gpuquota.scheduler.state.model import Status, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.scheduler.placement.finder import Finders
    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Host

_SPARE_AT_MOST: Final = 32
"""With more victims than this none is spared: testing each of them again takes longer than it is worth."""


def make_room(attempt: Attempt, finders: Finders) -> bool:
    """Evict victims and nominate all tasks on the freed devices, or change nothing."""
    if attempt.job.groups is None:
        return _make_room(attempt, finders, [])
    return domains.within_required(
        attempt.ledger, attempt.job, attempt.tasks, lambda hosts: _make_room(attempt, finders, hosts)
    )


def _make_room(attempt: Attempt, finders: Finders, hosts: list[Host]) -> bool:
    """Make room; the hosts are those of the domain in which segments are placed."""
    mark = attempt.ledger.mark()
    units = _find(attempt, mark, finders, hosts)
    if units is None:
        return False
    # For one task the finder has spared units already; only several tasks, or limits, can leave unneeded victims.
    several = len(attempt.tasks) > 1 or attempt.limited
    if several and 1 < len(units) <= _SPARE_AT_MOST and not _spare(attempt, units, mark):
        attempt.ledger.rollback(mark)
        _find(attempt, mark, finders, hosts)
    if attempt.mode is not Mode.LENT:
        _resettle(attempt, mark)
    return True


def _resettle(attempt: Attempt, mark: int) -> None:
    """Move victims to idle capacity elsewhere, the most valuable first."""
    stopped = [t for t, before, _, _ in attempt.ledger.since(mark) if before is Status.HELD and not t.job.core]
    stopped = [t for t in stopped if t.status is Status.LEAVING and t.job.active < t.job.wanted]
    stopped = [t for t in stopped if not domains.bound_to_domain(t.job)]
    stopped.sort(key=lambda t: (-t.job.priority, t.job.submitted_at, t.job.uid, t.index))
    resettle(attempt.ledger, stopped, attempt.now)


def _find(attempt: Attempt, mark: int, finders: Finders, hosts: list[Host]) -> list[Unit] | None:
    """Free capacity for one task after the other; return the units evicted for all of them, or None."""
    units: list[Unit] = []
    attempt.evicted = attempt.limited = False
    if not domains.by_segment(
        attempt.ledger, attempt.tasks, hosts, lambda part: _room_for_all(attempt, part, units, finders)
    ):
        attempt.ledger.rollback(mark)
        return None
    if not _meet_limits(attempt, units):
        attempt.ledger.rollback(mark)
        return None
    return units


def _room_for_all(attempt: Attempt, tasks: Sequence[Task], units: list[Unit], finders: Finders) -> bool:
    mark, before, evicted = attempt.ledger.mark(), len(units), attempt.evicted
    for done, task in enumerate(tasks):
        if not _room_for(attempt, task, len(tasks) - done, units, finders):
            attempt.ledger.rollback(mark)
            del units[before:]
            attempt.evicted = evicted
            return False
    return True


def _room_for(attempt: Attempt, task: Task, more: int, units: list[Unit], finders: Finders) -> bool:
    ledger = attempt.ledger
    host = placement.choose_host(ledger, task, more, future=True)
    if host is None:
        found = finders.cheapest(attempt, task)
        if found is None:
            return False
        host, chosen = found
        for unit in chosen:
            _evict(ledger, unit)
        attempt.evicted = True
        units.extend(chosen)
    placement.put(ledger, task, host, future=True)
    return True


def _evict(ledger: Ledger, unit: Unit) -> None:
    for task in unit.tasks:
        if task.status is not Status.HELD:  # placed by this plan, or promised by an earlier one
            ledger.set(task, Status.PENDING, None)
        else:
            ledger.set(task, Status.LEAVING, task.node, task.devices)


def _meet_limits(attempt: Attempt, units: list[Unit]) -> bool:
    """Evict more units while the queue exceeds a limit or a department exceeds its fair share."""
    for queue in attempt.job.queue.path:
        while quota.exceeds(queue, attempt.amount, fairly=attempt.mode is Mode.RECLAIM):
            unit = cheapest_below(attempt, queue)
            if unit is None:
                return False
            _evict(attempt.ledger, unit)
            units.append(unit)
            attempt.limited = True
    return True


def _spare(attempt: Attempt, units: list[Unit], mark: int) -> bool:
    """Spare each unit without which the tasks still fit, the most valuable first; return whether the rest works."""
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
    if any(unit.job.active and below(unit.job) for unit in units):
        return False
    if not placement.place_all(attempt.ledger, attempt.tasks, future=True):
        return False
    fairly = attempt.mode is Mode.RECLAIM
    return not any(quota.exceeds(queue, attempt.amount, fairly=fairly) for queue in attempt.job.queue.path)
