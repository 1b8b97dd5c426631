"""Finds why a job waits, and the smallest change that would let it start.

Causes are an ordered list, and the first match wins: requests that no node can meet, then quota, then free capacity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kfp_gpuquota.api import Reason, ReasonCode
from kfp_gpuquota.scheduler.explain import shortage
from kfp_gpuquota.scheduler.explain.sentences import count, cpus, gpus, memory, size_needed, starts
from kfp_gpuquota.scheduler.explain.shortage import Cause
from kfp_gpuquota.scheduler.fairness import quota
from kfp_gpuquota.scheduler.state.model import GPU, MILLI, Amount, Job, Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Queue

STARTS_WHEN: Final = "so it starts when"
GROWS_WHEN: Final = "so it grows when"

_SHOW = (gpus, cpus, memory)
_NAMES = ("GPUs", "CPUs", "bytes of memory")
_UNITS = (GPU, MILLI, 1)


class Promised(NamedTuple):
    """What was promised to jobs that do not hold it yet: amounts by queue, and its idle GPUs by node."""

    amounts: Mapping[Queue, Sequence[float]]
    idle: Mapping[str, int]

    def by(self, queue: Queue, r: int) -> float:
        """Return the amount of resource `r` that is promised to jobs of the queue."""
        return self.amounts[queue][r] if queue in self.amounts else 0.0


def waits(
    ledger: Ledger, job: Job, tasks: Sequence[Task], promised: Promised, sheltered_s: float | None = None
) -> Reason:
    """Return why this job, and every other job of its shape, cannot start, or does not grow if it runs.

    A promised amount is neither held nor idle, and named as what it is: all views of the cluster show it so.

    With `sheltered_s` only minimum run times of other jobs prevent it; the first of them ends in that many seconds.
    """
    queue = job.queue
    if not queue.exists:
        message = f"project {queue.name} does not exist; create it with: gpuquota project create {queue.name}"
        return Reason(code=ReasonCode.OVER_LIMIT, message=message, project=queue.name)
    amount = quota.total(ledger, tasks)
    cause = shortage.impossible(ledger, tasks) or _forbidden(job, amount, promised)
    cause = cause or _no_room(ledger, job, tasks, promised, sheltered_s)
    message = f"needs {size_needed(job)}; {cause.why}"
    if cause.helps:
        message += f", {STARTS_WHEN if starts(job) else GROWS_WHEN} {cause.helps}"
    details: dict[str, str | int | float] = {"needed_gpus": amount.gpu / GPU, **dict(cause.details)}
    return Reason(code=cause.code, message=message, project=queue.name, details=details)


def of_several(reason: Reason, jobs: int) -> Reason:
    """Return the reason of several jobs that lack the same: what one of them needs starts one of them."""
    if jobs == 1:
        return reason
    message = reason.message.replace(STARTS_WHEN, f"so the first of {jobs} such jobs starts when")
    return msgspec.structs.replace(reason, message=message)


def _forbidden(job: Job, amount: Amount, promised: Promised) -> Cause | None:
    barred = quota.barred_by_guarantee(job, amount)
    if barred is not None:
        queue, _, r = barred
        short = queue.fixed[r] + amount[r] - queue.deserved[r]
        uses = f"uses {_SHOW[r](queue.fixed[r])} of its guaranteed {_SHOW[r](queue.deserved[r])} for"
        helps = f"those release {_SHOW[r](short)} or the guaranteed quota grows by as much"
        if amount[r] > queue.deserved[r]:
            uses = f"has {_SHOW[r](queue.deserved[r]) if queue.deserved[r] else 'no guaranteed quota'} for"
            helps = f"the guaranteed quota grows to {_SHOW[r](queue.fixed[r] + amount[r])}"
        return Cause(
            ReasonCode.OVER_QUOTA_BUILD,
            f"project {queue.label} {uses} jobs that cannot be preempted, and such jobs do not borrow",
            helps,
            (("queue", queue.name), ("short", short / _UNITS[r]), ("resource", _NAMES[r])),
        )
    barred = quota.barred_by_limit(job, amount, future=True)
    if barred is not None:
        queue, _, r = quota.barred_by_size(job, amount) or barred
        if amount[r] > queue.limit[r]:
            return Cause(
                ReasonCode.OVER_LIMIT,
                f"project {queue.label} has a limit of {_number(queue.limit[r], r)}",
                f"its limit grows to {_number(amount[r], r)}",
                (("queue", queue.name), ("short", (amount[r] - queue.limit[r]) / _UNITS[r]), ("resource", _NAMES[r])),
            )
        short = queue.held[r] + amount[r] - queue.limit[r]
        return Cause(
            ReasonCode.OVER_LIMIT,
            f"project {queue.label} holds {_held(queue, queue.held[r], r, promised)} of its limit of "
            f"{_number(queue.limit[r], r)}",
            f"it releases {_SHOW[r](short)} or its limit grows by as much",
            (("queue", queue.name), ("short", short / _UNITS[r]), ("resource", _NAMES[r])),
        )
    return None


def _no_room(ledger: Ledger, job: Job, tasks: Sequence[Task], promised: Promised, sheltered_s: float | None) -> Cause:
    """Return what is missing on the nodes, and why it is not reclaimed from other jobs."""
    missing = shortage.missing(ledger, tasks, promised.idle)
    if missing.binding or job.active >= job.wanted:  # what is lent is idle, and not taken from anybody
        return missing
    if sheltered_s is not None:
        why = "what may be taken for it has not yet run for its minimum time"
        helps = f"{missing.helps} or that has passed, for the first of them in {sheltered_s:.0f} s"
        details = (*missing.details, ("min_run_time_left_s", round(sheltered_s, 3)))
        return Cause(ReasonCode.MIN_RUN_TIME, why, helps, details)
    barred = quota.barred_by_share(job, quota.total(ledger, tasks))
    if barred is None:
        return missing._replace(why=f"{missing.why}, and nothing that runs may be taken for it")
    queue, _, r = barred
    held, share = _held(queue, queue.claim(r), r, promised), _number(queue.share[r], r)
    lent = f" ({_number(queue.lent[r], r)} more are only lent to it)" if queue.lent[r] else ""
    why = f"{missing.why}, and project {queue.label} holds {held} of its fair share of {share}{lent}"
    return missing._replace(code=ReasonCode.OVER_FAIR_SHARE, why=why)


def _held(queue: Queue, claim: float, r: int, promised: Promised) -> str:
    """Return what a queue holds as text, with what is only promised to it."""
    coming = promised.by(queue, r)
    return _number(claim - coming, r) + (f" (and {_number(coming, r)} promised)" if coming else "")


def _number(value: float, r: int) -> str:
    """Return the value as text, GPUs without a unit because the sentence is about GPUs."""
    return count(value) if r == 0 else _SHOW[r](value)
