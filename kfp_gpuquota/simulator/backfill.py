"""EASY backfill, as most batch systems do it: a policy to compare with, which is given the end of each running job.

Jobs start in the order of their arrival. The first that does not fit gets the earliest time at which it will, from the
ends of those that run. Another one starts before it if it has ended by then, or if the first one fits beside it then.
(Lifka, "The ANL/IBM SP scheduling system", 1995.)
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from kfp_gpuquota.scheduler import Bind, Placement, Plan
from kfp_gpuquota.scheduler.explain import sentences
from kfp_gpuquota.scheduler.placement import placement
from kfp_gpuquota.scheduler.state.model import Job, Status, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Shape
    from kfp_gpuquota.scheduler.state.state import State


def easy_backfill(state: State, ends_at: Callable[[str], float]) -> Plan:
    """Return the jobs to start now; `ends_at(uid)` is when a job that runs, or would start now, ends."""
    state.ledger.settle()
    mark = state.ledger.mark()
    try:
        return Plan(bind=tuple(_starts(state, ends_at)))
    finally:
        state.ledger.rollback(mark)


def _starts(state: State, ends_at: Callable[[str], float]) -> Iterator[Bind]:
    ledger, first, shadow = state.ledger, None, inf
    failed: set[tuple[Shape, str]] = set()
    started: list[Job] = []
    for job, shape in _in_order(state):
        mark = ledger.mark()
        if (shape, job.queue.name) in failed:
            continue
        if not placement.place_all(ledger, job.pending, future=False):
            failed.add((shape, job.queue.name))
            if first is None:
                first, shadow = job, _earliest(state, job, started, ends_at)
            continue
        started.append(job)
        if first is not None and ends_at(job.uid) > shadow and not _fits_at(state, first, started, ends_at, shadow):
            started.pop()
            ledger.rollback(mark)
        else:
            placed = tuple(Placement(t.node.name, t.devices, t.group) for t in job.pending if t.node is not None)
            yield Bind(job.uid, placed, sentences.started(job, len(placed)))


def _in_order(state: State) -> list[tuple[Job, Shape]]:
    """Return the waiting jobs in the order of their arrival."""
    entries = [
        (job, shape)
        for queue in state.ledger.queues.values()
        for shape, filed in queue.waiting.items()
        for _, job in filed
        if shape.starts
    ]
    return sorted(entries, key=lambda entry: (entry[0].submitted_at, entry[0].uid))


def _ending(state: State, started: list[Job], ends_at: Callable[[str], float]) -> list[tuple[float, list[Task]]]:
    """Return the tasks that run, or have just been started, with their end, in the order of these."""
    found = [(ends_at(job.uid), list(job.tasks.values())) for q in state.ledger.queues.values() for job in q.running]
    found += [(ends_at(job.uid), list(job.pending)) for job in started]
    return sorted((entry for entry in found if entry[1]), key=lambda entry: entry[0])


def _earliest(state: State, job: Job, started: list[Job], ends_at: Callable[[str], float]) -> float:
    """Return the first end after which the job fits; `inf` if none."""
    ledger = state.ledger
    mark = ledger.mark()
    try:
        for end, tasks in _ending(state, started, ends_at):
            _release(ledger, tasks)
            if placement.place_all(ledger, job.pending, future=False):
                return end
        return inf
    finally:
        ledger.rollback(mark)


def _fits_at(state: State, job: Job, started: list[Job], ends_at: Callable[[str], float], at: float) -> bool:
    ledger = state.ledger
    mark = ledger.mark()
    for end, tasks in _ending(state, started, ends_at):
        if end <= at:
            _release(ledger, tasks)
    fits = placement.place_all(ledger, job.pending, future=False)
    ledger.rollback(mark)
    return fits


def _release(ledger: Ledger, tasks: list[Task]) -> None:
    for task in tasks:
        ledger.set(task, Status.PENDING, None)
