"""The reason for each decision as one sentence for users, with names instead of uids."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api import Reason, ReasonCode, StopPolicy
from kfp_gpuquota.api.durations import text_of
from kfp_gpuquota.api.quantity import MIB, SHOWN_PLACES, show_mib
from kfp_gpuquota.api.resources import GPU_PART_PREFIX, PORT_PREFIX, WHOLE_GPU
from kfp_gpuquota.scheduler.state.groups import below
from kfp_gpuquota.scheduler.state.model import GPU, MILLI, UNLIMITED, Job, Request, Task

if TYPE_CHECKING:
    from collections.abc import Sequence


def gpus(micro: float) -> str:
    """Return a number of GPUs as text, such as '1 GPU' or '0.5 GPUs'; `micro` is in millionths of a GPU."""
    number = count(micro)
    return f"{number} GPU" if number == "1" else f"{number} GPUs"


def count(micro: float) -> str:
    """Return a number of GPUs as text without a unit, to four places; `micro` is in millionths of a GPU.

    So seven sevenths, which are 142857 millionths each, are 1.
    """
    return f"{round(micro / GPU, SHOWN_PLACES):g}"


def started(job: Job, workers: int) -> Reason:
    """Return why a pending job starts now."""
    held = asked(job, workers)
    requested = ""
    if workers < job.wanted:
        requested = f" of the {count(_gpus(job, job.wanted))} requested"
    elif workers > job.wanted:
        requested = f", {count(_gpus(job, workers - job.wanted))} more than requested: nobody else needs them"
    return Reason(code=ReasonCode.FITS, message=f"starts with {held}{requested}", project=job.queue.name)


def expanded(job: Job, before: int, after: int) -> Reason:
    """Return why a running job expands."""
    more = gpus(_gpus(job, after - before))
    verb = "is" if more == "1 GPU" else "are"
    return Reason(
        code=ReasonCode.IDLE_GPUS,
        message=f"expanded from {_sizes(job, before, after)}: {more} {verb} idle",
        project=job.queue.name,
    )


def shrunk(job: Job, before: int, after: int, cause: tuple[Job, str]) -> Reason:
    """Return why a running job shrinks."""
    return _taken(job, f"shrunk from {_sizes(job, before, after)}", cause)


def stopped(job: Job, cause: tuple[Job, str]) -> Reason:
    """Return why a running job stops and returns to the queue."""
    then = "back in the queue with its age" if job.movable else "lost, since its owner does not create it again"
    return _taken(job, f"stopped, and {then}", cause)


def moved(task: Task, to: str, cause: tuple[Job, str], lost_s: float, window: str = "") -> Reason:
    """Return why a worker is moved to another node, and how much work its job may lose.

    A worker that is reclaimed or preempted is moved instead of stopped. `window` is that of defragmentation.
    """
    node = task.node.name if task.node is not None else "its node"
    if cause[1] == "consolidate":
        why = f"{cause[0].name} needs {size_needed(cause[0])}"
    elif cause[1] == "defragment":
        why = f"to gather free GPUs, window {window}"
    else:
        why = _cause(task.job, cause)
    lost = f"; it repeats at most {round(lost_s)} s of work" if lost_s >= 1 else ""
    return Reason(
        code=ReasonCode.CONSOLIDATED,
        message=f"moved from {node} to {to}: {why}{lost}",
        beneficiary="" if cause[1] == "defragment" else cause[0].uid,
        project=cause[0].queue.name,
    )


def starts(job: Job) -> bool:
    """Return whether what the job gets next starts it, and does not expand it."""
    return below(job) or not job.tasks


def nominated(job: Job, workers: Sequence[Task]) -> Reason:
    """Return why a nominated job does not start yet."""
    names = sorted({t.job.name for t in workers})
    of_jobs = f" of {', '.join(names)}" if names else ""
    noun = "worker" if len(workers) == 1 else "workers"
    verb = "is" if len(workers) == 1 else "are"
    return Reason(
        code=ReasonCode.WAITS_FOR_RELEASE,
        message=f"{'starts' if starts(job) else 'grows'} when {len(workers)} {noun}{of_jobs} {verb} gone",
        project=job.queue.name,
    )


def cooling_down(job: Job, left_s: float) -> Reason:
    """Return why a job does not grow that has grown recently."""
    message = f"it has grown recently, and does not grow again for {text_of(ceil(left_s))} (cool-down)"
    return Reason(code=ReasonCode.MIN_RUN_TIME, message=message, project=job.queue.name)


def kept_for_others(job: Job, names: Sequence[str]) -> Reason:
    """Return why a job does not grow although GPUs are idle that it could use: they are kept for waiting jobs."""
    message = f"the idle GPUs that it could use are kept for {', '.join(names)}, which waits for more of them"
    return Reason(code=ReasonCode.NO_FREE_GPUS, message=message, project=job.queue.name)


def trains_no_faster(job: Job) -> Reason:
    """Return why a job is lent nothing although GPUs are idle."""
    message = f"GPUs are idle, but by what it has measured it trains no faster with more than {_gpus_of(job)}"
    return Reason(code=ReasonCode.IDLE_GPUS, message=message, project=job.queue.name)


def _gpus_of(job: Job) -> str:
    return gpus(_gpus(job, job.active))


def behind(reason: Reason, before: Job) -> Reason:
    """Return the reason of a waiting job that may not use the part of the guarantee that another one needs."""
    message = f"{reason.message}; and not before {before.name}, for which the guaranteed quota is kept"
    return msgspec.structs.replace(reason, message=message, details={**reason.details, "behind": before.name})


def behind_first(reason: Reason, job: Job, first: Job) -> Reason:
    """Return the reason of a job that does not pass the first waiting one, in a project with strict order.

    Where as many GPUs are idle as it needs, the other job alone is what it waits for.
    """
    why = f"which is first in project {first.queue.label}, whose order is strict"
    message = f"{reason.message}; and not before {first.name}, {why}"
    if float(reason.details.get("idle_gpus", -1)) >= float(reason.details.get("needed_gpus", 0)):
        act = "starts" if starts(job) else "grows"
        message = f"needs {size_needed(job)}; as many are idle, but it {act} after {first.name}, {why}"
    return msgspec.structs.replace(reason, message=message, details={**reason.details, "behind": first.name})


def longer(reason: Reason, job: Job, first: Job) -> Reason:
    """Return the reason with the job that comes first because it is expected to be shorter, or has waited for long."""
    why = "is expected to end sooner" if first.length_s < job.length_s else "has waited for long behind shorter ones"
    return msgspec.structs.replace(reason, message=f"{reason.message}; {first.name}, which {why}, comes first")


def among_users(reason: Reason, job: Job, uses: float, first: Job | None) -> Reason:
    """Return the reason with what counts as used by the job's user (`user_gpus`), in a project that is fair to users.

    `first` is the job of a user with less, which comes before this one for that; None if there is none.
    """
    details = {**reason.details, "user": job.user.name, "user_gpus": uses}
    if first is None:
        return msgspec.structs.replace(reason, details=details)
    holds = f"uses {count(job.user.held)} of the {gpus(job.queue.claim(0))} of {job.queue.label}"
    past = uses - job.user.held / GPU
    recently = f" and has used {past:.2g} in the mean before" if past >= 0.01 else ""
    who = f"user {job.user.name}" if job.user.name else "a user without a name"
    others = f"{first.user.name}'s job {first.name}" if first.user.name else f"job {first.name}"
    message = f"{reason.message}; {who} {holds}{recently}, so {others} comes first"
    return msgspec.structs.replace(reason, message=message, details=details)


def reserved(reason: Reason, nodes: Sequence[str], starts_by: float) -> Reason:
    """Return the reason of a waiting job with the nodes whose idle devices are kept for it, and until when at most.

    `starts_by` is in seconds since the epoch, `inf` if unknown.
    """
    named = ", ".join(sorted(nodes))
    message = f"{reason.message}; what is idle on {named} is kept for it, because it has waited long"
    details = {**reason.details, "reserved_nodes": named}
    if starts_by < UNLIMITED:
        details["starts_by"] = starts_by
    return msgspec.structs.replace(reason, message=message, details=details)


def suspended(job: Job) -> Reason:
    """Return why a suspended job waits."""
    if job.suspended_for is not None:
        return job.suspended_for
    return Reason(code=ReasonCode.SUSPENDED, message="suspended by a user", project=job.queue.name)


def halted(job: Job) -> Reason:
    """Return why a job does not start in a project that is held."""
    by, halt = job.queue.halted_by, job.queue.halt
    done = "drained" if halt is StopPolicy.HOLD_AND_DRAIN else "held"
    message = f"project {by.name} is {done} by an administrator, so that none of its jobs starts (stop policy {halt})"
    return Reason(code=ReasonCode.PROJECT_HELD, message=message, project=by.name, details={"stop_policy": str(halt)})


def emptying(job: Job) -> Reason:
    """Return why a job waits whose own workers are still exiting."""
    left = len(job.tasks)
    noun = "worker has" if left == 1 else "workers have"
    return Reason(
        code=ReasonCode.WAITS_FOR_RELEASE,
        message=f"back in the queue when {left} of its own {noun} left",
        project=job.queue.name,
    )


def _taken(victim: Job, what: str, cause: tuple[Job, str]) -> Reason:
    beneficiary, why = cause[0], _cause(victim, cause)
    project = beneficiary.queue.name
    return Reason(
        code=_CAUSES[cause[1]][0],
        message=f"{what}: {why}",
        beneficiary=beneficiary.uid,
        project=project,
        details={"why": why},
    )


def _cause(victim: Job, cause: tuple[Job, str]) -> str:
    beneficiary, action = cause
    why = _CAUSES[action][1]
    if action in ("allocate", "reclaim") and victim.queue is not beneficiary.queue and _guaranteed(beneficiary):
        why = "project {project} takes back its guaranteed {gpus} for {job}"
    words = {"project": beneficiary.queue.label, "job": beneficiary.name, "gpus": _own(size_needed(beneficiary))}
    words["halted_by"] = beneficiary.queue.halted_by.name
    return why.format(**words)


def _guaranteed(job: Job) -> bool:
    """Return whether the job's project stays within its guaranteed quota with this job."""
    return all(job.queue.claim(r) <= job.queue.deserved[r] for r in range(3))


