"""How much of a cluster can be given away before something no longer fits.

    python benchmarks/placement.py --nodes NODES.csv --pods PODS.csv --seeds 10

Pods are put in random order and drawn again with replacement until they ask for 130% of the cluster's GPUs, then placed
one after another; none leaves. NODES.csv: sn, cpu_milli, memory_mib, gpu, model. PODS.csv: cpu_milli, memory_mib,
num_gpu, gpu_milli (of each GPU) and, if there is one, gpu_spec (models joined by |). The list's own mix is the prior.
The last line is JSON: allocated_percent (mean), seconds (the slowest run).
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

from kfp_gpuquota.scheduler.fragmentation import WHOLE, Demand, Machine, Packer

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


def run(machines: list[Machine], demands: list[Demand], seed: int) -> tuple[float, float]:
    """Percent of the GPUs allocated at the end, and seconds."""
    capacity = sum(m.devices for m in machines) * WHOLE
    order = arrivals(demands, capacity, seed)
    started = perf_counter()
    packer = Packer(machines, Counter(demands))
    allocated = sum(d.devices * d.milli for d in order if packer.place(d) is not None)
    return 100 * allocated / capacity, perf_counter() - started


def main() -> None:
    """Run the experiment for several seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("--pods", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    machines, demands = read_machines(options.nodes), read_demands(options.pods)
    results = []
    for seed in range(options.seeds):
        percent, seconds = run(machines, demands, seed)
        results.append((percent, seconds))
        print(f"seed {seed}: {percent:.2f} % allocated in {seconds:.1f} s", flush=True)
    print(
        json.dumps(
            {
                "pods": options.pods.stem,
                "allocated_percent": round(mean(p for p, _ in results), 2),
                "seconds": round(max(s for _, s in results), 1),
            }
        )
    )


if __name__ == "__main__":
    main()
