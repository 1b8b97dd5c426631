"""`gpuquota top --gpus`: the use of shared GPUs by each job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cli.display.output import table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.api.wire import NodeView, ShareView

WIDTH: Final = 32
_LEGEND: Final = "█ within its request   ▒ borrowed   ╎ its request   ┊ what it may use now"


def gpu_table(nodes: Iterable[NodeView]) -> str:
    """A line for each workload and device, with a bar of the device's memory."""
    columns = ("NODE", "GPU", "JOB", "PROJECT", "USED", "REQUEST", "LIMIT", "MAY USE", "LISTENS", "MEMORY")
    rows = [
        [
            view.node.name,
            share.device,
            share.job,
            share.project,
            *(gibibytes(mib) for mib in (share.used_mib, share.request_mib, share.limit_mib, share.granted_mib)),
            "yes" if share.listens else "no",
            bar(share),
        ]
        for view in nodes
        for share in view.shares
    ]
    return f"{table(columns, rows)}\n\n{_LEGEND}" if rows else "no GPU is shared; see: gpuquota submit --help (-g 0.25)"


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
