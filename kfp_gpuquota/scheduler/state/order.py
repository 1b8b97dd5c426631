"""Who is first: the order of queues, of the jobs in one queue, and of victims."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from kfp_gpuquota.scheduler.state.groups import below
from kfp_gpuquota.scheduler.state.model import UNLIMITED, Amount, Job, OrderKey, Queue, Shape, Task

if TYPE_CHECKING:
    from collections.abc import Sequence


class Entitlement(IntEnum):
    """What a job brings its queue to."""

    WITHIN_GUARANTEE = 0
    WITHIN_SHARE = 1
    BEYOND = 2


QueueKey = tuple[bool, Entitlement, int, float, float, float, str, str]


def entitlement(queue: Queue, amount: Amount) -> Entitlement:
    """Where the queue stands with `amount` more."""
    if all(queue.claim(r) + value <= queue.deserved[r] for r, value in enumerate(amount) if value):
        return Entitlement.WITHIN_GUARANTEE
    if all(queue.claim(r) + value <= queue.share[r] for r, value in enumerate(amount) if value):
        return Entitlement.WITHIN_SHARE
    return Entitlement.BEYOND


def shape_of(job: Job, tasks: Sequence[Task]) -> Shape:
    """The class of jobs that fit or fail together with this one."""
    return Shape(tuple(t.request for t in tasks), job.priority, job.preemptible, below(job), job.groups)


def shape_amount(shape: Shape, gpu_memory_mib: int) -> Amount:
    """What a job of this shape asks for next."""
    gpu = cpu = memory = 0.0
    for request in shape.requests:
        amount = request.amount(gpu_memory_mib)
        gpu, cpu, memory = gpu + amount.gpu, cpu + amount.cpu, memory + amount.memory
    return Amount(gpu, cpu, memory)


def job_key(job: Job) -> OrderKey:
    """Priority, then gangs below their minimum before those at it before those above it, then age."""
    stage = 0 if below(job) else 1 if job.active == job.gang else 2
    return (-job.priority, stage, job.submitted_at, job.uid)


def queue_key(queue: Queue, amount: Amount) -> QueueKey:
    """Queues not above their fair share; then those still within deserved; priority; dominant share; age.

    Between the second and the third: what stays within the fair share goes before what does not. Without that, a place
    that was reclaimed for a queue within its share could fall back to the queue that it was taken from.
    """
    held, lent, share = queue.held, queue.lent, queue.share
    claims = (held[0] - lent[0], held[1] - lent[1], held[2] - lent[2])
    over = claims[0] > share[0] or claims[1] > share[1] or claims[2] > share[2]
    with_job = (claims[0] + amount[0], claims[1] + amount[1], claims[2] + amount[2])
    return (
        over,
        entitlement(queue, amount),
        -queue.priority,
        dominant_share(queue, with_job),
        dominant_share(queue, claims),
        queue.created,
        queue.name,
        queue.pool,
    )


def dominant_share(queue: Queue, amounts: Sequence[float]) -> float:
    """The largest part that the amounts are of what the queue keeps."""
    largest = 0.0
    for amount, keep in zip(amounts, queue.keeps, strict=True):
        if amount > 0:
            largest = max(largest, amount / keep if keep > 0 else UNLIMITED)
    return largest
