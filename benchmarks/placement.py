"""How much of a cluster can be given away before something no longer fits.

    python benchmarks/placement.py --nodes NODES.csv --pods PODS.csv --seeds 10

Pods are put in random order and drawn again with replacement until they ask for 130% of the cluster's GPUs, then placed
one after another; none leaves. NODES.csv: sn, cpu_milli, memory_mib, gpu, model. PODS.csv: cpu_milli, memory_mib,
num_gpu, gpu_milli (of each GPU) and, if there is one, gpu_spec (models joined by |). The list's own mix is the prior.
With --movable the pods with GPUs are preemptible, and what did not fit is then tried by moving others, by the
scheduler's own cycles until no plan moves a pod: no pod is stopped, and each moves to devices that are idle then.
The last line is JSON: allocated_percent (mean), seconds (the slowest run), and with --movable moved_percent, moves.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections import Counter
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import TYPE_CHECKING

from kfp_gpuquota.api import Device, JobSpec, Node, NodeTerm, Operator, Project, Requirement
from kfp_gpuquota.scheduler import (
    JobSubmitted,
    NodeChanged,
    QuotaChanged,
    State,
    WorkerGone,
    WorkerStarted,
    plan,
)
from kfp_gpuquota.scheduler.placement.fragmentation import WHOLE, Demand, Machine, Packer, Spot

if TYPE_CHECKING:
    from collections.abc import Iterable

REQUESTED = 1.3


def read_machines(path: Path) -> list[Machine]:
    """The nodes of the file."""
    with path.open() as file:
        return [
            Machine(row["sn"], int(row["gpu"]), int(row["cpu_milli"]), int(row["memory_mib"]), row.get("model", ""))
            for row in csv.DictReader(file)
        ]


def read_demands(path: Path) -> list[Demand]:
    """The pods of the file."""
    with path.open() as file:
        return [_demand(row) for row in csv.DictReader(file)]


def _demand(row: dict[str, str]) -> Demand:
    models = row.get("gpu_spec") or ""
    devices = int(row["num_gpu"])
    return Demand(
        devices=devices,
        milli=int(row["gpu_milli"]) if devices else 0,
        cpu_milli=int(row["cpu_milli"]),
        memory_mib=int(row["memory_mib"]),
        models=frozenset(models.split("|")) if models else None,
    )


def arrivals(demands: list[Demand], capacity: int, seed: int) -> list[Demand]:
    """The pods in random order, with more drawn until they ask for 130% of the capacity (in thousandths)."""
    chance = random.Random(seed)
    order = demands[:]
    chance.shuffle(order)
    asked = sum(d.devices * d.milli for d in order)
    while asked < REQUESTED * capacity:
        extra = chance.choice(demands)
        order.append(extra)
        asked += extra.devices * extra.milli
    return order


def run(machines: list[Machine], demands: list[Demand], seed: int) -> tuple[list[tuple[Demand, Spot | None]], float]:
    """Where each pod went, in the order of their arrival; and seconds."""
    order = arrivals(demands, sum(m.devices for m in machines) * WHOLE, seed)
    started = perf_counter()
    packer = Packer(machines, Counter(demands))
    placed = [(demand, packer.place(demand)) for demand in order]
    return placed, perf_counter() - started


def percent(machines: list[Machine], demands: Iterable[Demand]) -> float:
    """Of all GPUs."""
    return 100 * sum(d.devices * d.milli for d in demands) / (sum(m.devices for m in machines) * WHOLE)


class Moving:
    """The same cluster and pods in the scheduler's state; `move` repeats until a plan moves no pod."""

    def __init__(self, machines: list[Machine], placed: list[tuple[Demand, Spot | None]]) -> None:
        self.state, self.started, self.moves = State(), 0, 0
        self.pods = {f"pod-{i:06}": demand for i, (demand, _) in enumerate(placed) if demand.devices}
        self.running: set[str] = set()
        self.state.apply(QuotaChanged(Project(name="all", guaranteed=sum(m.devices for m in machines))))
        for machine, (cpu_milli, memory_mib) in zip(machines, _left(machines, placed), strict=True):
            devices = tuple(Device(index=i) for i in range(machine.devices))
            labels = {"model": machine.model}
            node = Node(name=machine.name, devices=devices, cpu=cpu_milli / 1000, memory_mib=memory_mib, labels=labels)
            self.state.apply(NodeChanged(node))
        for i, (demand, spot) in enumerate(placed):
            if demand.devices:
                self.state.apply(JobSubmitted(f"pod-{i:06}", _job(f"pod-{i:06}", demand), float(i)))
                if spot is not None:
                    self._start(f"pod-{i:06}", machines[spot.machine].name, spot.devices)

    def move(self) -> list[Demand]:
        """What runs at the end."""
        while True:
            decided = plan(self.state, 1e9, ("allocate", "consolidate"))
            for moved in decided.move:
                self.state.apply(WorkerGone(moved.worker))
                self._start(moved.job, moved.to.node, moved.to.devices)
            for bound in decided.bind:
                self._start(bound.job, bound.placements[0].node, bound.placements[0].devices)
            self.moves += len(decided.move)
            if not decided.move and not decided.bind:
                return [self.pods[name] for name in self.running]

    def _start(self, job: str, node: str, devices: tuple[int, ...]) -> None:
        self.started += 1
        self.running.add(job)
        self.state.apply(WorkerStarted(f"{job}-{self.started}", job, node, devices, 1e9))


