"""What a queue may start: limits at every level, the guarantee for what cannot be preempted, fair share to reclaim."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from kfp_gpuquota.scheduler.state.model import Amount, Job, Queue

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Task


class Bar(StrEnum):
    """Which rule of a queue forbids a job."""

    LIMIT = "limit"
    GUARANTEED = "guaranteed"
    FAIR_SHARE = "fair share"


class Barred(NamedTuple):
    """The queue, the rule and the resource (an index of `Amount`) that forbid a job."""

    queue: Queue
    bar: Bar
    resource: int


def total(ledger: Ledger, tasks: Iterable[Task]) -> Amount:
    """What the tasks count against quotas together."""
    gpu = cpu = memory = 0.0
    for task in tasks:
        amount = ledger.amount(task)
        gpu, cpu, memory = gpu + amount.gpu, cpu + amount.cpu, memory + amount.memory
    return Amount(gpu, cpu, memory)


def barred_by_limit(job: Job, amount: Amount, *, future: bool) -> Barred | None:
    """The limit that the job would exceed at some level, now or (with `future`) when what leaves is gone."""
    for queue in job.queue.path:
        for r, value in enumerate(amount):
            coming = 0 if future else queue.leaving[r]
            if value and queue.held[r] + coming + value > queue.limit[r]:
                return Barred(queue, Bar.LIMIT, r)
    return None


def barred_by_guarantee(job: Job, amount: Amount) -> Barred | None:
    """The guaranteed quota that a non-preemptible job would exceed at some level; none for others."""
    if job.preemptible:
        return None
    for queue in job.queue.path:
        for r, value in enumerate(amount):
            if value and queue.fixed[r] + value > queue.deserved[r]:
                return Barred(queue, Bar.GUARANTEED, r)
    return None


def barred_by_share(job: Job, amount: Amount) -> Barred | None:
    """The job would bring its own queue above its fair share: it may not reclaim then.

    Departments above are looked at when the victims are known, since those may belong to the same department.
    """
    queue = job.queue
    for r, value in enumerate(amount):
        if value and queue.claim(r) + value > queue.share[r]:
            return Barred(queue, Bar.FAIR_SHARE, r)
    return None


def exceeds(queue: Queue, amount: Amount, *, fairly: bool) -> bool:
    """The queue is above its limit (or, with `fairly`, its fair share) in a resource of `amount`."""
    for r, value in enumerate(amount):
        if value and (queue.held[r] > queue.limit[r] or (fairly and queue.claim(r) > queue.share[r])):
            return True
    return False


def rivals(one: Queue, other: Queue) -> tuple[Queue, Queue] | None:
    """The ancestors of two queues that compete: siblings, or roots. None where one queue is the other."""
    for a, b in zip(reversed(one.path), reversed(other.path), strict=False):
        if a is not b:
            return a, b
    return None


def within_guarantee(queue: Queue, amount: Amount) -> bool:
    """The queue stays within what it is guaranteed when it gets `amount` more."""
    return all(queue.claim(r) + value <= queue.deserved[r] for r, value in enumerate(amount) if value)


def may_lose(victim: Queue, taken: Amount, amount: Amount, *, guaranteed: bool) -> bool:
    """The sibling queue still holds more than it keeps when `taken` is gone, so that it can lose one more.

    A reclaimer within its guaranteed quota may take all that is above the victim's guaranteed quota, one above it
    only what is above the victim's fair share.
    """
    for r, value in enumerate(amount):
        left = victim.claim(r) - taken[r]
        if value and left > (victim.deserved[r] if guaranteed else victim.keeps[r]):
            return True
    return False
