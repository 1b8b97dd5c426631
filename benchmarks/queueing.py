"""Whether the queue keeps its word: how long jobs wait, and how right their expected starts are, on real traces.

    python benchmarks/queueing.py [--philly philly.csv] [--pollux FOLDER] [--alibaba NODES.csv PODS.csv] [--jobs 1500]
        [--declared 2] [--after 300]

Without a trace a generated one is used. Each trace is played in simulated time under `gpuquota`, the same without
reservations, `fifo`, `best-fit` and `backfill` (EASY, with exact run times). The last line is JSON; of several traces
it has the worst of each figure, and all of them in `traces`:

- wait_factor: the most that a job waits longer than under fair FIFO, as a factor (a minute is added to both): within a
  project nobody overtakes, guarantees come first, and the rest is shared (`fair_fifo.py`, no code of the scheduler);
- fifo_factor: the same against `fifo`, which has no projects: no scheduler that gives each project its guarantee can
  follow it, since a job of a project beyond its own waits for those of the others;
- reserved_rounds: after how many rounds an 8-GPU job starts against an endless stream of one-GPU jobs of 8 rounds;
- used_loss_points: the utilization that reservations cost, in points of 100;
- coverage: the part of the starts within their stated ranges, of all estimates of waiting jobs that were looked at;
- width: the median width of these ranges, as a part of the time that was waited from then on;
- unknown: the part of the looks at waiting jobs at which no range was stated;
- estimate_ms: the time for the estimates of 1,000 waiting jobs;
- users: a project of 16 GPUs in which one user submits 200 jobs at once and three others one each few minutes: the part
  of the GPU time that the first one has while its jobs wait, and the mean wait of the others, by age and fair to users.

In the simulation nothing is known of a job but the jobs of its name, else of its project, that have ended before. With
`--declared 2` each has a maximum run time besides, of twice its run time, which reservations (`--after` seconds) and
estimates use.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from common import print_conditions, print_result
from fair_fifo import FairFifo

from kfp_gpuquota.api import Device, JobSpec, Node, Project
from kfp_gpuquota.engine.expected_starts import FEWEST, MOST
from kfp_gpuquota.scheduler import (
    RESERVE_AFTER_S,
    JobRemoved,
    JobSubmitted,
    NodeChanged,
    QuotaChanged,
    State,
    WorkerGone,
    WorkerStarted,
)
from kfp_gpuquota.scheduler import plan as planned
from kfp_gpuquota.scheduler.forecast import Accuracy, RunTime, examples_of, expected_starts
from kfp_gpuquota.simulator import (
    POLICIES,
    Policy,
    SimulationOptions,
    TraceJob,
    TraceNode,
    read_jobs,
    read_nodes,
    sped_up,
    thinned,
)
from kfp_gpuquota.simulator.simulation import Life, Simulation, guarantees

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kfp_gpuquota.api import ExpectedStart

Trace = tuple[list[TraceNode], list[TraceJob]]
LOOKS = 80
MINUTE_S = 60.0
ROUNDS = 8


# Traces


def generated(jobs: int, seed: int = 1) -> Trace:
    """Eight nodes, three teams, and jobs of six names whose run times vary by a third."""
    chance = random.Random(seed)
    kinds = [(f"kind-{i}", chance.choice([1, 1, 2, 4, 8]), chance.lognormvariate(7, 1)) for i in range(6)]
    made, at = [], 0.0
    for number in range(jobs):
        name, gpus, mean_s = chance.choice(kinds)
        at += chance.expovariate(1 / 70)
        lasts = mean_s * chance.lognormvariate(0, 0.3)
        made.append(TraceJob(f"{name}-{number}", chance.choice("abc"), at, lasts, gpus))
    return _fitted(made)


def philly(path: Path, jobs: int) -> Trace:
    """The trace of Philly: the first jobs of its three largest virtual clusters from the middle of the trace on."""
    rows = sorted(csv.DictReader(path.open()), key=lambda row: row["timestamp"])
    rows = rows[len(rows) // 2 :]
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[row["cluster"]] += 1
    largest = sorted(counts, key=lambda name: -counts[name])[:3]
    chosen = [row for row in rows if row["cluster"] in largest and int(row["num_gpus"]) <= 64][:jobs]
    began = datetime.fromisoformat(chosen[0]["timestamp"])
    return _fitted([_philly_job(number, row, began) for number, row in enumerate(chosen)])


def _philly_job(number: int, row: dict[str, str], began: datetime) -> TraceJob:
    gpus, at = int(row["num_gpus"]), (datetime.fromisoformat(row["timestamp"]) - began).total_seconds()
    workers, each = (1, gpus) if gpus <= 8 else (math.ceil(gpus / 8), 8)
    lasts = max(1.0, float(row["duration"]))
    name = f"job-{number}"
    return TraceJob(name, f"vc-{row['cluster']}", at, lasts, each, workers=workers, fewest=workers, most=workers)


EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}


def pollux(folder: Path, most: int) -> Trace:
    """The first jobs of Pollux's workloads, one after the other, on nodes of 4 GPUs; run times by its measurements."""
    jobs, begin = [], 0.0
    for number in range(1, 9):
        rows = list(csv.DictReader((folder / "workloads" / f"workload-{number}.csv").open()))
        for row in rows:
            app, replicas = row["application"], int(row["num_replicas"])
            lasts = _pollux_s(folder / "traces" / app, app, replicas, int(row["batch_size"]))
            workers, each = (1, replicas) if replicas <= 4 else (math.ceil(replicas / 4), 4)
            name, at = f"{app}-{number}{row['name'].rpartition('-')[2]}", begin + float(row["time"])
            jobs.append(TraceJob(name, "all", at, lasts, each, workers=workers, fewest=workers, most=workers))
        begin += 8 * 3600
    return [TraceNode(f"n{i}", 4, 0, 0) for i in range(16)], jobs[:most]