def _own(size: str) -> str:
    """Return the size without '1 ': 'its guaranteed GPU', but 'its guaranteed 2 GPUs'."""
    return size.removeprefix("1 ")


_CAUSES = {
    "allocate": (ReasonCode.LENT_GPUS_RETURNED, "it was only lent, and {job} of project {project} needs it"),
    "grow": (ReasonCode.LENT_GPUS_RETURNED, "it was only lent, and {job} gains more by it"),
    "release": (ReasonCode.LENT_GPUS_RETURNED, "it was only lent, and {job} trains no slower without it"),
    "reclaim": (ReasonCode.RECLAIMED, "project {project} takes back its share for {job}"),
    "preempt": (ReasonCode.PREEMPTED, "{job} has a higher priority in project {project}"),
    "evict_stale": (ReasonCode.STALE_GANG, "it ran below its minimum for too long, and a gang runs whole"),
    "limit": (ReasonCode.OVER_LIMIT, "the limit of project {project} was lowered below what it holds"),
    "drain": (ReasonCode.PROJECT_DRAINED, "project {halted_by} is drained (stop policy HoldAndDrain)"),
    "consolidate": (ReasonCode.CONSOLIDATED, "it makes room for {job} and gets a place elsewhere"),
}


def _sizes(job: Job, before: int, after: int) -> str:
    return f"{count(_gpus(job, before))} to {count(_gpus(job, after))} GPUs"


