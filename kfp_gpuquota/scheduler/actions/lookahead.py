"""Lookahead of one cycle: no worker is stopped for a job that would then not start.

A nomination is not stored. When the victims have exited they are pending again, and the freed capacity is allocated in
queue order. With gangs and nodes of several sizes that may start another job within its share, placed so that the
nominated one no longer fits; that job would then reclaim again, and this could repeat without end. So before a worker
is stopped, the next allocation is simulated on the ledger, with all leaving workers removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.scheduler.state.model import Job, Status, Task

if TYPE_CHECKING:
    from kfp_gpuquota.scheduler.actions.cycle import Cycle
    from kfp_gpuquota.scheduler.state.ledger import Ledger


def would_not_start(cycle: Cycle) -> set[Job]:
    """Return the jobs for which other jobs lose workers in this cycle, and which the next cycle would not place."""
    takers = {job for job, action in cycle.causes.values() if action not in {"evict_stale", "limit"}}
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
    """Return whether the job starts with one worker on one whole GPU: it fits wherever a GPU is free."""
    return job.groups is None and job.gang == 1 and job.request.plain and job.request.devices == 1


def _let_go(ledger: Ledger, cycle: Cycle) -> list[Task]:
    """Make leaving workers pending again and remove nominations; return the tasks that were added as pending."""
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
