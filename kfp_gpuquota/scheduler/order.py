"""Who is first: the order of queues, of the jobs in one queue, and of victims."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.scheduler.model import Amount, Job, OrderKey, Queue, Shape, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

QueueKey = tuple[bool, bool, int, float, float, float, str]


def next_tasks(job: Job) -> list[Task]:
    """What the job asks for next: the rest of its gang together, then one task at a time."""
    count = max(1, job.gang - job.active)
    tasks = job.pending[job.placed : job.placed + count]
    return tasks if len(tasks) == count else []


def shape_of(job: Job, tasks: Sequence[Task]) -> Shape:
    """The class of jobs that fit or fail together with this one."""
    return Shape(tuple(t.request for t in tasks), job.priority, job.preemptible, job.active < job.gang)


def job_key(job: Job) -> OrderKey:
    """Priority, then gangs below their minimum before those at it before those above it, then age."""
    stage = 0 if job.active < job.gang else 1 if job.active == job.gang else 2
    return (-job.priority, stage, job.submitted_at, job.uid)


def queue_key(queue: Queue, amount: Amount) -> QueueKey:
    """Queues not above their fair share; then those still within deserved; priority; dominant share; age."""
    over = any(queue.claim(r) > queue.share[r] for r in range(3))
    with_job = [queue.claim(r) + amount[r] for r in range(3)]
    beyond = any(with_job[r] > queue.deserved[r] for r in range(3) if amount[r])
    return (
        over,
        beyond,
        -queue.priority,
        dominant_share(queue, with_job),
        dominant_share(queue, [queue.claim(r) for r in range(3)]),
        queue.created,
        queue.name,
    )


def dominant_share(queue: Queue, amounts: Sequence[float]) -> float:
    """The largest part that the amounts are of what the queue keeps."""
    return max(_ratio(a, keep) for a, keep in zip(amounts, queue.keeps, strict=True))


def _ratio(amount: float, keep: float) -> float:
    if amount <= 0:
        return 0.0
    return amount / keep if keep > 0 else float("inf")
