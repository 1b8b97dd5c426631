"""A plot of workloads' use of shared GPUs over time, with their requests and limits, as a PNG."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from kfp_gpuquota.api.wire import NodeView, ShareView

WIDTH_IN, HEIGHT_IN = 8.0, 3.2
_GIB = 1024


class Look(NamedTuple):
    """One look at all nodes, `at` seconds after the first."""

    at: float
    nodes: Sequence[NodeView]


Device = tuple[str, int]
Line = list[tuple[float, "ShareView"]]


def by_device(looks: Iterable[Look]) -> dict[Device, dict[str, Line]]:
    """Return the line of each job for each shared device. A job with two parts of a device has two lines."""
    found: dict[Device, dict[str, Line]] = {}
    for look in looks:
        for view in look.nodes:
            for share in view.shares:
                lines = found.setdefault((view.node.name, share.device), {})
                lines.setdefault(f"{share.project}/{share.job} ({share.worker[-8:]})", []).append((look.at, share))
    return {device: _short_names(lines) for device, lines in sorted(found.items())}


def draw(looks: Sequence[Look], path: Path) -> int:
    """One panel for each device; how many lines there are. Solid: in use; dashed: the request; dotted: the limit."""
    devices = by_device(looks)
    figure, axes = plt.subplots(
        max(1, len(devices)),
        1,
        figsize=(WIDTH_IN, HEIGHT_IN * max(1, len(devices))),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (device, lines) in zip(axes[:, 0], devices.items(), strict=False):
        _panel(axis, device, lines)
    axes[-1][0].set_xlabel("seconds")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return sum(len(lines) for lines in devices.values())


def _panel(axis: Any, device: Device, lines: Mapping[str, Line]) -> None:
    for name, line in lines.items():
        times, shares = [at for at, _ in line], [share for _, share in line]
        (drawn,) = axis.step(times, [share.used_mib / _GIB for share in shares], where="post", label=name, linewidth=2)
        for amounts, style in (("request_mib", "--"), ("limit_mib", ":")):
            values = [getattr(share, amounts) / _GIB for share in shares]
            axis.step(times, values, where="post", color=drawn.get_color(), linestyle=style, linewidth=1)
    total = max(share.total_mib for line in lines.values() for _, share in line) / _GIB
    axis.set(title=f"{device[0]}, GPU {device[1]}", ylabel="GiB  (- - request, ··· limit)", ylim=(0, total * 1.02))
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _short_names(lines: Mapping[str, Line]) -> dict[str, Line]:
    """Without the worker where a job has one line."""
    jobs = [name.partition(" ")[0] for name in lines]
    return {job if jobs.count(job) == 1 else name: lines[name] for job, name in zip(jobs, lines, strict=True)}