def _left(machines: list[Machine], placed: list[tuple[Demand, Spot | None]]) -> list[tuple[int, int]]:
    """CPU and memory of each machine without what pods hold there that have no GPU: those stay where they are."""
    left = [[m.cpu_milli, m.memory_mib] for m in machines]
    for demand, spot in placed:
        if spot is not None and not demand.devices:
            left[spot.machine][0] -= demand.cpu_milli
            left[spot.machine][1] -= demand.memory_mib
    return [(cpu, memory) for cpu, memory in left]


def _job(name: str, demand: Demand) -> JobSpec:
    whole = demand.milli == WHOLE
    models = NodeTerm((Requirement("model", Operator.IN, tuple(sorted(demand.models))),)) if demand.models else None
    return JobSpec(
        name=name,
        project="all",
        command=("work",),
        gpus=demand.devices,
        gpus_per_worker=demand.devices if whole else None,
        gpu_fraction=None if whole else demand.milli / WHOLE,
        gpu_devices=None if whole else demand.devices,
        cpu=demand.cpu_milli / 1000 or None,
        memory_mib=demand.memory_mib or None,
        node_affinity=(models,) if models is not None else (),
    )


def main() -> None:
    """Run the experiment for several seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("--pods", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--movable", action="store_true", help="then move pods to make room for what did not fit")
    options = parser.parse_args()
    machines, demands = read_machines(options.nodes), read_demands(options.pods)
    results: dict[str, list[float]] = {"allocated": [], "seconds": [], "moved": [], "moves": []}
    for seed in range(options.seeds):
        placed, seconds = run(machines, demands, seed)
        share = percent(machines, (demand for demand, spot in placed if spot is not None))
        results["allocated"].append(share)
        results["seconds"].append(seconds)
        print(f"seed {seed}: {share:.2f} % allocated in {seconds:.1f} s", flush=True)
        if options.movable:
            moving = Moving(machines, placed)
            results["moved"].append(percent(machines, moving.move()))
            results["moves"].append(moving.moves)
            print(f"        {results['moved'][-1]:.2f} % after {moving.moves} moves", flush=True)
    output = {
        "pods": options.pods.stem,
        "allocated_percent": round(mean(results["allocated"]), 2),
        "seconds": round(max(results["seconds"]), 1),
    }
    if options.movable:
        output |= {"moved_percent": round(mean(results["moved"]), 2), "moves": round(mean(results["moves"]), 1)}
    print(json.dumps(output))


if __name__ == "__main__":
    main()
