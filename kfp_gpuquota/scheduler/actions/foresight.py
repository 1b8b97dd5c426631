"""Looking one cycle ahead: nobody is stopped for a job that would then not start.

A nomination is not remembered. When the victims are gone they wait again, and the places go to whom the order says;
with gangs and nodes of several sizes that may be another job within its share, placed so that the first no longer fits.
That one would then take from others once more, and so for ever. So the next allocation is played through on the ledger,
with all that leaves gone, before anybody is told to go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.scheduler.state.model import Job, Status, Task

if TYPE_CHECKING:
    from kfp_gpuquota.scheduler.actions.cycle import Cycle
    from kfp_gpuquota.scheduler.state.ledger import Ledger


def would_not_start(cycle: Cycle) -> set[Job]:
    """Jobs for which others lose workers in this cycle, and which the next cycle would not place after all."""
    takers = {job for job, action in cycle.causes.values() if action != "evict_stale"}
    ledger = cycle.ledger
    if not ledger.special and all(_simple(job) for job in takers):
        return set()
    promised = {job: job.active for job in takers}
    mark = ledger.mark()
    touched = dict.fromkeys(task.job for task in cycle.changed())
    returned = _let_go(ledger, cycle)
    cycle.follow(touched).run(("allocate",))
    lost = {job for job, active in promised.items() if job.active < active}
    for task in returned:
        task.job.pending.remove(task)
    ledger.rollback(mark)
    return lost


def _simple(job: Job) -> bool:
    """One worker with one whole GPU fits wherever one is free: nothing can be placed so that it no longer does."""
    return job.groups is None and job.gang == 1 and job.request.plain and job.request.devices == 1


def _let_go(ledger: Ledger, cycle: Cycle) -> list[Task]:
    """All that leaves is gone and waits again, and nominations are forgotten. Returns what was added to be waiting."""
    for task in cycle.changed():
        if task.status is Status.NOMINATED:
            ledger.set(task, Status.PENDING, None)
    returned: list[Task] = []
    for task in list(ledger.leaving):
        job = task.job
        ledger.set(task, Status.PENDING, None)
        if not job.removed and not job.suspended and job.active + len(job.pending) - job.placed < job.wanted:
            fresh = Task(job=job, request=task.request, index=task.index, priority=task.priority)
            job.pending.append(fresh)
            returned.append(fresh)
    return returned
