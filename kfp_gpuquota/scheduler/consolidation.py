"""Moving preemptible jobs together, only where every one of them finds a new place and the waiting job then fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.scheduler import placement
from kfp_gpuquota.scheduler.model import Host, Status, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.scheduler.ledger import Ledger


def consolidate(ledger: Ledger, tasks: Sequence[Task]) -> bool:
    """Clear room for all tasks by moving others, or change nothing. Moved tasks are bound at their new places."""
    mark = ledger.mark()
    for done, task in enumerate(tasks):
        host = placement.choose_host(ledger, task, len(tasks) - done, future=True) or _cleared(ledger, task)
        if host is None:
            ledger.rollback(mark)
            return False
        placement.put(ledger, task, host, future=True)
    return True


def _cleared(ledger: Ledger, task: Task) -> Host | None:
    """The host that takes the fewest moves, with those moves made."""
    if not task.request.whole or not task.request.devices:
        return None
    for _, host, moves in _candidates(ledger, task):
        mark = ledger.mark()
        if all(_move(ledger, moved, host) for moved in moves):
            return host
        ledger.rollback(mark)
    return None


def _candidates(ledger: Ledger, task: Task) -> list[tuple[tuple[int, int, str], Host, list[Task]]]:
    spare = sum(count * len(names) for count, names in ledger.by_future.items())
    found = []
    for host in ledger.hosts.values():
        if not host.ready or not placement.may_use(host, task) or spare - host.future_whole < 1:
            continue
        moves = _moves(host, task)
        if moves:
            size = sum(len(t.devices) for t in moves)
            if size <= spare - host.future_whole:
                found.append(((size, len(moves), host.name), host, moves))
    return sorted(found, key=lambda c: c[0])


def _moves(host: Host, task: Task) -> list[Task]:
    """The smallest set of movable tasks, large ones first where one suffices, that frees enough devices."""
    short = task.request.devices - host.future_whole
    movable = [t for t in host.tasks if t.status is Status.HELD and t.job.preemptible and t.request.whole and t.devices]
    movable.sort(key=lambda t: (len(t.devices), t.job.priority, -t.job.submitted_at, t.job.uid, -t.index))
    enough = next((t for t in movable if len(t.devices) >= short), None)
    if enough is not None:
        return [enough]
    chosen: list[Task] = []
    for candidate in reversed(movable):
        chosen.append(candidate)
        short -= len(candidate.devices)
        if short <= 0:
            return chosen
    return []


def _move(ledger: Ledger, task: Task, away: Host) -> bool:
    """Make the task leave its host, with a copy of it bound elsewhere."""
    ledger.set(task, Status.LEAVING, task.node, task.devices)
    copy = Task(job=task.job, request=task.request, index=task.index, priority=task.priority, moved=task)
    for host in ledger.hosts_with(task.request.devices, future=False):
        if host is not away and placement.fits(host, copy, future=False):
            placement.put(ledger, copy, host, future=False)
            return True
    return False
