"""The Nodes page: the jobs on each GPU, shared GPUs, idle GPUs with their idle time, and remedies for fragmentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfp_gpuquota.api import Phase, ReasonCode
from kfp_gpuquota.api.quantity import as_number
from kfp_gpuquota.web.live import Elements
from kfp_gpuquota.web.rendering import render

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.wire import NodeView, ShareView
    from kfp_gpuquota.web.source import Source


@dataclass(frozen=True)
class Part:
    """What one job holds of a GPU, or a pod that belongs to no job (`job` is None).

    Where the GPU is shared, `share` is its row of the memory ledger, and `used` the path of a small chart: the part of
    the device's memory that it used in the last minutes.
    """

    job: Job | None
    project: str
    name: str
    percent: int
    share: ShareView | None
    used: str = ""


@dataclass(frozen=True)
class Gpu:
    """One device; `idle_since` is in seconds since the epoch, `taken`: used by programs outside of the cluster."""

    index: int
    model: str
    memory_mib: int
    parts: tuple[Part, ...]
    taken: bool
    idle_since: float | None


def elements(source: Source, base: str, project: str = "") -> Elements:
    """Return what the page shows; with a project only the nodes on which it has workers."""
    views, jobs, idle = source.nodes(), source.jobs(), source.idle_since()
    holders = {worker.id: job for job in jobs for worker in job.status.workers}
    holders |= {f"{job.spec.project}/{worker.id}": job for job in jobs for worker in job.status.workers}
    shown = [view for view in views if not project or _has(view, holders, project)]
    rows = {
        f"node-{view.node.name}": render(
            "node.html",
            view=view,
            gpus=gpus(source, view, holders, idle),
            used=as_number(view.gpus_in_use),
            base=base,
        )
        for view in shown
    }
    return Elements({"fragments": render("fragments.html", base=base, **fragmentation(views, jobs))}, {"nodes": rows})


def inputs(source: Source) -> object:
    """Return what the page depends on but for time."""
    return source.nodes(), _kept_waiting(source.jobs())


def gpus(
    source: Source, view: NodeView, holders: Mapping[str, Job], idle: Mapping[tuple[str, int], float]
) -> list[Gpu]:
    """Return a node's devices with what each holds."""
    shares = {(share.project, share.worker, share.device): share for share in view.shares}
    return [
        Gpu(
            index=device.index,
            model=device.model,
            memory_mib=device.memory_mib,
            parts=tuple(_parts(source, view.held.get(device.index, ()), device.index, holders, shares)),
            taken=bool(view.used.get(device.index)) and not view.held.get(device.index),
            idle_since=None if view.used.get(device.index) else idle.get((view.node.name, device.index)),
        )
        for device in view.node.devices
    ]


def fragmentation(views: Sequence[NodeView], jobs: Iterable[Job]) -> dict[str, object]:
    """Return how many GPUs are idle, how many of them one node has at most, and which jobs wait for that reason."""
    free = {view.node.name: _idle(view) for view in views}
    largest = max(free, key=lambda name: free[name], default="")
    return {
        "idle": as_number(sum(free.values())),
        "parts": sum(1 for view in views for used in view.used.values() if 0 < used < 1),
        "largest": free.get(largest, 0),
        "largest_node": largest,
        "kept_waiting": _kept_waiting(jobs)[:5],
    }


def _idle(view: NodeView) -> int | float:
    return as_number(view.gpus - sum(1 for used in view.used.values() if used) - _others_in_use(view))


def _others_in_use(view: NodeView) -> float:
    return sum(one.in_use * one.counts_as for one in view.resources)


def _kept_waiting(jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs that wait because idle GPUs are on too many nodes."""
    return [
        job
        for job in jobs
        if job.status.phase is Phase.PENDING
        and job.status.reason is not None
        and job.status.reason.code is ReasonCode.FRAGMENTED
    ]


def _parts(
    source: Source,
    workers: Iterable[str],
    device: int,
    holders: Mapping[str, Job],
    shares: Mapping[tuple[str, str, int], ShareView],
) -> Iterable[Part]:
    for holder in workers:
        job, (namespace, _, name) = holders.get(holder), holder.rpartition("/")
        if job is None and not namespace:
            continue
        project = job.spec.project if job is not None else namespace
        worker = holder.removeprefix(f"{project}/")
        share = shares.get((project, worker, device))
        held = _held(job, worker) if job is not None else share.request_mib / (share.total_mib or 1) if share else 1.0
        used = _chart(source.memory_of(worker, device), share.total_mib) if share else ""
        yield Part(job, project, job.spec.name if job is not None else name, round(held * 100), share, used)


def _held(job: Job, worker: str) -> float:
    return next(each.share for each in job.status.workers if each.id == worker)


def _chart(used: Sequence[tuple[float, int]], total_mib: int) -> str:
    """Return the SVG path of an area below memory in use, where 100 by 10 is all of the time and of the device."""
    if len(used) < 2 or total_mib <= 0:
        return ""
    begin, span = used[0][0], used[-1][0] - used[0][0] or 1.0
    points = [f"{100 * (at - begin) / span:.1f} {10 - 10 * min(1.0, mib / total_mib):.1f}" for at, mib in used]
    return f"M0 10L{'L'.join(points)}L100 10Z"


def _has(view: NodeView, holders: Mapping[str, Job], project: str) -> bool:
    workers = [worker for held in view.held.values() for worker in held]
    workers += [pod for one in view.resources for pod in one.held]
    return any(
        holders[worker].spec.project == project if worker in holders else worker.startswith(f"{project}/")
        for worker in workers
    )
