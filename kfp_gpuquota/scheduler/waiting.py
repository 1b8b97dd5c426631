"""Why a job waits: the binding cause, and the smallest change that would let it start.

Causes are an ordered list, first match wins: what cannot be, what the quota forbids, what the devices forbid.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kfp_gpuquota.api import Reason, ReasonCode
from kfp_gpuquota.scheduler import placement, quota
from kfp_gpuquota.scheduler.explain import count, gpus, size_needed
from kfp_gpuquota.scheduler.model import GPU, Amount, Job, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.scheduler.ledger import Ledger

_UNITS = ("GPUs", "milli-CPUs", "bytes of memory")


class Cause(NamedTuple):
    """One cause: the sentence after what is needed, and the change that helps, as words and as numbers."""

    code: ReasonCode
    why: str
    helps: str = ""
    details: tuple[tuple[str, str | float], ...] = ()


def waits(ledger: Ledger, job: Job, tasks: Sequence[Task], sheltered_s: float | None = None) -> Reason:
    """Why this job, and every other of its shape, cannot start.

    With `sheltered_s` only minimum run times of others stand in the way, the first of them for that long.
    """
    queue = job.queue
    if not queue.known:
        message = f"project {queue.name} does not exist; create it with: gpuquota project create {queue.name}"
        return Reason(code=ReasonCode.OVER_LIMIT, message=message, project=queue.name)
    amount = quota.total(ledger, tasks)
    cause = _impossible(ledger, tasks) or _forbidden(job, amount)
    cause = cause or _no_room(ledger, job, tasks, sheltered_s)
    message = f"needs {size_needed(job)}; {cause.why}"
    if cause.helps:
        message += f", so it starts when {cause.helps}"
    details: dict[str, str | int | float] = {"needed_gpus": amount.gpu / GPU, **dict(cause.details)}
    return Reason(code=cause.code, message=message, project=queue.name, details=details)


def _impossible(ledger: Ledger, tasks: Sequence[Task]) -> Cause | None:
    """What no waiting helps against."""
    request = tasks[0].request
    sizes = ledger.by_size if request.nodes is None else _sizes_of(ledger, tasks[0])
    if request.nodes is not None and not sizes:
        return Cause(ReasonCode.NO_SUCH_NODE, f"node {', '.join(sorted(request.nodes))} does not exist or is not ready")
    largest, size = max((n for n, hosts in sizes.items() if hosts), default=0), request.devices
    if size > largest:
        return Cause(ReasonCode.TOO_LARGE, f"the largest node has {largest}")
    room = sum(n * (devices // size) for devices, n in sizes.items()) if size else len(tasks)
    if len(tasks) > room:
        return Cause(ReasonCode.TOO_LARGE, f"the cluster has room for {gpus(room * size * GPU)} in workers of {size}")
    return None


def _sizes_of(ledger: Ledger, task: Task) -> dict[int, int]:
    return Counter(len(h.devices) for h in ledger.hosts.values() if h.ready and placement.may_use(h, task))


def _forbidden(job: Job, amount: Amount) -> Cause | None:
    barred = quota.barred_by_guarantee(job, amount)
    if barred is not None:
        queue, _, r = barred
        short = queue.fixed[r] + amount[r] - queue.deserved[r]
        return Cause(
            ReasonCode.OVER_QUOTA_BUILD,
            f"project {queue.name} uses {_show(queue.fixed[r], r)} of its guaranteed {_show(queue.deserved[r], r)} "
            "for jobs that cannot be preempted, and such jobs do not borrow",
            f"those release {_show(short, r)} or the guaranteed quota grows by as much",
            (("queue", queue.name), ("short", _plain(short, r)), ("resource", _UNITS[r])),
        )
    barred = quota.barred_by_limit(job, amount, future=True)
    if barred is not None:
        queue, _, r = barred
        short = queue.held[r] + amount[r] - queue.limit[r]
        return Cause(
            ReasonCode.OVER_LIMIT,
            f"project {queue.name} holds {_number(queue.held[r], r)} of its limit of {_number(queue.limit[r], r)}",
            f"it releases {_show(short, r)} or its limit grows by as much",
            (("queue", queue.name), ("short", _plain(short, r)), ("resource", _UNITS[r])),
        )
    return None


def _no_room(ledger: Ledger, job: Job, tasks: Sequence[Task], sheltered_s: float | None) -> Cause:
    free = _free(ledger, tasks[0])
    size, idle = tasks[0].request.devices, sum(free.values())
    short = size * len(tasks) - idle
    block = max(free.values(), default=0)
    where = min((name for name, n in free.items() if n == block), default="")
    known = (("idle_gpus", idle), ("largest_block", block), ("node", where))
    if short <= 0 and block < size:
        why = f"{idle} {_are(idle)} idle, but the largest free block on one node is {block} on {where}"
        return Cause(ReasonCode.FRAGMENTED, why, f"{size - block} more {_are(size - block)} released there", known)
    helps = f"{max(short, 1)} more {_are(max(short, 1))} released"
    if sheltered_s is not None:
        why = "what may be taken for it has not yet run for its minimum time"
        helps += f" or that has passed, for the first of them in {sheltered_s:.0f} s"
        return Cause(ReasonCode.MIN_RUN_TIME, why, helps, (*known, ("min_run_time_left_s", round(sheltered_s, 3))))
    barred = quota.barred_by_share(job, quota.total(ledger, tasks))
    if barred is None:
        why = f"{idle} {_are(idle)} idle, and nothing that runs may be taken for it"
        return Cause(ReasonCode.NO_FREE_GPUS, why, helps, known)
    queue, _, r = barred
    held, share = _number(queue.claim(r), r), _number(queue.share[r], r)
    why = f"{idle} {_are(idle)} idle, and project {queue.name} holds {held} of its fair share of {share}"
    return Cause(ReasonCode.OVER_FAIR_SHARE, why, helps, known)


def _free(ledger: Ledger, task: Task) -> dict[str, int]:
    """Idle whole GPUs by node, where the task may go."""
    free = {name: n for n, names in ledger.by_idle.items() if n for name in names}
    return {name: n for name, n in free.items() if placement.may_use(ledger.hosts[name], task)}


def _are(n: float) -> str:
    return "is" if n == 1 else "are"


def _plain(value: float, r: int) -> float:
    return value / GPU if r == 0 else value


def _number(value: float, r: int) -> str:
    return count(value) if r == 0 else _show(value, r)


def _show(value: float, r: int) -> str:
    return gpus(value) if r == 0 else f"{value:g} {_UNITS[r]}"
