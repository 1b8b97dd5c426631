"""Chooses the workers that a project loses that drains, or whose limit was lowered below its use and is enforced.

Workers above what their job requests go first, then those above a gang's minimum, then whole jobs: each by the lowest
priority, and the youngest of equals. Jobs that cannot be preempted keep their gangs, so a project may stay above its
limit; nothing more starts in it. A project that drains loses all that can be preempted.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from kfp_gpuquota.api import StopPolicy
from kfp_gpuquota.scheduler.state.groups import loose_units
from kfp_gpuquota.scheduler.state.model import Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Job, Queue, Task


def enforce(ledger: Ledger) -> Iterator[Task]:
    """Mark workers as leaving until no enforced limit is exceeded and nothing is to be drained, and yield them."""
    for queue in ledger.queues.values():
        if not _exceeds(queue):
            continue
        jobs = [(_order(job), job) for job in _running(queue)]
        heapify(jobs)
        while jobs and _exceeds(queue):
            _, job = heappop(jobs)
            part = _part(job)
            for task in part:
                ledger.set(task, Status.LEAVING, task.node, task.devices)
                yield task
            if part and job.active:
                heappush(jobs, (_order(job), job))


def _exceeds(queue: Queue) -> bool:
    """Return whether the queue, with those below it, holds more than it may keep."""
    if queue.stop_policy is StopPolicy.HOLD_AND_DRAIN:
        return any(queue.held)
    return queue.enforced and any(queue.held[r] > queue.limit[r] for r in range(3))


def _running(queue: Queue) -> Iterator[Job]:
    yield from queue.running
    for child in queue.children.values():
        yield from _running(child)


def _order(job: Job) -> tuple[int, int, float, str]:
    kind = 0 if job.lent else 1 if job.surplus else 2
    return kind, job.priority, -job.submitted_at, job.uid


def _part(job: Job) -> list[Task]:
    """Return the job's youngest worker, or segment, that it can do without, else all workers; of a core none."""
    held = [task for task in job.tasks.values() if task.status is Status.HELD]
    spare = loose_units(job, sorted(held, key=lambda task: -task.index))
    return list(spare[0]) if spare else [] if job.core else held
