"""The picture of docs/guides/expected_start.md: `python -m tools.expected_start_picture` draws it again.

One node of 8 GPUs in the simulator, with the scheduler and the forecasts of real clusters. The same input gives the
same picture.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from kfp_gpuquota.scheduler.forecast import RunTime, examples_of, expected_starts
from kfp_gpuquota.simulator import POLICIES, SimulationOptions, TraceJob, TraceNode
from kfp_gpuquota.simulator.simulation import Simulation

if TYPE_CHECKING:
    from kfp_gpuquota.api import ExpectedStart
    from kfp_gpuquota.simulator.simulation import Life

IMAGE: Final = Path(__file__).parents[1] / "docs" / "images" / "expected-start.png"
GPUS: Final = 8
MINUTE_S: Final = 60.0
SUBMITTED: Final = 60.0
"""When the large job is submitted, in minutes."""
LARGE: Final = "large"


@dataclass
class Observer:
    """What each GPU runs, and what was expected of the large job, as the simulation goes on; times in minutes."""

    simulation: Simulation | None = None
    runs: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    expected: list[tuple[float, ExpectedStart]] = field(default_factory=list)

    def watch(self, now: float) -> None:
        """Look at the simulation after each change."""
        assert self.simulation is not None
        state, lives = self.simulation.state, self.simulation.lives
        for task in state.workers.values():
            for device in task.devices:
                self.runs.setdefault((task.job.name, device), [now / MINUTE_S, 0.0])[1] = now / MINUTE_S
        found = expected_starts(state, now, lambda uid: _run_time(lives, lives[uid], now))
        for uid, between in found.items():
            if lives[uid].trace.name == LARGE:
                self.expected.append((now / MINUTE_S, between))


def _run_time(lives: dict[str, Life], life: Life, now: float) -> RunTime:
    ended = [one.trace.duration_s for one in lives.values() if one.ended_at is not None]
    running = [now - (one.first_started_at or now) for one in lives.values() if one.workers]
    return RunTime(examples_of(ended, running), ran_s=now - (life.first_started_at or now))


def jobs(seed: int = 7) -> list[TraceJob]:
    """Return small jobs that keep the node busy, and a large one."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    small = [
        TraceJob(f"train-{i}", "team", i * 3.5 * MINUTE_S, chance.uniform(18, 45) * MINUTE_S, chance.choice([1, 1, 2]))
        for i in range(36)
    ]
    large = TraceJob(LARGE, "team", SUBMITTED * MINUTE_S, 30 * MINUTE_S, GPUS)
    return sorted([*small, large], key=lambda job: job.arrives_at)


def simulated(seed: int = 7) -> Observer:
    """Play the jobs to their ends."""
    observer, trace = Observer(), jobs(seed)
    nodes = [TraceNode("node", GPUS, 0, 0)]
    options = SimulationOptions(clock=perf_counter, period_s=2 * MINUTE_S)
    observer.simulation = Simulation(nodes, trace, POLICIES["gpuquota"], options, observer.watch)
    observer.simulation.run()
    return observer


def draw(observer: Observer, path: Path) -> None:
    """Draw the GPUs above, and below them the range that was stated at each time."""
    assert observer.simulation is not None
    started = next(life.first_started_at for life in observer.simulation.lives.values() if life.trace.name == LARGE)
    assert started is not None
    start = started / MINUTE_S
    figure, (gpus, ranges) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained", height_ratios=(3, 2))
    _draw_runs(gpus, observer, start)
    _draw_ranges(ranges, observer, start)
    ranges.set_xlim(20, start + 35)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _draw_runs(axis: Any, observer: Observer, start: float) -> None:
    for (name, device), (begin, end) in observer.runs.items():
        color = "tab:orange" if name == LARGE else ("#9ecae1", "#6baed6", "#c6dbef")[int(name.split("-")[1]) % 3]
        axis.broken_barh(
            [(begin, end - begin)], (device - 0.45, 0.9), facecolors=color, edgecolors="white", linewidth=1
        )
    axis.axvline(SUBMITTED, color="black", linestyle="--", linewidth=1)
    axis.axvline(start, color="tab:red", linewidth=1.5)
    axis.text(SUBMITTED - 0.5, GPUS - 0.35, f"the job of {GPUS} GPUs is submitted", ha="right", fontsize=9)
    axis.text(start + 0.5, GPUS - 0.35, "it starts", color="tab:red", fontsize=9)
    axis.set_ylim(-0.6, GPUS + 0.2)
    axis.set_yticks(range(GPUS), [f"GPU {number}" for number in range(GPUS)])
    axis.set_title("What the GPUs run: small jobs in blue, the large one in orange", fontsize=10, loc="left")


def _draw_ranges(axis: Any, observer: Observer, start: float) -> None:
    at = [time for time, _ in observer.expected]
    earliest = [between.earliest / MINUTE_S for _, between in observer.expected]
    latest = [between.latest / MINUTE_S for _, between in observer.expected]
    axis.fill_between(
        at, earliest, latest, color="tab:orange", alpha=0.4, step="post", label="expected start: the range"
    )
    axis.plot([min(at), start], [min(at), start], color="gray", linewidth=1, linestyle=":", label="now")
    axis.axhline(start, color="tab:red", linewidth=1.5, label="the actual start")
    axis.axvline(start, color="tab:red", linewidth=1.5)
    axis.axvline(SUBMITTED, color="black", linestyle="--", linewidth=1)
    axis.set_xlabel("now, in minutes")
    axis.set_ylabel("start, in minutes")
    axis.legend(loc="lower right", fontsize=9)
    axis.set_title("What gpuquota explain says at each time", fontsize=10, loc="left")


if __name__ == "__main__":
    draw(simulated(), IMAGE)
