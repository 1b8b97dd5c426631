"""`gpuquota top --gpus`: the jobs on each GPU, and the memory of those that share one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.quantity import show_gpus
from kfp_gpuquota.cli.display.output import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kfp_gpuquota.api import Job, JobSpec, Worker
    from kfp_gpuquota.api.history import DeviceUse
    from kfp_gpuquota.api.wire import NodeView, ShareView

WIDTH: Final = 32
_LEGEND: Final = "█ within its request   ▒ borrowed   ╎ its request   ┊ what it may use now"


def gpu_table(nodes: Sequence[NodeView], jobs: Iterable[Job]) -> str:
    """Return a line for each job and device that it holds; of shared ones with a bar of the device's memory."""
    columns = ("NODE", "DEVICE", "JOB", "PROJECT", "USED", "REQUEST", "LIMIT", "MAY USE", "LISTENS", "MEMORY")
    owners = {worker: job.spec for job in jobs for one in job.status.workers for worker in _names(job, one)}
    rows = [row for view in nodes for device in view.node.devices for row in _rows(view, device.index, owners)]
    idle = [device for view in nodes for device in view.node.devices if not view.used.get(device.index)]
    parts = [table(columns, rows)] if rows else []
    parts.append(f"idle: {len(idle)} of {show_gpus(sum(len(view.node.devices) for view in nodes))}")
    return "\n\n".join([*parts, *([_LEGEND] if any(view.shares for view in nodes) else [])])


def _names(job: Job, worker: Worker) -> tuple[str, str]:
    """Return the names of a holder: on Kubernetes workers' names are unique in their project only."""
    return worker.id, f"{job.spec.project}/{worker.id}"


def _rows(view: NodeView, device: int, owners: Mapping[str, JobSpec]) -> Iterator[list[object]]:
    shares = [share for share in view.shares if share.device == device]
    for share in shares:
        amounts = map(gibibytes, (share.used_mib, share.request_mib, share.limit_mib, share.granted_mib))
        listens = "yes" if share.listens else "no"
        yield [view.node.name, device, share.job, share.project, *amounts, listens, bar(share)]
    for worker in () if shares else view.held.get(device, ()):
        owner = owners.get(worker)
        job, project = (worker, "") if owner is None else (owner.name, owner.project)
        part = "whole" if owner is None or not owner.shared else owner.asks
        yield [view.node.name, device, job, project, "", part, "", "", "", ""]


def bar(share: ShareView, width: int = WIDTH) -> str:
    """The device's memory from left to right."""
    cells = ["·"] * width
    request, granted = _cell(share.request_mib, share, width), _cell(share.granted_mib, share, width)
    cells[min(request, width - 1)] = "╎"
    cells[min(granted, width - 1)] = "┊"
    for cell in range(_cell(share.used_mib, share, width)):
        cells[cell] = "█" if cell < request else "▒"
    return "".join(cells)


def gibibytes(mib: int) -> str:
    """Memory as a column of it is read best: "12.8Gi"."""
    return f"{mib / 1024:.1f}Gi"


def _cell(mib: int, share: ShareView, width: int) -> int:
    return min(width, round(mib / max(1, share.total_mib) * width))


def use_table(used: Iterable[DeviceUse]) -> str:
    """Return a line for each GPU with its mean and highest use, and its mean and most memory, or that none is known."""
    rows = [row for one in used if (row := _use_row(one))]
    columns = ("NODE", "DEVICE", "MINUTES", "MEAN USE", "HIGHEST", "MEAN MEMORY", "MOST MEMORY", "OF")
    return table(columns, rows) if rows else "no GPU was measured in this time"


def _use_row(one: DeviceUse) -> list[object]:
    if not one.points:
        return []
    percents = [point.percent for point in one.points]
    memory = [point.used_mib for point in one.points if point.used_mib is not None]
    minutes = (one.points[-1].until - one.points[0].at) / 60
    amounts = [gibibytes(round(sum(memory) / len(memory))), gibibytes(max(memory))] if memory else ["", ""]
    of = gibibytes(one.memory_mib) if one.memory_mib else ""
    use = [f"{sum(percents) / len(percents):.0f} %", f"{max(percents):.0f} %"]
    return [one.node, one.device, f"{minutes:.0f}", *use, *amounts, of]