def _pollux_s(folder: Path, app: str, replicas: int, batch: int) -> float:
    epochs = list(csv.DictReader((folder / f"validation-{batch}.csv").open()))
    steps = float(epochs[min(len(epochs), EPOCHS[app]) - 1]["iteration"])
    rows = list(csv.DictReader((folder / "scalability.csv").open()))
    nearest = min(
        rows,
        key=lambda row: (
            abs(int(row["num_replicas"]) - replicas),
            abs(int(row["local_bsz"]) - batch / replicas),
            int(row["num_nodes"]),
        ),
    )
    return steps * float(nearest["step_time"]) * max(1.0, batch / replicas / int(nearest["local_bsz"]))


def alibaba(nodes: Path, jobs: Path) -> Trace:
    """Every 40th node of the published cluster, and its jobs that need GPUs, five times as fast."""
    return thinned(read_nodes(nodes), 40), [job for job in sped_up(read_jobs(jobs), 5) if job.gpus]


def _fitted(jobs: list[TraceJob], load: float = 0.9) -> Trace:
    """The jobs with as many nodes of 8 GPUs as they use for `load` of the time in which they arrive."""
    span = jobs[-1].arrives_at - jobs[0].arrives_at
    wanted = sum(min(job.gpu_seconds, job.worker_gpus * job.workers * span) for job in jobs) / (span * load)
    most = max(job.workers for job in jobs)
    return [TraceNode(f"n{i}", 8, 0, 0) for i in range(max(most, math.ceil(wanted / 8)))], jobs


# Estimates


@dataclass
class Look:
    """An estimate of one waiting job at a time, and when it has started."""

    uid: str
    at: float
    expected: ExpectedStart | None


