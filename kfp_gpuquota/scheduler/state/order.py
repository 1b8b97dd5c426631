"""Sort keys: the order of queues, and of the jobs in one queue."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Order
from kfp_gpuquota.scheduler.state.groups import below
from kfp_gpuquota.scheduler.state.model import UNLIMITED, Amount, Job, OrderKey, Queue, Shape, Task

if TYPE_CHECKING:
    from collections.abc import Sequence


class Entitlement(IntEnum):
    """The level of its quota that a queue reaches with a job."""

    WITHIN_GUARANTEE = 0
    WITHIN_SHARE = 1
    BEYOND = 2


RankOf = Callable[["Job"], float]
"""Returns what orders the jobs of one queue, priority and entitlement before their age does: less is first."""

Position = tuple[int, bool, float, OrderKey]
"""The key of a waiting job among those of its queue, of the same entitlement; unique, since it ends with the uid."""

MOST_OVERTAKEN_S: Final = 12 * 3600.0
"""No job is overtaken by shorter ones for longer."""

QueueKey = tuple[bool, Entitlement, int, float, float, float, str, str]


def entitlement(queue: Queue, amount: Amount) -> Entitlement:
    """Return the level of its quota that the queue reaches with `amount` more."""
    held, lent, deserved, granted, share = queue.held, queue.lent, queue.deserved, queue.granted, queue.share
    reached = Entitlement.WITHIN_GUARANTEE
    for r, value in enumerate(amount):  # without generators: this is called for every queue after every start
        if value:
            claim = held[r] - lent[r] + value
            if claim > deserved[r] or claim > granted[r]:
                if claim > share[r]:
                    return Entitlement.BEYOND
                reached = Entitlement.WITHIN_SHARE
    # Beyond the guarantee of one resource all of them must be within the share.
    if reached is Entitlement.WITHIN_SHARE:
        for r, value in enumerate(amount):
            if value and held[r] - lent[r] + value > share[r]:
                return Entitlement.BEYOND
    return reached


def shape_of(job: Job, tasks: Sequence[Task]) -> Shape:
    """Return the shape of the job; jobs of one shape fit or fail together."""
    order = job.queue.order
    user = job.user.name if order is Order.FAIR_USERS else ""
    length_s = job.length_s if order is Order.SHORTEST else 0.0
    runs = job.uid if job.groups is not None and job.active else ""
    requests = tuple(t.request for t in tasks)
    return Shape(requests, job.priority, job.preemptible, below(job), job.groups, user, length_s, runs)


def among(entry: tuple[OrderKey, Job], rank_of: RankOf) -> tuple[bool, float, OrderKey]:
    """Return the key of a waiting job among those of one priority: gangs that run below their minimum come first."""
    key, job = entry
    return key[1] > 0, rank_of(job), key


def position(entry: tuple[OrderKey, Job], rank_of: RankOf) -> Position:
    """Return the key of a waiting job among those of its queue, of the same entitlement."""
    return entry[0][0], *among(entry, rank_of)


def rank_by_length(job: Job, now: float, reserve_after_s: float) -> float:
    """Return the job's rank where shorter ones come first; those that were overtaken for long come before all others.

    For as long as it is expected to run itself, but at least for the time of the queue's reservations.
    """
    return 0.0 if now >= overtaken_until(job, reserve_after_s) else job.length_s


def overtaken_until(job: Job, reserve_after_s: float) -> float:
    """Return until when shorter jobs come before this one (seconds since the epoch), in such a queue."""
    return job.submitted_at + min(MOST_OVERTAKEN_S, max(reserve_after_s, job.length_s))


def shape_amount(shape: Shape, gpu_memory_mib: int) -> Amount:
    """Return the amount of the next request of a job of this shape."""
    gpu = cpu = memory = 0.0
    for request in shape.requests:
        amount = request.amount(gpu_memory_mib)
        gpu, cpu, memory = gpu + amount.gpu, cpu + amount.cpu, memory + amount.memory
    return Amount(gpu, cpu, memory)


def job_key(job: Job) -> OrderKey:
    """Return the sort key of a job: priority, then gangs below, at and above their minimum, then age.

    A gang that runs below its minimum comes before those that do not run: others of it hold GPUs in vain.
    """
    stage = (0 if job.active else 1) if below(job) else 2 if job.active == job.gang else 3
    return (-job.priority, stage, job.submitted_at, job.uid)


def queue_key(queue: Queue, amount: Amount) -> QueueKey:
    """Return the sort key of a queue: not above its fair share, entitlement, priority, dominant share, age.

    The entitlement puts jobs within the fair share before others. Without it, devices that were reclaimed for a queue
    within its share could be allocated again to the queue that lost them.
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
    """Return the largest ratio of an amount to what the queue keeps of that resource."""
    largest, keeps = 0.0, queue.keeps
    for r, amount in enumerate(amounts):
        if amount > 0:
            ratio = amount / keeps[r] if keeps[r] > 0 else UNLIMITED
            if ratio > largest:
                largest = ratio
    return largest
