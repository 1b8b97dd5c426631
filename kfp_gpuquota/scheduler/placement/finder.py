"""Finds the host with the cheapest victims, with lazily updated heaps of hosts by the cost of their victims.

Thousands of equal jobs may reclaim in one cycle. Between two of them only the changed hosts are evaluated again; every
other entry is checked when it reaches the top of its heap. Invariant: the cost of a host whose own tasks do not change
only increases, because queues and elastic jobs that lose workers become more expensive, never cheaper. So an outdated
entry is at most too cheap, and is corrected at the top. Evaluating every host for each job would take quadratic time.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from kfp_gpuquota.scheduler.placement import placement
from kfp_gpuquota.scheduler.placement.units import (
    Attempt,
    Mode,
    Stage,
    Unit,
    Whole,
    all_allowed,
    cheapest_whole,
    needed_on,
    units_on,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.scheduler.placement.units import UnitKey
    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Host, Queue, Request, Task

FinderKey = tuple[Mode, "Queue", int, "Request", frozenset["Queue"], frozenset["Host"] | None]
Cost = tuple["UnitKey", int, str]
Entry = tuple[Cost, int, int, "Host", list[Unit], tuple[int, ...]]


class Finders:
    """The finders of one cycle, one for each kind of attempt."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._finders: dict[FinderKey, Finder] = {}
        self._whole: dict[tuple[Mode, Queue, int], dict[Host, Whole]] = {}

    def cheapest(self, attempt: Attempt, task: Task) -> tuple[Host, list[Unit]] | None:
        """Return the host with the cheapest victims for the task, and these victims."""
        priority = attempt.job.priority if attempt.mode is Mode.PREEMPT else 0
        key = (attempt.mode, attempt.job.queue, priority, task.request, attempt.within, task.within)
        if key not in self._finders:
            self._finders[key] = Finder(self._ledger, self._whole.setdefault(key[:3], {}))
        return self._finders[key].cheapest(attempt, task)


class Finder:
    """Hosts by cost, in one heap for each queue of the most expensive victim on the host.

    Every eviction would reorder a single heap, because the first criterion is how far the victim's queue is above its
    share.
    """

    def __init__(self, ledger: Ledger, whole: dict[Host, Whole]) -> None:
        self._ledger = ledger
        self._heaps: dict[Queue, list[Entry]] = {}
        self._seen: int | None = None
        self._dropped: list[Host] = []
        self._whole = whole
        self._serial = 0

    def cheapest(self, attempt: Attempt, task: Task) -> tuple[Host, list[Unit]] | None:
        """Return the host with the cheapest victims for the task, and these victims; None where there is none."""
        self._refresh(attempt, task)
        while True:
            heaps = [(queue, heap[0]) for queue, heap in self._heaps.items() if heap]
            if not heaps:
                return None
            first = heaps[0] if len(heaps) == 1 else min(heaps, key=lambda top: self._rank(attempt, *top))
            found = self._check(attempt, task, first[0])
            if found is not None:
                return found

    def _check(self, attempt: Attempt, task: Task, queue: Queue) -> tuple[Host, list[Unit]] | None:
        """Return the top entry of the queue's heap if it is valid; else correct or drop it, and return None."""
        heap = self._heaps[queue]
        _, _, version, host, chosen, sizes = heap[0]
        is_present = version == host.version
        if is_present and sizes == _sizes(chosen) and all_allowed(attempt, chosen):
            return host, chosen
        heappop(heap)
        if is_present:
            better = self._needed_on(attempt, host, task)
            if better is None:
                self._dropped.append(host)
            else:
                self._push(better, host)
        return None

    def look_at(self, attempt: Attempt, task: Task, host: Host) -> None:
        """Evaluate the host's present state, and add it to its heap."""
        if host.ready and host.tasks and placement.could_hold(host, task) and placement.may_use(host, task):
            chosen = self._needed_on(attempt, host, task)
            if chosen is not None:
                self._push(chosen, host)

    def _needed_on(self, attempt: Attempt, host: Host, task: Task) -> list[Unit] | None:
        """Return the cheapest units that make the task fit on the host; None where there are none."""
        if len(attempt.tasks) > 1:
            return needed_on(attempt, host, task, units_on(attempt, host))
        known = self._whole.get(host)
        whole = None if known is None else known.present(attempt, host)
        if whole is None:
            units = units_on(attempt, host)
            whole = Whole.of(attempt, host, units) if _are_whole(units, host) else None
            if whole is None:
                return needed_on(attempt, host, task, units)
        if whole is not known:
            self._whole[host] = whole
        return cheapest_whole(attempt, host, task, whole)

    def _refresh(self, attempt: Attempt, task: Task) -> None:
        log = self._ledger.touched_hosts
        changed: Iterable[Host] = self._ledger.hosts.values()
        if self._seen is not None:
            # A host that was dropped during an attempt may be a candidate again after the attempt was rolled back.
            changed = dict.fromkeys([*log[self._seen :], *(() if attempt.evicted else self._dropped)])
        for host in changed:
            self.look_at(attempt, task, host)
        self._seen = len(log)
        if not attempt.evicted:
            self._dropped.clear()

    def _push(self, chosen: list[Unit], host: Host) -> None:
        heap = self._heaps.setdefault(chosen[-1].job.queue, [])
        self._serial += 1
        heappush(heap, (_cost(chosen, host), self._serial, host.version, host, chosen, _sizes(chosen)))

    @staticmethod
    def _rank(attempt: Attempt, queue: Queue, entry: Entry) -> tuple[bool, tuple[float, ...], Cost]:
        return (entry[0][0][0], attempt.below_share(queue), entry[0])


def _are_whole(units: list[Unit], host: Host) -> bool:
    """Return whether all units are whole jobs of one queue, with nothing above a gang, that run only on the host.

    Evictions elsewhere change neither them nor their order then.
    """
    for unit in units:
        job = unit.job
        if unit.stage is not Stage.WHOLE or job.queue is not units[0].job.queue or job.surplus > job.lent:
            return False
        if any(task.node is not host for task in unit.tasks):
            return False
    return True


def _sizes(chosen: list[Unit]) -> tuple[int, ...]:
    """Return the numbers of workers of the units' jobs on all hosts, on which the units' cost depends."""
    return (chosen[0].job.active,) if len(chosen) == 1 else tuple([unit.job.active for unit in chosen])


def _cost(chosen: list[Unit], host: Host) -> Cost:
    """Return the value of the most expensive unit without its queue, the number of victims, and the host's name."""
    dearest = chosen[-1].key
    key = (dearest[0], (), *dearest[2:])
    return (key, sum([len(u.tasks) for u in chosen]), host.name)
