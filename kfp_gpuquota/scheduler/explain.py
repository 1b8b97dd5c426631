"""Why: one plain sentence for everything that is decided, with names and not uids."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kfp_gpuquota.api import Reason, ReasonCode
from kfp_gpuquota.scheduler import placement, quota
from kfp_gpuquota.scheduler.model import GPU, Job, Queue, Task
from kfp_gpuquota.scheduler.quota import Bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.scheduler.ledger import Ledger


def gpus(micro: float) -> str:
    """'1 GPU', '2 GPUs', '0.5 GPUs'."""
    number = count(micro)
    return f"{number} GPU" if number == "1" else f"{number} GPUs"


def count(micro: float) -> str:
    """A number of GPUs without its unit."""
    return f"{micro / GPU:g}"


def started(job: Job, workers: int) -> Reason:
    """Why a waiting job starts now."""
    held = gpus(workers * job.request.devices * GPU)
    short = "" if workers >= job.wanted else f" of the {count(_gpus(job, job.wanted))} requested"
    return Reason(code=ReasonCode.FITS, message=f"starts with {held}{short}", project=job.queue.name)


def expanded(job: Job, before: int, after: int) -> Reason:
    """Why a running job grows."""
    more = gpus(_gpus(job, after - before))
    verb = "is" if more == "1 GPU" else "are"
    return Reason(
        code=ReasonCode.IDLE_GPUS,
        message=f"expanded from {_sizes(job, before, after)}: {more} {verb} idle",
        project=job.queue.name,
    )


def shrunk(job: Job, before: int, after: int, cause: tuple[Job, str]) -> Reason:
    """Why a running job gives workers back."""
    return _taken(job, f"shrunk from {_sizes(job, before, after)}", cause)


def stopped(job: Job, cause: tuple[Job, str]) -> Reason:
    """Why a running job stops and returns to the queue."""
    return _taken(job, "stopped, and back in the queue with its age", cause)


def moved(task: Task, to: str, cause: tuple[Job, str]) -> Reason:
    """Why a worker goes elsewhere."""
    node = task.node.name if task.node is not None else "its node"
    return Reason(
        code=ReasonCode.CONSOLIDATED,
        message=f"moved from {node} to {to}: {cause[0].name} needs {_size_needed(cause[0])}",
        beneficiary=cause[0].uid,
        project=cause[0].queue.name,
    )


def nominated(job: Job, workers: Sequence[Task]) -> Reason:
    """Why a job that has its place does not start yet."""
    names = sorted({t.job.name for t in workers})
    who = f" of {', '.join(names)}" if names else ""
    noun = "worker" if len(workers) == 1 else "workers"
    verb = "is" if len(workers) == 1 else "are"
    act = "starts" if job.active < job.gang or not job.tasks else "grows"
    return Reason(
        code=ReasonCode.WAITS_FOR_RELEASE,
        message=f"{act} when {len(workers)} {noun}{who} {verb} gone",
        project=job.queue.name,
    )


def suspended(job: Job) -> Reason:
    """Why a suspended job waits."""
    return Reason(code=ReasonCode.SUSPENDED, message="suspended by its user", project=job.queue.name)


def emptying(job: Job) -> Reason:
    """Why a job whose own workers still leave waits."""
    left = len(job.tasks)
    noun = "worker has" if left == 1 else "workers have"
    return Reason(
        code=ReasonCode.WAITS_FOR_RELEASE,
        message=f"back in the queue when {left} of its own {noun} left",
        project=job.queue.name,
    )


def waits(ledger: Ledger, job: Job, tasks: Sequence[Task]) -> Reason:
    """The binding cause why a waiting job cannot start, the same for all jobs of its shape."""
    queue = job.queue
    if not queue.known:
        message = f"project {queue.name} does not exist; create it with: gpuquota project create {queue.name}"
        return Reason(code=ReasonCode.OVER_LIMIT, message=message, project=queue.name)
    amount = quota.total(ledger, tasks)
    needs = f"needs {_size_needed(job)}"
    code, why = _impossible(ledger, tasks) or _forbidden(job, tasks, ledger) or _no_room(ledger, job, tasks)
    details: dict[str, str | int | float] = {"needed_gpus": amount.gpu / GPU}
    return Reason(code=code, message=f"{needs}; {why}", project=queue.name, details=details)


def _impossible(ledger: Ledger, tasks: Sequence[Task]) -> tuple[ReasonCode, str] | None:
    """What no waiting helps against."""
    nodes = tasks[0].request.nodes
    sizes = ledger.by_size if nodes is None else _sizes_of(ledger, tasks[0])
    if nodes is not None and not sizes:
        return ReasonCode.NO_SUCH_NODE, f"node {', '.join(sorted(nodes))} does not exist or is not ready"
    largest = max((size for size, n in sizes.items() if n), default=0)
    if tasks[0].request.devices > largest:
        return ReasonCode.TOO_LARGE, f"the largest node has {largest}"
    size = tasks[0].request.devices
    room = sum(n * (devices // size) for devices, n in sizes.items()) if size else len(tasks)
    if len(tasks) > room:
        return ReasonCode.TOO_LARGE, f"the cluster has room for {gpus(room * size * GPU)} in workers of {size}"
    return None


def _sizes_of(ledger: Ledger, task: Task) -> dict[int, int]:
    return Counter(len(h.devices) for h in ledger.hosts.values() if h.ready and placement.may_use(h, task))


def _forbidden(job: Job, tasks: Sequence[Task], ledger: Ledger) -> tuple[ReasonCode, str] | None:
    amount = quota.total(ledger, tasks)
    barred = quota.barred_by_guarantee(job, amount)
    if barred is not None:
        return ReasonCode.OVER_QUOTA_BUILD, _over_guarantee(barred.queue, barred.resource)
    barred = quota.barred_by_limit(job, amount, future=True)
    if barred is not None:
        return ReasonCode.OVER_LIMIT, _over_limit(barred.queue, barred.resource)
    return None


def _over_guarantee(queue: Queue, r: int) -> str:
    used, deserved = _show(queue.fixed[r], r), _show(queue.deserved[r], r)
    return (
        f"project {queue.name} uses {used} of its guaranteed {deserved} for jobs that cannot be preempted, "
        "and such jobs do not borrow"
    )


def _over_limit(queue: Queue, r: int) -> str:
    return f"project {queue.name} holds {_show(queue.held[r], r)} of its limit of {_show(queue.limit[r], r)}"


def _no_room(ledger: Ledger, job: Job, tasks: Sequence[Task]) -> tuple[ReasonCode, str]:
    size, idle = tasks[0].request.devices, sum(n * len(names) for n, names in ledger.by_idle.items())
    need = size * len(tasks)
    if idle >= need and size > 1:
        block = max((n for n, names in ledger.by_idle.items() if names), default=0)
        where = ledger.by_idle[block][0] if block else ""
        at = f" on {where}" if where else ""
        return ReasonCode.FRAGMENTED, f"{idle} are idle, but the largest free block on one node is {block}{at}"
    barred = quota.barred_by_share(job, quota.total(ledger, tasks))
    verb = "is" if idle == 1 else "are"
    if barred is not None and barred.bar is Bar.FAIR_SHARE:
        queue = barred.queue
        held, share = count(queue.claim(barred.resource)), count(queue.share[barred.resource])
        return (
            ReasonCode.OVER_FAIR_SHARE,
            f"{idle} {verb} idle, and project {queue.name} holds {held} of its fair share of {share}",
        )
    return ReasonCode.NO_FREE_GPUS, f"{idle} {verb} idle, and nothing that runs may be taken for it"


def _taken(victim: Job, what: str, cause: tuple[Job, str]) -> Reason:
    beneficiary, action = cause
    code, why = _CAUSES[action]
    if action in ("allocate", "reclaim") and victim.queue is not beneficiary.queue and _guaranteed(beneficiary):
        why = "project {project} takes back its guaranteed {gpus} for {job}"
    words = {"project": beneficiary.queue.name, "job": beneficiary.name, "gpus": _own(_size_needed(beneficiary))}
    message = f"{what}: {why.format(**words)}"
    return Reason(code=code, message=message, beneficiary=beneficiary.uid, project=beneficiary.queue.name)


def _guaranteed(job: Job) -> bool:
    """With this job its project is still within what it is guaranteed."""
    return all(job.queue.claim(r) <= job.queue.deserved[r] for r in range(3))


def _own(size: str) -> str:
    """'its guaranteed GPU', but 'its guaranteed 2 GPUs'."""
    return size.removeprefix("1 ")


_CAUSES = {
    "allocate": (ReasonCode.LENT_GPUS_RETURNED, "it was only lent, and {job} of project {project} needs it"),
    "reclaim": (ReasonCode.RECLAIMED, "project {project} takes back its share for {job}"),
    "preempt": (ReasonCode.PREEMPTED, "{job} has a higher priority in project {project}"),
    "evict_stale": (ReasonCode.STALE_GANG, "it ran below its minimum for too long, and a gang runs whole"),
    "consolidate": (ReasonCode.CONSOLIDATED, "it makes room for {job} and gets a place elsewhere"),
}


def _sizes(job: Job, before: int, after: int) -> str:
    return f"{count(_gpus(job, before))} to {count(_gpus(job, after))} GPUs"


def _size_needed(job: Job) -> str:
    return gpus(_gpus(job, max(1, job.gang if not job.tasks else 1)))


def _gpus(job: Job, workers: int) -> float:
    request = job.request
    return workers * request.devices * request.share


def _show(value: float, r: int) -> str:
    return gpus(value) if r == 0 else f"{value:g} {('', 'milli-CPUs', 'bytes of memory')[r]}"
