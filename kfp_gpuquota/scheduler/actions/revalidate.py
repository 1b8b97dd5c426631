"""Drops the decisions of a plan that later events have made obsolete. Pure.

A plan that is made in another process is of the state as it was. Its starts are carried out if they still fit, one
after the other, on the present state. Workers are stopped only if every start and nomination of the plan is still
possible: which of them a worker is stopped for is not recorded, and none may be stopped without a cause. What is
dropped is decided again by the next plan, which sees the later events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.scheduler.actions.promises import promises_after_starts
from kfp_gpuquota.scheduler.fairness import quota
from kfp_gpuquota.scheduler.placement import placement
from kfp_gpuquota.scheduler.state.groups import held_back
from kfp_gpuquota.scheduler.state.model import Status, Task

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.api.placement import Placement
    from kfp_gpuquota.scheduler.actions.decisions import Evict, Move, Nominate, Plan, Resize
    from kfp_gpuquota.scheduler.state.model import Job
    from kfp_gpuquota.scheduler.state.state import State


def still_valid(state: State, plan: Plan) -> Plan:
    """Return the plan's decisions that the present state allows. The state is not changed."""
    ledger = state.ledger
    ledger.settle()
    mark = ledger.mark()
    try:
        bind = tuple(one for one in plan.bind if _starts(state, one.job, one.placements, 0))
        grows = tuple(one for one in plan.resize if not one.remove and _grows(state, one))
        evict = tuple(one for one in plan.evict if _evictable(state, one))
        move = tuple(one for one in plan.move if _movable(state, one))
        shrinks = tuple(one for one in plan.resize if one.remove and _shrinks(state, one))
        nominate = tuple(one for one in plan.nominate if _nominable(state, one))
    finally:
        ledger.rollback(mark)
    resize, promises = (*grows, *shrinks), plan.promises
    if any(_is_held(state, one) for one in plan.move):
        nominate = ()
    if (len(bind), len(nominate)) != (len(plan.bind), len(plan.nominate)):
        evict, move, resize = (), (), grows
        starts = msgspec.structs.replace(plan, bind=bind, resize=grows)
        promises = promises_after_starts(state.promises, starts)  # no room is made for others
    return msgspec.structs.replace(
        plan, bind=bind, resize=resize, evict=evict, move=move, nominate=nominate, promises=promises
    )


def _waiting(state: State, uid: str, active: int) -> Job | None:
    """Return the job if it may get workers and has as many as when it was planned."""
    job = state.jobs.get(uid)
    if job is None or job.removed or job.suspended or job.completing or job.active != active:
        return None
    return None if held_back(job) else job


def _starts(state: State, uid: str, placements: Iterable[Placement], active: int) -> bool:
    """Bind the job's next workers at these placements on the ledger, or change nothing and return False."""
    job = _waiting(state, uid, active)
    if job is None:
        return False
    mark = state.ledger.mark()
    taken: set[int] = set()
    if all(_bound(state, job, one, taken) for one in placements):
        return True
    state.ledger.rollback(mark)
    return False


def _bound(state: State, job: Job, where: Placement, taken: set[int]) -> bool:
    """Bind one worker of the job, a pending one of that part or one that is lent."""
    ledger, host = state.ledger, state.ledger.hosts.get(where.node)
    index = next((i for i, t in enumerate(job.pending) if i not in taken and where.part in {"", t.group}), None)
    if index is not None:
        taken.add(index)
    task = Task(job=job, request=job.request, index=0) if index is None else job.pending[index]
    if host is None or not placement.fits(host, task, future=False):
        return False
    share = task.request.share_of(host.gpu_memory_mib)
    if any(device not in host.taken or host.idle(device) < share for device in where.devices):
        return False
    if quota.barred_by_limit(job, ledger.amount(task), future=False):
        return False
    ledger.set(task, Status.BOUND, host, where.devices)
    return True


def _grows(state: State, resize: Resize) -> bool:
    return _starts(state, resize.job, resize.add, resize.from_workers)


def _held(state: State, uid: str, workers: Iterable[str]) -> bool:
    """Return whether these are workers of the job that run and were not asked to leave."""
    job = state.jobs.get(uid)
    return job is not None and all(w in job.tasks and job.tasks[w].status is Status.HELD for w in workers)


def _evictable(state: State, evict: Evict) -> bool:
    job = state.jobs.get(evict.job)
    return job is not None and _held(state, evict.job, evict.workers) and job.active == len(evict.workers)


def _movable(state: State, move: Move) -> bool:
    host = state.ledger.hosts.get(move.to.node)
    return _held(state, move.job, (move.worker,)) and not _is_held(state, move) and host is not None and host.ready


def _is_held(state: State, move: Move) -> bool:
    """Return whether a stop policy would keep the moved worker from starting again."""
    job = state.jobs.get(move.job)
    return job is not None and job.halted


def _shrinks(state: State, resize: Resize) -> bool:
    job = state.jobs.get(resize.job)
    return job is not None and _held(state, resize.job, resize.remove) and job.active == resize.from_workers


def _nominable(state: State, nominate: Nominate) -> bool:
    job = state.jobs.get(nominate.job)
    hosts = [state.ledger.hosts.get(one.node) for one in nominate.placements]
    if job is None or job.removed or job.suspended or held_back(job):
        return False
    return all(h is not None and h.ready for h in hosts)
