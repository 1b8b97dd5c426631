"""Finds what the nodes lack for a task, in total or at present: devices first, then CPU, memory and the pod limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kfp_gpuquota.api import ReasonCode
from kfp_gpuquota.api.affinity import GPU_PRODUCT
from kfp_gpuquota.api.quantity import show_mib
from kfp_gpuquota.api.resources import GPU_PART_PREFIX, WHOLE_GPU, capacity_of
from kfp_gpuquota.scheduler.explain.sentences import count, cpus, gpus, memory, segments, shown_resource
from kfp_gpuquota.scheduler.placement import domains, placement
from kfp_gpuquota.scheduler.placement.empty_nodes import fit_when_empty
from kfp_gpuquota.scheduler.state.model import GPU, UNLIMITED, Host, Request

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kfp_gpuquota.scheduler.state.ledger import Ledger
    from kfp_gpuquota.scheduler.state.model import Task

Details = tuple[tuple[str, str | float], ...]


class Cause(NamedTuple):
    """One cause: the clause that follows the request in the message, and the change that helps, as text and numbers.

    `binding`: the message needs no further clause, such as why the capacity is not reclaimed from others.
    """

    code: ReasonCode
    why: str
    helps: str = ""
    details: Details = ()
    binding: bool = True


def are(n: float) -> str:
    """Return the verb for a number: 'is' for 1, else 'are'."""
    return "is" if n == 1 else "are"


def impossible(ledger: Ledger, tasks: Sequence[Task]) -> Cause | None:
    """Return why the tasks can never start on these nodes, or None."""
    if fit_when_empty(ledger, tasks):
        return None
    of_one_kind = ([task for task in tasks if task.request == one] for one in dict.fromkeys(t.request for t in tasks))
    causes = (_impossible(ledger, alike) for alike in of_one_kind)
    return next((cause for cause in causes if cause is not None), _TORN)


_TORN: Final = Cause(
    ReasonCode.FRAGMENTED,
    "its workers do not fit together on the nodes that they may use, even if nothing else runs there",
)
"""Each kind of them fits by itself. Plans consider the job further: in another order they might fit."""


def _impossible(ledger: Ledger, tasks: Sequence[Task]) -> Cause | None:
    """Return why tasks of one kind can never start, by counts of what fits on each node; None where these suffice."""
    task = tasks[0]
    if (cause := _no_domain(ledger, tasks) or _no_segments(ledger, tasks)) is not None:
        return cause
    if task.request.plain and not ledger.special and not task.job.queue.pool:
        return _too_large_for(ledger.by_size, task.request.devices, len(tasks))
    hosts = placement.usable(ledger, task)
    if not hosts:
        return _nowhere(task.request, task.job.queue.pool)
    capacity = [placement.workers_on_empty(host, task.request) for host in hosts]
    if not any(capacity):
        return _too_large(hosts, task.request)
    if sum(capacity) < len(tasks):
        return Cause(ReasonCode.TOO_LARGE, f"the nodes that it may use have room for {sum(capacity):g} such workers")
    return None


def _no_domain(ledger: Ledger, tasks: Sequence[Task]) -> Cause | None:
    found = domains.required(ledger, tasks[0])
    if found is None:
        return None
    if not found.areas:
        lack = f"a {found.text}" if found.types else f"the label {found.label}, within which it has to be"
        return Cause(ReasonCode.NODE_AFFINITY, f"no node that is ready has {lack}")
    allowed = [[host for host in area if placement.may_use(host, tasks[0], anywhere=True)] for area in found.areas]
    most = max(sum(placement.workers_on_empty(host, tasks[0].request) for host in area) for area in allowed)
    if most < len(tasks):
        why = f"no {found.text} has room for more than {most:g} of its {len(tasks)} workers"
        return Cause(ReasonCode.TOO_LARGE, why)
    return None


def _no_segments(ledger: Ledger, tasks: Sequence[Task]) -> Cause | None:
    """Return why the segments do not fit on empty nodes, or None."""
    task, needed = tasks[0], _segments_of(tasks)
    if task.job.segments is None:
        return None
    level = task.job.segments.levels[-1]
    if not any(level in host.labels for host in placement.usable(ledger, task)):
        return Cause(ReasonCode.NODE_AFFINITY, f"no node that it may use has the label {level} of its segments")
    most = domains.most_segments(ledger, task, lambda host: placement.workers_on_empty(host, task.request))
    if most >= needed:
        return None
    return Cause(ReasonCode.TOO_LARGE, f"the nodes have room for {segments(most, task.job)}, each within one {level}")


def _missing_segments(ledger: Ledger, tasks: Sequence[Task]) -> Cause | None:
    """Return what the segments lack now, or None."""
    task, needed = tasks[0], _segments_of(tasks)
    if task.job.segments is None or (most := domains.most_segments(ledger, task)) >= needed:
        return None
    level, short = task.job.segments.levels[-1], needed - most
    free = gpus(task.job.segment * task.request.devices * GPU)
    why = f"{level} has room for {segments(most, task.job)} now" if most else f"no {level} has {free} idle for one"
    where = "one of them has" if short == 1 else f"{short} of them, or one several times, have"
    details: Details = (("topology", level), ("segments", needed), ("free_segments", most))
    return Cause(ReasonCode.FRAGMENTED, why, f"{where} {free} idle for another one", details, binding=False)


def _segments_of(tasks: Sequence[Task]) -> int:
    return -(-len(tasks) // tasks[0].job.segment)


def missing(ledger: Ledger, tasks: Sequence[Task], promised: Mapping[str, int]) -> Cause:
    """Return what is not free now; not `binding` if other jobs hold it.

    `promised` is the number of GPUs by node that are idle, for other jobs.
    """
    request = tasks[0].request
    most = domains.most_room(ledger, tasks)
    if most is not None and most[1] < len(tasks):
        why = f"no {most[0]} has room for more than {most[1]:g} of {len(tasks)} workers"
        details: Details = (("topology", most[0]), ("largest_block", most[1]))
        return Cause(ReasonCode.FRAGMENTED, why, "enough is released in one of them", details, binding=False)
    if (cause := _missing_segments(ledger, tasks)) is not None:
        return cause
    if request.plain and not ledger.special:
        return _missing_devices(_idle_whole(ledger), request.devices, len(tasks), sum(promised.values()))
    hosts = placement.usable(ledger, tasks[0])
    if request.whole and request.devices:
        free = {host.name: host.idle_whole for host in hosts}
        fitting = [host for host in hosts if host.idle_whole >= request.devices]
        if not fitting or sum(n // max(1, request.devices) for n in free.values()) < len(tasks):
            for_others = sum(promised.get(name, 0) for name in free)
            return _missing_devices(free, request.devices, len(tasks), for_others, _types_of(request))
    else:
        fitting = [host for host in hosts if len(_fitting(host, request)) >= request.devices]
        if not fitting:
            return _missing_share(hosts, request)
    return _missing_other(fitting, request)


def _idle_whole(ledger: Ledger) -> dict[str, int]:
    return {name: n for n, names in ledger.by_idle.items() if n for name in names}


def _fitting(host: Host, request: Request) -> list[int]:
    share = request.share_of(host.gpu_memory_mib)
    return [d for d in host.devices if host.idle(d) >= share]


def _nowhere(request: Request, pool: str) -> Cause:
    if request.nodes is not None:
        names = ", ".join(sorted(request.nodes))
        return Cause(ReasonCode.NO_SUCH_NODE, f"node {names} does not exist, is not ready, or keeps it off")
    if pool:
        return Cause(ReasonCode.NODE_AFFINITY, f"node pool {pool} has no ready node that it may use")
    if not request.rules.barred:
        why = "no node that is ready has the labels it asks for, or none whose taints it tolerates"
        return Cause(ReasonCode.NODE_AFFINITY, why)
    barred = ", ".join(sorted(request.rules.barred))
    refused = f"a worker of it was refused by {barred}, or did not start there"
    why = f"{refused}; no other node that is ready has the labels it asks for and only taints that it tolerates"
    return Cause(ReasonCode.NODE_AFFINITY, why)


def _too_large_for(sizes: dict[int, int], size: int, tasks: int) -> Cause | None:
    largest = max((n for n, hosts in sizes.items() if hosts), default=0)
    if size > largest:
        return Cause(ReasonCode.TOO_LARGE, f"the largest node has {largest}")
    most = sum(n * (devices // size) for devices, n in sizes.items()) if size else tasks
    if tasks > most:
        return Cause(ReasonCode.TOO_LARGE, f"the cluster has room for {gpus(most * size * GPU)} in workers of {size}")
    return None


def _too_large(hosts: Iterable[Host], request: Request) -> Cause:
    """Return the first need that no node can meet even when empty, else that no node meets all of them together."""
    hosts = list(hosts)
    devices, mib = max(len(h.devices) for h in hosts), max(h.gpu_memory_mib for h in hosts)
    cpu, size = max(h.cpu for h in hosts), max(h.memory for h in hosts)
    if request.devices > devices:
        return Cause(ReasonCode.TOO_LARGE, f"the largest node that it may use has {devices}")
    if request.memory_mib > mib:
        what = f"the largest GPU that it may use has {show_mib(mib)}" if mib else "its GPUs' memory is not known"
        return Cause(ReasonCode.TOO_LARGE, what)
    if request.cpu > cpu:
        return Cause(ReasonCode.TOO_LARGE, f"the largest node that it may use has {cpus(cpu)}")
    if request.memory > size:
        return Cause(ReasonCode.TOO_LARGE, f"the largest node that it may use has {memory(size)}")
    for name, need in request.resources:
        if need > (most := max(capacity_of(h.resources, name) for h in hosts)):
            most /= WHOLE_GPU if name.startswith(GPU_PART_PREFIX) else 1
            return Cause(
                ReasonCode.TOO_LARGE, f"no node that it may use has {shown_resource(name, need)}: the most is {most:g}"
            )
    return Cause(ReasonCode.TOO_LARGE, "no node that it may use has all of that together")


def _types_of(request: Request) -> str:
    """Return " of type A or B" for the types of GPUs to which the request is limited; "" without such a limit."""
    limits = {one.values for term in request.rules.terms for one in term.requirements if one.key == GPU_PRODUCT}
    return f" of type {' or '.join(limits.pop())}" if len(limits) == 1 else ""


def _missing_devices(free: dict[str, int], size: int, tasks: int, promised: int, types: str = "") -> Cause:
    idle = sum(free.values())
    others = f" ({promised} more {are(promised)} promised to other jobs)" if promised else ""
    short = size * tasks - idle
    block = max(free.values(), default=0)
    where = min((name for name, n in free.items() if n == block), default="") if block else ""
    details: Details = (("idle_gpus", idle), ("largest_block", block), ("node", where))
    if short <= 0 and block < size:
        why = f"{idle}{types} {are(idle)} idle{others}, but the largest free block on one node is {block} on {where}"
        helps = f"{size - block} more {are(size - block)} released there"
        return Cause(ReasonCode.FRAGMENTED, why, helps, details)
    helps = f"{max(short, 1)} more {are(max(short, 1))} released"
    return Cause(ReasonCode.NO_FREE_GPUS, f"{idle}{types} {are(idle)} idle{others}", helps, details, binding=False)


def _missing_share(hosts: Sequence[Host], request: Request) -> Cause:
    """Return the shortage of shares: the largest idle share of a device, or the number of devices with enough."""
    if request.devices > 1:
        best = max(hosts, key=lambda h: (len(_fitting(h, request)), h.name))
        n = len(_fitting(best, request))
        why, helps = f"at most {n} of a node's GPUs have that much idle, on {best.name}", "more of them have"
        details: Details = (("largest_block", n), ("node", best.name))
        return Cause(ReasonCode.NO_FREE_GPUS, why, helps, details, binding=False)
    if (host := next((host for host in hosts if _has_too_many_sharers(host, request)), None)) is not None:
        why = f"{host.max_sharers:g} workers share each GPU that has that much idle, and no more may"
        details = (("node", host.name),)
        return Cause(ReasonCode.NO_FREE_GPUS, why, f"one of them on {host.name} exits", details, binding=False)
    lacks, name, left = min((_lack(host, request) for host in hosts), default=(GPU, "", 0))
    why = f"the most that is idle of a GPU is {count(max(0, left))} on {name}"
    details = (("largest_share", max(0, left) / GPU), ("node", name))
    return Cause(ReasonCode.NO_FREE_GPUS, why, f"{count(lacks)} more of it is released", details, binding=False)


def _has_too_many_sharers(host: Host, request: Request) -> bool:
    """Return whether a device has the share idle, and no further worker may use it."""
    share = request.share_of(host.gpu_memory_mib)
    left = {d: GPU - used - max(leaving, nominated) for d, (used, leaving, nominated) in host.taken.items()}
    return any(left.get(d, 0) >= share > host.idle(d) for d in host.devices)


def _lack(host: Host, request: Request) -> tuple[int, str, int]:
    """Return what the host's emptiest device lacks, the host's name, and the idle share of that device."""
    left = max((host.idle(d) for d in host.devices), default=0)
    return request.share_of(host.gpu_memory_mib) - left, host.name, left


def _missing_other(hosts: Sequence[Host], request: Request) -> Cause:
    """Return the shortage of CPU, memory or pods on the nodes that have idle devices."""
    kinds = (
        (ReasonCode.NO_FREE_CPU, request.cpu, cpus),
        (ReasonCode.NO_FREE_MEMORY, request.memory, memory),
    )
    for r, (code, need, show) in enumerate(kinds):
        left = {host.name: _left(host, r) for host in hosts}
        most = max(left.values(), default=0.0)
        if need > most:
            where = min(name for name, n in left.items() if n == most)
            nodes = "where GPUs are idle, " if request.devices else ""
            why = f"{nodes}at most {show(max(0, most))} {are(2)} left, on {where}"
            return Cause(
                code, why, f"{show(need - most)} more {are(2)} released there", (("node", where),), binding=False
            )
    for name, need in request.resources:
        if need > max((host.left_of(name, future=False) for host in hosts), default=0):
            where = "where GPUs are idle, " if request.devices else ""
            why = f"{where}{shown_resource(name, need)} {are(need)} not left"
            code = ReasonCode.NO_FREE_GPUS if name in dict(request.gpu_weights) else ReasonCode.NODE_FULL
            return Cause(code, why, "more is released there", (("resource", name),), binding=False)
    return Cause(
        ReasonCode.NODE_FULL,
        "no node has room for all of that together",
        "more is released on one node",
        (("nodes", len(hosts)),),
        binding=False,
    )


def _left(host: Host, r: int) -> float:
    total = (host.cpu, host.memory)[r]
    used, leaving, _ = host.other
    return total if total == UNLIMITED else total - used[r] - leaving[r]
