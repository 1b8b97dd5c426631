"""Checks quotas: limits at every level, the guarantee for cores (`Job.core`), and the fair share for reclaim."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from kfp_gpuquota.scheduler.state.model import Amount, Job, Queue

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Task


class Bar(StrEnum):
    """The rule of a queue that forbids a job."""

    LIMIT = "limit"
    GUARANTEED = "guaranteed"
    FAIR_SHARE = "fair share"


class Barred(NamedTuple):
    """The queue, the rule and the resource (an index of `Amount`) that forbid a job."""

    queue: Queue
    bar: Bar
    resource: int


def total(ledger: Ledger, tasks: Iterable[Task]) -> Amount:
    """Return the sum of what the tasks count against quotas."""
    gpu = cpu = memory = 0.0
    for task in tasks:
        amount = ledger.amount(task)
        gpu, cpu, memory = gpu + amount.gpu, cpu + amount.cpu, memory + amount.memory
    return Amount(gpu, cpu, memory)


def barred_by_limit(job: Job, amount: Amount, *, future: bool) -> Barred | None:
    """Return the limit that the job would exceed at some level now, or with `future` once leaving ones have exited.

    A project without a quota has nothing, also where it is a department, which has no limits then.
    """
    if not job.queue.exists:
        return Barred(job.queue, Bar.LIMIT, 0)
    for queue in job.queue.path:
        for r, value in enumerate(amount):
            coming = 0 if future else queue.leaving[r]
            if value and queue.held[r] + coming + value > queue.limit[r]:
                return Barred(queue, Bar.LIMIT, r)
    return None


def barred_by_guarantee(job: Job, amount: Amount) -> Barred | None:
    """Return the guaranteed quota that the core of a job that is not preemptible would exceed at some level."""
    if job.active >= job.core:
        return None
    for queue in job.queue.path:
        for r, value in enumerate(amount):
            if value and queue.fixed[r] + value > queue.deserved[r]:
                return Barred(queue, Bar.GUARANTEED, r)
    return None


def barred_by_size(job: Job, amount: Amount) -> Barred | None:
    """Return the limit, or of a core the guarantee, that the job exceeds alone, so that it never starts; else None."""
    for queue in job.queue.path:
        for r, value in enumerate(amount):
            if value and value > queue.limit[r]:
                return Barred(queue, Bar.LIMIT, r)
            if value and value > queue.deserved[r] and job.active < job.core:
                return Barred(queue, Bar.GUARANTEED, r)
    return None


def barred_by_share(job: Job, amount: Amount) -> Barred | None:
    """Return the fair share of its own queue that the job would exceed, so that it may not reclaim; else None.

    Departments are checked when the victims are selected, because the victims may belong to the same department.
    """
    queue = job.queue
    for r, value in enumerate(amount):
        if value and queue.claim(r) + value > queue.share[r]:
            return Barred(queue, Bar.FAIR_SHARE, r)
    return None


def exceeds(queue: Queue, amount: Amount, *, fairly: bool) -> bool:
    """Return whether the queue exceeds its limit (with `fairly`, its fair share) in a resource of `amount`."""
    for r, value in enumerate(amount):
        if value and (queue.held[r] > queue.limit[r] or (fairly and queue.claim(r) > queue.share[r])):
            return True
    return False


def rivals(one: Queue, other: Queue) -> tuple[Queue, Queue] | None:
    """Return the ancestors of two queues that compete, siblings or roots; None for the same queue."""
    for a, b in zip(reversed(one.path), reversed(other.path), strict=False):
        if a is not b:
            return a, b
    return None


def within_guarantee(queue: Queue, amount: Amount) -> bool:
    """Return whether the queue stays within its guaranteed quota with `amount` more."""
    deserved, granted, held, lent = queue.deserved, queue.granted, queue.held, queue.lent
    claims = [(r, held[r] - lent[r] + value) for r, value in enumerate(amount) if value]
    return all(claim <= deserved[r] and claim <= granted[r] for r, claim in claims)