@dataclass
class Looks:
    """Estimates at `LOOKS` times between the first and the last arrival."""

    times: list[float]
    simulation: Simulation | None = None
    found: list[Look] = field(default_factory=list)
    accuracy: Accuracy = field(default_factory=Accuracy)
    seen: set[str] = field(default_factory=set)

    def watch(self, now: float) -> None:
        """Look at all waiting jobs if it is time to."""
        if not self.times or now < self.times[0]:
            return
        while self.times and now >= self.times[0]:
            self.times.pop(0)
        assert self.simulation is not None
        lives = self.simulation.lives
        waiting = []
        for uid, life in lives.items():
            if life.first_started_at is None:
                waiting.append(uid)
            elif uid not in self.seen:
                self.seen.add(uid)
                self.accuracy.started(uid, life.first_started_at)
        played = expected_starts(self.simulation.state, now, known_run_times(lives, now))
        for uid in waiting:
            shown = self.accuracy.ranged(played[uid], now) if uid in played else None
            self.found.append(Look(uid, now, shown))
            if shown is not None:
                self.accuracy.state(uid, shown)


def known_run_times(lives: dict[str, Life], now: float) -> Callable[[str], RunTime]:
    """Return what the jobs that have ended say about the run times of others."""
    ended: dict[tuple[str, str], list[float]] = defaultdict(list)
    for life in sorted((one for one in lives.values() if one.ended_at is not None), key=lambda one: one.ended_at or 0):
        for key in _keys(life):
            ended[key].append(life.trace.duration_s)
    running: dict[tuple[str, str], list[float]] = defaultdict(list)
    for life in lives.values():
        if life.workers:
            for key in _keys(life):
                running[key].append(_ran_s(life, now))
    examples = {
        key: examples_of(found[-MOST:], running[key][:MOST]) for key, found in ended.items() if len(found) >= FEWEST
    }

    def run_time(uid: str) -> RunTime:
        life = lives[uid]
        known = next((examples[key] for key in _keys(life) if key in examples), ())
        return RunTime(known, most_s=life.job.most_s, ran_s=_ran_s(life, now))

    return run_time


def _ran_s(life: Life, now: float) -> float:
    return life.done + (life.rate * (now - life.since) if life.workers else 0.0)


def _keys(life: Life) -> list[tuple[str, str]]:
    return [(life.trace.project, re.sub(r"[-\d]+$", "", life.trace.name)), (life.trace.project, "")]


def accuracy(looks: Looks, lives: dict[str, Life]) -> dict[str, float]:
    """The figures of all looks at jobs that have started."""
    within, widths, unknown = [], [], 0
    for look in looks.found:
        started = lives[look.uid].first_started_at
        if started is None:
            continue
        if look.expected is None:
            unknown += 1
            continue
        within.append(look.expected.earliest - MINUTE_S <= started <= look.expected.latest + MINUTE_S)
        widths.append((look.expected.latest - look.expected.earliest) / max(MINUTE_S, started - look.at))
    total = len(within) + unknown
    return {
        "looks": total,
        "coverage": round(sum(within) / len(within), 3) if within else 1.0,
        "width": round(median(widths), 3) if widths else 0.0,
        "unknown": round(unknown / total, 3) if total else 0.0,
    }


# Runs


def played(
    trace: Trace, policy: Policy, looks: Looks | None = None, declared: float = 0.0
) -> tuple[dict[str, float], float]:
    """Return how long each job waited, and the utilization in percent."""
    nodes, jobs = trace
    watch = looks.watch if looks is not None else lambda _: None
    simulation = Simulation(nodes, jobs, policy, SimulationOptions(clock=perf_counter, declared=declared), watch)
    if looks is not None:
        looks.simulation = simulation
    simulation.run()
    used = simulation.result(0.0).utilisation_percent
    waits = {
        life.trace.name: life.first_started_at - life.trace.arrives_at
        for life in simulation.lives.values()
        if life.first_started_at is not None
    }
    return waits, used


