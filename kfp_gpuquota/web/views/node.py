"""One node: what runs on each of its GPUs, its labels, and the page that has it alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfp_gpuquota.errors import NotFoundError
from kfp_gpuquota.web.live import Elements
from kfp_gpuquota.web.rendering import render
from kfp_gpuquota.web.views import gpu_map
from kfp_gpuquota.web.views.figures import use_charts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from markupsafe import Markup

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.wire import NodeView, ShareView
    from kfp_gpuquota.web.source import Source
    from kfp_gpuquota.web.views.board import Board


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


def elements(board: Board, base: str, name: str) -> Elements:
    """Return what the page of one node shows; of one that was removed that it was."""
    view = found(board, name)
    if view is None:
        return Elements({"summary": render("node_removed.html", name=name)})
    here = dict.fromkeys(view.holders)
    jobs = {job.uid: job for worker in here if (job := board.facts.holders.get(worker)) is not None}
    return Elements(
        {
            "summary": render("node_summary.html", view=view),
            f"node-{name}": card(board, view, board.source.idle_since(), base),
            "facts": render("node_facts.html", facts=list(_facts(view))),
            "gpu-use": render("gpu_use.html", charts=list(use_charts(board.source, _devices(view)))),
            "jobs-here": render("node_jobs.html", jobs=list(jobs.values()), base=base),
        }
    )


def found(board: Board, name: str) -> NodeView | None:
    """Return a node; None if the cluster has none of that name."""
    return next((view for view in board.nodes() if view.node.name == name), None)


def check_exists(board: Board, name: str) -> None:
    """Raise NotFoundError if the cluster has no such node."""
    if found(board, name) is None:
        raise NotFoundError(f"the cluster has no node {name!r}")


def project_of(board: Board, worker: str) -> str:
    """Return the project of a worker, or of a pod that belongs to no job."""
    job = board.facts.holders.get(worker)
    return job.spec.project if job is not None else worker.rpartition("/")[0]


def card(board: Board, view: NodeView, idle: Mapping[tuple[str, int], float], base: str) -> Markup:
    """Return what is shown of each of a node's GPUs."""
    href = gpu_map.address(base, view.node.name)
    found, job_of = gpus(board, view, idle), board.facts.holders.get
    return render("node.html", view=view, gpus=found, base=base, address=href, job_of=job_of)


def gpus(board: Board, view: NodeView, idle: Mapping[tuple[str, int], float]) -> list[Gpu]:
    """Return a node's devices with what each holds."""
    shares = {(share.project, share.worker, share.device): share for share in view.shares}
    return [
        Gpu(
            index=device.index,
            model=device.model,
            memory_mib=device.memory_mib,
            parts=tuple(_parts(board, view.held.get(device.index, ()), device.index, shares)),
            taken=bool(view.used.get(device.index)) and not view.held.get(device.index),
            idle_since=None if view.used.get(device.index) else idle.get((view.node.name, device.index)),
        )
        for device in view.node.devices
    ]


def _devices(view: NodeView) -> Iterable[tuple[str, str, int, int, float]]:
    node = view.node
    return ((f"GPU {device.index}", node.name, device.index, device.memory_mib, 0.0) for device in node.devices)


def _facts(view: NodeView) -> Iterable[tuple[str, str]]:
    node = view.node
    yield "Pool", node.pool or "none"
    yield "GPUs", ", ".join(name for name in view.types if name) or "no type"
    if node.cpu is not None:
        yield "CPU", f"{node.cpu:g} cores"
    if node.memory_mib is not None:
        yield "Memory", f"{node.memory_mib / 1024:.0f} GiB"
    if node.taints:
        yield "Taints", ", ".join(f"{taint.key}={taint.value}" for taint in node.taints)
    yield from sorted(node.labels.items())


def _parts(
    board: Board, workers: Iterable[str], device: int, shares: Mapping[tuple[str, str, int], ShareView]
) -> Iterable[Part]:
    for holder in workers:
        job, (namespace, _, name) = board.facts.holders.get(holder), holder.rpartition("/")
        if job is None and not namespace:
            continue
        project = job.spec.project if job is not None else namespace
        worker = holder.removeprefix(f"{project}/")
        share = shares.get((project, worker, device))
        held = _held(job, worker) if job is not None else share.request_mib / (share.total_mib or 1) if share else 1.0
        used = _chart(board.source, worker, device, share.total_mib) if share else ""
        yield Part(job, project, job.spec.name if job is not None else name, round(held * 100), share, used)


def _held(job: Job, worker: str) -> float:
    return next(each.share for each in job.status.workers if each.id == worker)


def _chart(source: Source, worker: str, device: int, total_mib: int) -> str:
    """Return the SVG path of an area below memory in use, where 100 by 10 is all of the time and of the device."""
    used = source.memory_of(worker, device)
    if len(used) < 2 or total_mib <= 0:
        return ""
    begin, span = used[0][0], used[-1][0] - used[0][0] or 1.0
    points = [f"{100 * (at - begin) / span:.1f} {10 - 10 * min(1.0, mib / total_mib):.1f}" for at, mib in used]
    return f"M0 10L{'L'.join(points)}L100 10Z"
