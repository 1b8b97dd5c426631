"""A plot of the GPUs held by each project over time, from the cluster's history."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from kfp_gpuquota.api import Resize
    from kfp_gpuquota.api.wire import Event

COLOURS = ("#2f6db3", "#e08a2e", "#4f9d5d", "#8a5aa8")


def gpus_held(events: Iterable[Event], projects: Sequence[str]) -> tuple[list[float], dict[str, list[int]]]:
    """Times of all changes in seconds since the epoch, and the GPUs that each project holds from each of them on."""
    times: list[float] = []
    held: dict[str, list[int]] = {project: [] for project in projects}
    now = dict.fromkeys(projects, 0)
    for event in events:
        if event.worker and event.project in now:
            now[event.project] += event.gpus
            times.append(event.at)
            for project in projects:
                held[project].append(now[project])
    return times, held


def draw(path: Path, events: Iterable[Event], projects: Sequence[str], resizes: Iterable[Resize], gpus: int) -> None:
    """Write a PNG: one band a project, stacked, and a mark at each change of the training's size."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  # after the choice of what draws

    times, held = gpus_held(events, projects)
    start = times[0]
    seconds = [at - start for at in times]
    figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
    axes.stackplot(
        seconds, *held.values(), step="post", labels=list(held), colors=COLOURS[: len(held)], alpha=0.85, linewidth=0
    )
    for resize in resizes:
        at = resize.at - start
        axes.axvline(at, color="black", linewidth=1, linestyle=":")
        axes.annotate(
            f"{resize.from_gpus} → {resize.to_gpus}", (at, gpus), (3, 4), textcoords="offset points", fontsize=9
        )
    axes.axhline(gpus, color="grey", linewidth=0.8)
    axes.set(xlim=(0, max(seconds[-1], 1)), ylim=(0, gpus + 0.35), yticks=range(gpus + 1))
    axes.set(xlabel="seconds", ylabel="GPUs held", title="GPUs by project; dotted: the training changes its size")
    axes.legend(loc="lower right", framealpha=0.95)
    figure.savefig(path, dpi=120)
    plt.close(figure)
