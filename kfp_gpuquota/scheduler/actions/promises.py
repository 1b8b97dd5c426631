"""Keeps what earlier plans decided: a job for which room was made starts there, and nobody else does.

A promise is part of the state. At the beginning of each plan every promised placement is nominated again, in the order
in which they were promised; then each job starts whose placements are idle by now. A worker that moves has its
destination in the same way: until it has exited, a placeholder of its job holds it.

Invariant: a promise ends when it is carried out, when an event makes it impossible (a node or devices are lost, the
job or its quota changes), or when a job that may reclaim from the promised one takes its place, and for no other
reason. So room that is made for a job is not given to the next one in the queue while its former holders exit.

The workers that leave for a promise are stored with it. A process that ends between two of its requests leaves some of
them running; the first plan of the next one asks those, too, instead of finding the promise impossible.

Rejected: deciding again in each plan from what is held, with a simulation of the next plan that gives up decisions
which that plan would not keep. A job whose minimum is below its size started again on the node that was being cleared,
the job that waited cleared another one, and so on: one job was moved 47 times in 1.7 s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.scheduler.fairness import quota
from kfp_gpuquota.scheduler.placement import placement
from kfp_gpuquota.scheduler.state.groups import below, loose, next_tasks
from kfp_gpuquota.scheduler.state.model import Status, Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kfp_gpuquota.api.placement import Placement
    from kfp_gpuquota.scheduler.actions.decisions import Plan
    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Job

    Promises = Mapping[str, tuple[Placement, ...]]

Kept = dict["Job", list[Task]]
Asked = dict[Task, "Job"]
"""Workers that are asked to leave again, and the job that each leaves for."""


def keep(ledger: Ledger, promised: Iterable[Job], workers: Mapping[str, Task]) -> tuple[Kept, Asked]:
    """Nominate the promised placements, then bind what can start; return the tasks of each promise that is kept.

    Also the victims of these that still run, with the job that each leaves for: they are asked to leave now.
    """
    in_order = sorted(promised, key=lambda job: (job.promised_at, job.uid))
    kept, asked = _kept(ledger, in_order, workers)
    for job, tasks in kept.items():
        if all(task.moved is None for task in tasks):
            _start(ledger, job, tasks)
    return kept, asked


def _kept(ledger: Ledger, promised: Sequence[Job], workers: Mapping[str, Task]) -> tuple[Kept, Asked]:
    """Nominate; for a promise that cannot be kept nobody is asked to leave."""
    mark = ledger.mark()
    asking = [job for job in promised if job.victims]
    while True:
        asked = _ask_again(ledger, asking, workers)
        kept: Kept = {}
        for job in promised:
            if tasks := _nominate(ledger, job):
                kept[job] = tasks
        in_vain = {job for job in asked.values() if job not in kept}
        if not in_vain:
            return kept, asked
        asking = [job for job in asking if job not in in_vain]
        ledger.rollback(mark)


def _ask_again(ledger: Ledger, promised: Iterable[Job], workers: Mapping[str, Task]) -> Asked:
    """Let victims leave that the process did not ask which made the promise; return them with its job."""
    asked: Asked = {}
    for job in promised:
        for task in (workers[worker] for worker in job.victims if worker in workers):
            if task.status is Status.HELD and (not task.job.core or loose(task.job, [task])):
                ledger.set(task, Status.LEAVING, task.node, task.devices)
                asked[task] = job
    return asked


def changed_promises(promised: Promises, plan: Plan) -> dict[str, tuple[Placement, ...]]:
    """Return what a plan promises otherwise than `promised`, by uid of the job; () ends a promise."""
    ended: dict[str, tuple[Placement, ...]] = {uid: () for uid in promised if uid not in plan.promises}
    return ended | {uid: found for uid, found in plan.promises.items() if promised.get(uid) != found}


def promises_after_starts(promised: Promises, plan: Plan) -> dict[str, tuple[Placement, ...]]:
    """Return what stays promised if of a plan only its starts and growth are carried out, and no room is made.

    What such a job starts with is promised no more: a placement that is held would make the rest impossible.
    """
    starting = {bind.job for bind in plan.bind} | {resize.job for resize in plan.resize if resize.add}
    left = {uid: tuple(one for one in promised.get(uid, ()) if one in plan.promises.get(uid, ())) for uid in starting}
    return {uid: found for uid, found in {**promised, **left}.items() if found}


def _nominate(ledger: Ledger, job: Job) -> list[Task]:
    """Nominate all promised placements of the job that it still needs; none if its gang would not be whole."""
    mark = ledger.mark()
    waiting, leaving = job.pending[job.placed :], [t for t in job.tasks.values() if t.status is Status.LEAVING]
    last: Task | None = None
    if job.stopped:  # none of its workers can start before all have exited
        waiting, leaving, last = [], leaving + waiting, next(iter(job.tasks.values()))
    tasks: list[Task] = []
    for promise in job.promised:
        task = _task_for(job, promise.part, waiting, leaving, last)
        if task is None:
            break
        host = ledger.hosts.get(promise.node)
        if host is None or not placement.fits_at(host, task, promise.devices):
            ledger.rollback(mark)
            return []
        ledger.set(task, Status.NOMINATED, host, promise.devices)
        tasks.append(task)
    torn = job.segment > 1 and len(tasks) < len(job.promised)
    if torn or below(job) or _barred(ledger, job, tasks):
        ledger.rollback(mark)
        return []
    return tasks


def _task_for(job: Job, part: str, waiting: list[Task], leaving: list[Task], last: Task | None = None) -> Task | None:
    """Return a waiting worker of the part, a placeholder for one that has not exited yet, or one above the request.

    The last is a placeholder, too, if the job has to wait for the exit of `last`: it would get other workers else.
    """
    for i, task in enumerate(waiting):
        if task.group == part:
            return waiting.pop(i)
    for i, task in enumerate(leaving):
        if task.group == part:
            del leaving[i]
            return Task(job, task.request, task.index, priority=task.priority, group=part, moved=task)
    if job.wanted <= job.active < job.most:
        return Task(job, job.request, job.next_index + job.active, group=part, moved=last)
    return None


def _barred(ledger: Ledger, job: Job, tasks: Sequence[Task]) -> bool:
    """Return whether a limit, or for a core the guarantee, forbids what was nominated (it is counted already)."""
    amount = quota.total(ledger, tasks)
    if not job.queue.exists:
        return True
    for queue in job.queue.path:
        if quota.exceeds(queue, amount, fairly=False):
            return True
        fixed = zip(queue.fixed, queue.deserved, amount, strict=True)
        if job.active - len(tasks) < job.core and any(value and held > deserved for held, deserved, value in fixed):
            return True
    return False


def _start(ledger: Ledger, job: Job, tasks: list[Task]) -> None:
    """Bind the nominated tasks where they may start now: the gang together, others one by one; else elsewhere."""
    active = job.active - len(tasks)
    parts = [tasks] if job.groups is not None or active < job.gang else [[task] for task in tasks]
    for part in parts:
        if all(placement.is_idle(task) for task in part) and not _waits_for_limit(ledger, job, part):
            for task in part:
                ledger.set(task, Status.BOUND, task.node, task.devices)
    if all(task.status is Status.NOMINATED for task in tasks):
        _start_elsewhere(ledger, job, tasks)


def _waits_for_limit(ledger: Ledger, job: Job, tasks: Sequence[Task]) -> bool:
    """Return whether the job's own queues hold too much until leaving workers have exited."""
    amount = quota.total(ledger, tasks)
    return any(
        value and queue.held[r] + queue.leaving[r] > queue.limit[r]
        for queue in job.queue.path
        for r, value in enumerate(amount)
    )


def _start_elsewhere(ledger: Ledger, job: Job, tasks: Sequence[Task]) -> None:
    """Start the job on other devices that are idle now, instead of waiting for the promised ones."""
    mark = ledger.mark()
    for task in tasks:
        ledger.set(task, Status.PENDING, None)
    following = next_tasks(job)
    barred = not following or quota.barred_by_limit(job, quota.total(ledger, following), future=False)
    if barred or not placement.place_all(ledger, following, future=False) or below(job):
        ledger.rollback(mark)