def size_needed(job: Job) -> str:
    """Return what a job needs next as text: its gang if it does not run, else one more worker or segment."""
    workers = max(1, job.gang if not job.tasks else job.segment)
    if job.segments is None:
        return asked(job, workers)
    parts = segments(workers // job.segment, job)
    return f"{asked(job, workers)} in {parts}, each within one {job.segments.levels[-1]}"


def segments(number: int, job: Job) -> str:
    """Return a number of the job's segments as text: '2 segments of 4 workers'."""
    workers = f"{job.segment} worker{'s' if job.segment != 1 else ''}"
    return f"{number} segment{'s' if number != 1 else ''} of {workers}"


def asked(job: Job, workers: int) -> str:
    """Return the request of `workers` workers as text: '2 GPUs', '40Gi of each of 8 GPUs', and CPU and memory."""
    if job.groups is not None and job.groups.children:
        tasks = (*job.tasks.values(), *job.pending)
        return f"{gpus(sum(_worker_gpus(t.request) for t in tasks))} for {len(tasks)} workers"
    request = job.request
    parts = [_devices(request, workers)] if request.devices else []
    parts += [_weighed(request, workers)] if request.gpu_weights else []
    parts += [cpus(workers * request.cpu)] if request.cpu else []
    parts += [memory(workers * request.memory)] if request.memory else []
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + (parts[-1] if parts else "a place")


def _devices(request: Request, workers: int) -> str:
    if request.whole:
        return gpus(workers * request.devices * GPU)
    part = show_mib(request.memory_mib) if request.memory_mib else count(request.share)
    each = f"{part} of a GPU" if request.devices == 1 else f"{part} of each of {request.devices} GPUs"
    return each if workers == 1 else f"{workers} times {each}"


def _weighed(request: Request, workers: int) -> str:
    """Return the resources that count as GPUs as text: '0.5 GPUs (2 of nvidia.com/gpu.shared)'."""
    names = {name for name, _ in request.gpu_weights}
    amounts = (shown_resource(name, workers * amount) for name, amount in request.resources if name in names)
    return f"{gpus(workers * request.other_gpus)} ({', '.join(amounts)})"


def shown_resource(name: str, amount: float) -> str:
    """Return an amount of another resource as text: '2 of rdma/hca', 'host port 80 (TCP)', '0.5 of a GPU of DRIVER'."""
    if name.startswith(GPU_PART_PREFIX):
        driver, _, counter = name.removeprefix(GPU_PART_PREFIX).partition("/")
        of = f"the {counter} of a GPU of {driver}" if counter else f"a GPU of {driver}"
        return f"{amount / WHOLE_GPU:g} of {of}"
    if not name.startswith(PORT_PREFIX):
        return f"{amount:g} of {name}"
    protocol, port, *_ = name.removeprefix(PORT_PREFIX).split("/")
    return f"host port {port} ({protocol})"


def cpus(milli: float) -> str:
    """Return thousandths of CPUs as text, such as '1 CPU' or '0.5 CPUs'."""
    number = f"{milli / MILLI:g}"
    return f"{number} CPU" if number == "1" else f"{number} CPUs"


def memory(size: float) -> str:
    """Return a size in bytes as text, such as '4Gi of memory'."""
    return f"{show_mib(ceil(size / MIB))} of memory"


def _gpus(job: Job, workers: int) -> float:
    return workers * _worker_gpus(job.request)


def _worker_gpus(request: Request) -> int:
    return request.devices * request.share + request.other_gpus