def measured(name: str, trace: Trace, declared: float, after_s: float) -> dict[str, float]:
    """The figures of one trace."""
    nodes, jobs = trace
    first, last = jobs[len(jobs) // 10].arrives_at, jobs[-1].arrives_at
    looks = Looks([first + i * (last - first) / LOOKS for i in range(LOOKS)])
    waits, used = played(trace, replace(POLICIES["gpuquota"], reserve_after_s=after_s), looks, declared)
    assert looks.simulation is not None
    others = {
        "before": replace(POLICIES["gpuquota"], name="before", reserve_after_s=math.inf),
        **{each: POLICIES[each] for each in ("fifo", "best-fit", "backfill")},
    }
    results = {other: played(trace, policy) for other, policy in others.items()}
    fair = FairFifo(nodes, guarantees(nodes, jobs, {})).waits(jobs)
    figures = {
        "wait_factor": factor(waits, fair),
        "fifo_factor": factor(waits, results["fifo"][0]),
        "used_loss_points": round(results["before"][1] - used, 2),
        **accuracy(looks, looks.simulation.lives),
    }
    print(f"{name}: {len(nodes)} nodes, {sum(node.gpus for node in nodes)} GPUs, {len(jobs)} jobs")
    for policy, (waited, utilization) in {"gpuquota": (waits, used), **results}.items():
        print(f"  {policy:9} {_spread(list(waited.values()))}, {utilization:.1f} % used", flush=True)
    print(f"  fair FIFO {_spread(list(fair.values()))}")
    print(f"  {figures}", flush=True)
    return figures


def factor(waits: dict[str, float], others: dict[str, float]) -> float:
    """Return the most that a job waits longer than it does in `others`; a minute is added to both."""
    return round(max((waits[job] + MINUTE_S) / (others[job] + MINUTE_S) for job in waits if job in others), 2)


def _spread(waits: Sequence[float]) -> str:
    ordered = sorted(waits)
    mean, most = sum(ordered) / len(ordered), ordered[-1]
    return f"mean wait {mean:8.0f} s, 95 % {ordered[len(ordered) * 95 // 100]:8.0f} s, longest {most:8.0f} s"


def estimate_ms(repeats: int = 5) -> float:
    """The time for the estimates of 1,000 waiting jobs of ten teams, on 100 nodes that 313 jobs use; the best one."""
    chance, state, now = random.Random(1), State(), 10_000.0
    for team in range(10):
        state.apply(QuotaChanged(Project(name=f"team-{team}", guaranteed=80)))
    for number in range(100):
        state.apply(NodeChanged(Node(name=f"n{number:03}", devices=tuple(Device(index=i) for i in range(8)))))
    for number in range(1313):
        gpus, team = chance.choice([1, 1, 1, 2, 4, 8]), chance.randrange(10)
        spec = JobSpec(name=f"job-{number}", project=f"team-{team}", command=("train",), gpus=gpus)
        state.apply(JobSubmitted(f"{number:05}", spec, float(number)))
    for bind in planned(state, now).bind:
        for number, at in enumerate(bind.placements):
            state.apply(WorkerStarted(f"{bind.job}-{number}", bind.job, at.node, at.devices, now))
    examples = tuple(sorted(chance.lognormvariate(7, 1.5) for _ in range(MOST)))
    times = []
    for _ in range(repeats):
        began = perf_counter()
        expected_starts(state, now, lambda uid: RunTime(examples, ran_s=state.jobs[uid].active and 100.0))
        times.append(perf_counter() - began)
    return round(1e3 * min(times), 1)


def of_users(jobs: int = 200, seed: int = 1) -> dict[str, dict[str, float]]:
    """The greedy user's part of the GPU time of the first hours, and the others' mean wait, under both orders."""
    chance, hours = random.Random(seed), 8
    trace = [TraceJob(f"many-{i}", "team", 0.0, chance.uniform(1200, 3600), 1, user="greedy") for i in range(jobs)]
    for user in ("ann", "bob", "cem"):
        at = 0.0
        while (at := at + chance.expovariate(1 / 900)) < hours * 3600:
            trace.append(TraceJob(f"{user}-{at:.0f}", "team", at, chance.uniform(1200, 3600), 1, user=user))
    trace.sort(key=lambda job: job.arrives_at)
    figures = {}
    for name in ("gpuquota", "fair-users"):
        simulation = Simulation(
            [TraceNode("n0", 8, 0, 0), TraceNode("n1", 8, 0, 0)], trace, POLICIES[name], SimulationOptions(perf_counter)
        )
        simulation.run()
        lives = list(simulation.lives.values())
        last = max(life.first_started_at or 0.0 for life in lives if life.trace.user == "greedy")
        waits = [(one.first_started_at or 0.0) - one.trace.arrives_at for one in lives if one.trace.user != "greedy"]
        held = {life.trace.name: _until(life, min(last, hours * 3600.0)) for life in lives}
        greedy = sum(held[life.trace.name] for life in lives if life.trace.user == "greedy")
        figures[name] = {
            "greedy_share": round(greedy / sum(held.values()), 3),
            "others_wait_s": round(sum(waits) / len(waits)),
            "used_s": round(sum(held.values())),
        }
        print(f"  users, {name}: {figures[name]}", flush=True)
    return figures


def _until(life: Life, at: float) -> float:
    """Return for how long the job ran until then."""
    if life.first_started_at is None:
        return 0.0
    return max(0.0, min(at, math.inf if life.ended_at is None else life.ended_at) - life.first_started_at)


def reserved_rounds() -> int:
    """After how many rounds an 8-GPU job starts against an endless stream of one-GPU jobs of 8 rounds, of its team."""
    state = State(reserve_after_s=0.0)
    ends: dict[str, int] = {}
    state.apply(QuotaChanged(Project(name="team", guaranteed=8)))
    state.apply(NodeChanged(Node(name="n", devices=tuple(Device(index=i) for i in range(8)))))
    for now in range(2000):
        for uid in [uid for uid, end in ends.items() if end <= now]:
            del ends[uid]
            state.apply(JobRemoved(uid))
            for worker in list(state.jobs[uid].tasks):
                state.apply(WorkerGone(worker, float(now)))
        large = now == ROUNDS
        spec = JobSpec(name=f"job-{now}", project="team", command=("train",), gpus=8 if large else 1)
        state.apply(JobSubmitted("large" if large else f"{now:05}", spec, float(now)))
        for bind in planned(state, float(now)).bind:
            for number, at in enumerate(bind.placements):
                state.apply(WorkerStarted(f"{bind.job}-{number}", bind.job, at.node, at.devices, float(now)))
            ends[bind.job] = now + ROUNDS
            if bind.job == "large":
                return now - ROUNDS
    return 2000


def main() -> None:
    """Play the traces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--philly", type=Path, metavar="philly.csv")
    parser.add_argument("--pollux", type=Path, metavar="FOLDER", help="with workloads/ and traces/")
    parser.add_argument("--alibaba", type=Path, nargs=2, metavar=("NODES.csv", "PODS.csv"))
    parser.add_argument("--jobs", type=int, default=1500, help="of each trace but that of Alibaba")
    parser.add_argument("--declared", type=float, default=0.0, help="maximum run times, as a factor of the run times")
    parser.add_argument("--after", type=float, default=RESERVE_AFTER_S, help="seconds until a job has a reservation")
    options = parser.parse_args()
    print_conditions(
        "the queue's waits and expected starts", jobs=options.jobs, declared=options.declared, after=options.after
    )
    traces: dict[str, Trace] = {}
    if options.philly:
        traces["philly"] = philly(options.philly, options.jobs)
    if options.pollux:
        traces["pollux"] = pollux(options.pollux, options.jobs)
    if options.alibaba:
        traces["alibaba"] = alibaba(*options.alibaba)
    figures = {
        name: measured(name, trace, options.declared, options.after)
        for name, trace in (traces or {"generated": generated(options.jobs)}).items()
    }
    worst = {
        key: max(found[key] for found in figures.values())
        for key in ("wait_factor", "fifo_factor", "used_loss_points", "width", "unknown")
    }
    coverage = max((found["coverage"] for found in figures.values()), key=lambda part: abs(part - 0.8))
    print_result(
        **worst,
        coverage=coverage,
        reserved_rounds=reserved_rounds(),
        estimate_ms=estimate_ms(),
        users=of_users(),
        traces=figures,
    )


if __name__ == "__main__":
    main()
