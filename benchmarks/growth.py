"""How soon elastic trainings end if GPUs go where they pay: Pollux' workloads on the real scheduler, in simulated time.

    python benchmarks/growth.py [--pollux FOLDER] [--workloads 8] [--teams 4] [--batch tuned|scaled]

FOLDER has Pollux' measurements (OSDI 2021): workloads/ of 160 jobs in 8 hours each, and for each application in traces/
its step times by placement and local batch, and by epoch and batch its progress and gradient statistics. Without it
workloads are generated. The cluster has 16 nodes of 4 GPUs; plans are made each 60 s, and a start or a change of size
or nodes stops a job for 30 s, as in the published figures. Jobs arrive in turn in `--teams` teams that share the
guarantee.

The scheduler has of a job: its bounds (1 GPU to as many as its largest batch has smallest local batches; ncf has one
GPU and one batch, as in Pollux' simulation), and what it has reported at the sizes that it had: throughput, batch size,
noise scale, pause. It does not know how much work a job has, other runs of the application, or sizes that the job did
not have. A job chooses its batch at its size for its goodput, as Pollux' do (`tuned`), or has its first batch on each
GPU (`scaled`, the rule of `scale_batch`).

The sides: `mean` (goodput), the same with `in_place` changes that take 1 s (a pause of `resize.py` is below 0.1 s; the
rest is for slower models), `throughput` (no noise scales are reported), `equal` (nothing is reported), and `fifo`:
fixed sizes and batches, in the order of arrival. Last line: JSON with mean_jct_s, in_place_jct_s, throughput_jct_s,
equal_jct_s, fifo_jct_s, violations (jobs that waited in some state though their team held less than its guarantee), and
the published figures.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from time import perf_counter

from common import print_conditions, print_result

from kfp_gpuquota.api import Project
from kfp_gpuquota.simulator import POLICIES, Pace, SimulationOptions, TraceJob, TraceNode
from kfp_gpuquota.simulator.simulation import Simulation

NODES, GPUS_OF_NODE = 16, 4
GPUS = NODES * GPUS_OF_NODE
PERIOD_S, RESTART_S, IN_PLACE_S = 60.0, 30.0, 1.0
EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
LARGEST_LOCAL = {"yolov3": 8}
ONE_SIZE = {"ncf": 32768}
PUBLISHED = {"pollux": 2751, "optimus_oracle": 5682, "tiresias": 4038}
BATCHES = 12


@dataclass(frozen=True)
class Epoch:
    """One epoch at one batch size: the progress at its end, and the squared norm and variance of gradients."""

    progress: float
    square: float
    variance: float


Times = list[tuple[float, float, float]]
"""Local batch, step time and the part of it without computation (s), by rising local batch."""


@dataclass
class Application:
    """The measurements of one application; progress is in steps of the smallest batch."""

    name: str
    epochs: dict[int, list[Epoch]]
    placements: dict[tuple[int, ...], Times]
    sizes: dict[tuple[int, int], Times]
    most_local: float
    _paces: dict[tuple[object, ...], Pace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batches = sorted(self.epochs)
        self.first, self.largest = self.batches[0], self.batches[-1]
        self.least_local = min(times[0][0] for times in self.placements.values())
        count = min(map(len, self.epochs.values()))
        self.ends = [min(found[i].progress for found in self.epochs.values()) for i in range(count)]

    @property
    def most_gpus(self) -> int:
        """The GPUs that the largest batch is enough for."""
        return 1 if self.name in ONE_SIZE else min(GPUS, int(self.largest // self.least_local))

    def noise_scale(self, batch: float, epoch: int) -> float:
        """Return the gradient noise scale in samples: the measured variance is that of the smallest batch."""
        square, variance = (
            _line([(b, getattr(self.epochs[b][epoch], name)) for b in self.batches], batch)
            for name in ("square", "variance")
        )
        return self.first * variance / max(square, 1e-12)

    def alike(self, placement: tuple[int, ...]) -> tuple[int, ...]:
        """Return the measured rotation of the placement, else one with its number of nodes and GPUs."""
        turned = min(placement[i:] + placement[:i] for i in range(len(placement)))
        if turned in self.placements:
            return turned
        return (*([1] * (len(placement) - 1)), sum(placement) - len(placement) + 1)

    def step_s(self, placement: tuple[int, ...], local: float) -> tuple[float, float]:
        """Return the time of a step, and the part of it that communication adds; for a placement of `alike`."""
        if found := self.placements.get(placement):
            return _times(found, local)
        nodes = len(placement)
        low, high = _neighbors(sorted({count for count, _ in self.sizes}), nodes)
        below, above = (self._step_on(count, sum(placement) * count / nodes, local) for count in (low, high))
        return _between(below, above, (nodes - low) / max(1, high - low))

    def _step_on(self, nodes: int, gpus: float, local: float) -> tuple[float, float]:
        counts = sorted(count for on, count in self.sizes if on == nodes)
        low, high = _neighbors(counts, gpus)
        below, above = (_times(self.sizes[nodes, count], local) for count in (low, high))
        return _between(below, above, min(1.0, max(0.0, (gpus - low) / max(1, high - low))))

    def pace_with(self, placement: tuple[int, ...], epoch: int, batch: float) -> Pace:
        """Return the pace with this global batch, cut into as many micro-batches as it needs."""
        gpus = sum(placement)
        cuts = math.ceil(batch / gpus / self.most_local - 1e-8)
        if gpus == 1 and batch > self.first:  # of one micro-batch alone no noise scale can be estimated
            cuts = max(2, cuts)
        local = max(self.least_local, math.ceil(batch / gpus / cuts - 1e-8))
        samples = min(local * gpus * cuts, self.largest)
        step_s, added_s = self.step_s(placement, local)
        throughput = samples / (step_s + (cuts - 1) * (step_s - added_s))
        noise = self.noise_scale(samples, epoch)
        useful = throughput * (noise + self.first) / (noise + samples)
        return Pace(useful / self.first, self.ends[epoch], throughput, round(samples), noise)

    def best(self, placement: tuple[int, ...], epoch: int) -> Pace:
        """Return the pace with the batch that has the largest goodput."""
        least = min(self.largest, max(self.first, self.least_local * sum(placement)))
        batches = (least * (self.largest / least) ** (i / (BATCHES - 1)) for i in range(BATCHES))
        return max((self.pace_with(placement, epoch, batch) for batch in batches), key=lambda pace: pace.rate)

    def scaled(self, placement: tuple[int, ...]) -> float:
        """Return the batch if each GPU has the first one."""
        return min(self.largest, self.first * sum(placement))


@dataclass(frozen=True)
class Run:
    """A training of an application. `batch`: a number, or how the job chooses it; `reports`: what it reports."""

    app: Application
    batch: float | str
    reports: tuple[str, ...]

    def pace(self, placement: tuple[int, ...], done: float) -> Pace:
        """Return its pace on these nodes, until the end of the epoch."""
        epoch = min(bisect_right(self.app.ends, done + 1e-6), len(self.app.ends) - 1)
        placement = self.app.alike(placement)
        key = (placement, epoch, self.batch, self.reports)
        if key not in self.app._paces:  # noqa: SLF001 - its cache
            found = self._found(placement, epoch)
            self.app._paces[key] = Pace(  # noqa: SLF001
                found.rate, found.until, **{name: getattr(found, name) for name in self.reports}
            )
        return self.app._paces[key]  # noqa: SLF001

    def _found(self, placement: tuple[int, ...], epoch: int) -> Pace:
        if self.batch == "tuned":
            return self.app.best(placement, epoch)
        batch = self.app.scaled(placement) if self.batch == "scaled" else self.batch
        return self.app.pace_with(placement, epoch, float(batch))


def _line(points: list[tuple[float, float]], x: float) -> float:
    """Return the value at `x` of the line through the points, which are in order; beyond them that of the last one."""
    at = bisect_right(points, (x, math.inf))
    if at == 0 or at == len(points):
        return points[max(0, at - 1)][1]
    (low, before), (high, after) = points[at - 1], points[at]
    return before + (after - before) * (x - low) / (high - low)


def _neighbors(counts: list[int], x: float) -> tuple[int, int]:
    """Return the numbers next to `x`, below and above; beyond them the last one twice."""
    at = bisect_right(counts, x)
    return counts[max(0, at - 1)], counts[min(at, len(counts) - 1)]


def _between(a: tuple[float, float], b: tuple[float, float], part: float) -> tuple[float, float]:
    return a[0] + part * (b[0] - a[0]), a[1] + part * (b[1] - a[1])


def _times(times: Times, local: float) -> tuple[float, float]:
    at = bisect_right(times, (local, math.inf, math.inf))
    if at == 0 or at == len(times):
        return times[max(0, at - 1)][1:]
    low, high = times[at - 1], times[at]
    return _between(low[1:], high[1:], (local - low[0]) / (high[0] - low[0]))


# Workloads


@dataclass(frozen=True)
class Submission:
    """A job of a workload; `gpus` and `batch` are those that a user would ask for who must choose one size."""

    name: str
    at: float
    app: Application
    gpus: int
    batch: float


def read_application(folder: Path) -> Application:
    """Read the measurements of one application."""
    name = folder.name
    epochs = {
        int(path.stem.removeprefix("validation-")): [
            Epoch(float(row["progress"]), float(row["grad_sqr"]), float(row["grad_var"]))
            for row in list(csv.DictReader(path.open()))[: EPOCHS[name]]
        ]
        for path in folder.glob("validation-*.csv")
    }
    placements: dict[tuple[int, ...], Times] = {}
    for row in csv.DictReader((folder / "placements.csv").open()):
        placements.setdefault(tuple(map(int, row["placement"])), []).append(_time(row))
    alike: dict[tuple[int, int], list[Times]] = {}
    for placement, times in placements.items():
        alike.setdefault((len(placement), sum(placement)), []).append(times)
    sizes = {size: _mean(found) for size, found in alike.items()}
    for row in csv.DictReader((folder / "scalability.csv").open()):
        sizes.setdefault((int(row["num_nodes"]), int(row["num_replicas"])), []).append(_time(row))
    most = LARGEST_LOCAL.get(name) or max(time[0] for times in placements.values() for time in times)
    return Application(name, epochs, placements, sizes, most)


def _time(row: dict[str, str]) -> tuple[float, float, float]:
    return float(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"])


def _mean(found: list[Times]) -> Times:
    locals_ = sorted({time[0] for times in found for time in times})
    return [(b, *(fmean(part) for part in zip(*(_times(times, b) for times in found), strict=True))) for b in locals_]  # type: ignore[misc]


def read_workloads(folder: Path, count: int) -> list[list[Submission]]:
    """Read the first workloads."""
    apps = {name: read_application(folder / "traces" / name) for name in EPOCHS}
    found = []
    for number in range(1, count + 1):
        rows = csv.DictReader((folder / "workloads" / f"workload-{number}.csv").open())
        found.append(
            [
                Submission(
                    row["name"],
                    float(row["time"]),
                    apps[row["application"]],
                    int(row["num_replicas"]),
                    float(row["batch_size"]),
                )
                for row in rows
            ]
        )
    return found


def generated_workloads(count: int, jobs: int = 40) -> list[list[Submission]]:
    """Generate applications and workloads of the same form: small ones and a few that take hours."""
    chance = random.Random(1)
    apps = [
        generated_application(f"app-{i}", first, computes_s, sends_s, work)
        for i, (first, computes_s, sends_s, work) in enumerate(
            [(64, 0.05, 0.02, 8e3), (32, 0.2, 0.1, 1.5e4), (16, 0.1, 0.3, 4e3), (128, 0.3, 0.05, 8e4)]
        )
    ]
    found = []
    for _ in range(count):
        submitted, at = [], 0.0
        for number in range(jobs):
            at += round(chance.expovariate(1 / 180))
            app = chance.choices(apps, weights=(8, 4, 2, 1))[0]
            gpus = chance.choice((1, 2, 4, 8, 16))
            submitted.append(Submission(f"{app.name}-{number}", at, app, gpus, min(app.largest, app.first * gpus)))
        found.append(submitted)
    return found


def generated_application(name: str, first: int, computes_s: float, sends_s: float, work: float) -> Application:
    """Generate an application whose steps compute and send for so long, and whose noise grows as it learns."""

    def times(nodes: int, gpus: int) -> Times:
        sent = sends_s * ((gpus > 1) * 0.3 + (nodes > 1) * 0.7 + 0.01 * max(0, gpus - 2))
        return [(first * 2.0**i, computes_s * (0.2 + 0.8 * 2**i) + sent, sent) for i in (-2, -1, 0, 1)]

    epochs = {
        first * 2**i: [Epoch(work * (n + 1) / 10, 1.0, first * 2**i / first * (2.0 + n)) for n in range(10)]
        for i in range(7)
    }
    packed = [(n,) for n in range(1, 5)] + [(4, 4), (4, 4, 4), (4, 4, 4, 4)]
    placements = {one: times(len(one), sum(one)) for one in packed}
    sizes = {(nodes, gpus): times(nodes, gpus) for nodes in range(1, NODES + 1) for gpus in range(nodes, 4 * nodes + 1)}
    return Application(name, epochs, placements, sizes, 2.0 * first)


# Sides


@dataclass(frozen=True)
class Side:
    """One way to schedule: what jobs report, and how long a change takes; `elastic`: they have no size of their own."""

    reports: tuple[str, ...] = ("throughput", "batch_size", "noise_scale")
    pause_s: float = RESTART_S
    elastic: bool = True


SIDES = {
    "mean": Side(),
    "in_place": Side(pause_s=IN_PLACE_S),
    "throughput": Side(reports=("throughput",)),
    "equal": Side(reports=()),
    "fifo": Side(reports=(), elastic=False),
}


def trace_job(job: Submission, side: Side, team: str, batch: str) -> TraceJob:
    """Return the job as the scheduler gets it on this side."""
    app = job.app
    if not side.elastic:
        run, workers = Run(app, job.batch, ()), job.gpus
        return TraceJob(
            job.name, team, job.at, app.ends[-1], 1, workers=workers, fewest=workers, most=workers, training=run
        )
    one = ONE_SIZE.get(app.name)
    run = Run(app, batch if one is None else float(one), side.reports if one is None else ())
    return TraceJob(job.name, team, job.at, app.ends[-1], 1, most=app.most_gpus, training=run)


@dataclass
class Outcome:
    """What became of the jobs of one or several workloads."""

    completion_s: dict[str, list[float]] = field(default_factory=dict)
    violations: int = 0
    changes: int = 0
    seconds: float = 0.0

    @property
    def mean_s(self) -> float:
        """The mean completion time."""
        return fmean(s for found in self.completion_s.values() for s in found)


def play(workload: list[Submission], side: Side, teams: int, batch: str, outcome: Outcome) -> None:
    """Play one workload, and look at the guarantees in every state."""
    names = [f"team-{i}" for i in range(teams)]
    projects = tuple(Project(name=name, guaranteed=GPUS // teams) for name in names)
    jobs = [trace_job(job, side, names[i % teams], batch) for i, job in enumerate(workload)]
    options = SimulationOptions(
        clock=perf_counter,
        leave_s=0.0,
        checkpoint_s=1.0,
        cool_down_s=PERIOD_S,
        pause_s=side.pause_s,
        period_s=PERIOD_S,
        projects=projects,
    )

    def watch(now: float) -> None:
        if now % PERIOD_S or not side.elastic:
            return
        queues = simulation.state.ledger.queues
        for life in simulation.lives.values():
            waits = life.ended_at is None and not life.workers
            if waits and queues[life.trace.project].claim(0) < queues[life.trace.project].deserved.gpu:
                outcome.violations += 1

    policy = POLICIES["gpuquota" if side.elastic else "fifo"]
    nodes = [TraceNode(f"n{i:02}", GPUS_OF_NODE, 0, 0) for i in range(NODES)]
    simulation = Simulation(nodes, jobs, policy, options, watch)
    began = perf_counter()
    simulation.run()
    outcome.seconds += perf_counter() - began
    result = simulation.result(0.0)
    outcome.changes += result.resizes
    for job, life in zip(workload, simulation.lives.values(), strict=True):
        assert life.ended_at is not None, job.name
        outcome.completion_s.setdefault(job.app.name, []).append(life.ended_at - job.at)


def main() -> None:
    """Play the workloads on each side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pollux", type=Path, metavar="FOLDER", help="with workloads/ and traces/")
    parser.add_argument("--workloads", type=int, default=8)
    parser.add_argument("--teams", type=int, default=1, choices=(1, 2, 4, 8))
    parser.add_argument("--batch", choices=("tuned", "scaled"), default="tuned")
    parser.add_argument("--sides", default=",".join(SIDES), help="some of them, by name")
    options = parser.parse_args()
    print_conditions("growth where it pays", **{k: v for k, v in vars(options).items() if k != "pollux"})
    if options.pollux:
        workloads = read_workloads(options.pollux, options.workloads)
    else:
        workloads = generated_workloads(options.workloads)
    figures: dict[str, float] = {}
    violations = 0
    for name in options.sides.split(","):
        outcome = Outcome()
        for workload in workloads:
            play(workload, SIDES[name], options.teams, options.batch, outcome)
        figures[f"{name}_jct_s"] = round(outcome.mean_s)
        violations += outcome.violations
        by_app = ", ".join(f"{app} {fmean(found):.0f} s" for app, found in sorted(outcome.completion_s.items()))
        count = sum(map(len, outcome.completion_s.values()))
        print(
            f"{name:10} {outcome.mean_s:6.0f} s mean of {count} jobs ({by_app}); {outcome.changes / count:.1f} changes "
            f"of size each; {outcome.seconds:.0f} s",
            flush=True,
        )
    print_result(**figures, violations=violations, published=PUBLISHED if options.pollux else {})


if __name__ == "__main__":
    main()
