"""Simulations side by side as one PNG: GPUs used by project over time, and GPUs asked for by jobs that wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kfp_gpuquota.simulator.measures import Result

DAY_S = 86_400


def draw(results: Sequence[Result], path: Path) -> None:
    """One column for each result; the same axes for all."""
    figure, axes = plt.subplots(
        2, len(results), figsize=(4.2 * len(results), 6), sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    for column, result in enumerate(results):
        _draw_used(axes[0][column], result)
        _draw_waiting(axes[1][column], result)
    axes[0][0].set_ylabel("GPUs used")
    axes[1][0].set_ylabel("GPUs asked for by jobs that wait")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, len(labels)))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_used(axis: Any, result: Result) -> None:
    days = _days(result)
    axis.stackplot(days, *result.series.used.values(), labels=list(result.series.used))
    axis.axhline(result.gpus, color="black", linewidth=0.8, linestyle="--", label="all GPUs")
    figures = f"{result.utilisation_percent:.1f} % used, {result.fragmentation_percent:.1f} % of idle unusable"
    axis.set_title(f"{result.policy}\n{figures}", fontsize=10)


def _draw_waiting(axis: Any, result: Result) -> None:
    axis.fill_between(_days(result), result.series.waiting_gpus, color="tab:red", alpha=0.5)
    axis.set_xlabel("days")


def _days(result: Result) -> list[float]:
    at = result.series.at
    return [(t - at[0]) / DAY_S for t in at]
