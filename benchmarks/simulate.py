"""How long it takes to replay a trace, whole and with departures, and what comes out under each policy.

    python benchmarks/simulate.py --nodes NODES.csv --jobs PODS.csv [--policy NAME]... [--every-node 40] [--elastic 20]

The last line is JSON: seconds (the slowest policy, reading the files included), and the figures of each policy.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter

from common import print_conditions, print_result

from kfp_gpuquota.simulator import (
    POLICIES,
    SimulationOptions,
    make_elastic,
    read_jobs,
    read_nodes,
    simulate,
    sped_up,
    thinned,
)


def main() -> None:
    """Replay the trace under each policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("--jobs", type=Path, required=True)
    parser.add_argument("--policy", choices=list(POLICIES), action="append")
    parser.add_argument("--every-node", type=int, default=1)
    parser.add_argument("--elastic", type=float, default=0.0)
    parser.add_argument("--speed", type=float, default=1.0)
    options = parser.parse_args()
    began = perf_counter()
    nodes = thinned(read_nodes(options.nodes), options.every_node)
    jobs = make_elastic(sped_up(read_jobs(options.jobs), options.speed), options.elastic)
    reading = perf_counter() - began
    print_conditions("simulate", nodes=len(nodes), gpus=sum(n.gpus for n in nodes), jobs=len(jobs))
    figures = {}
    for name in options.policy or POLICIES:
        result = simulate(nodes, jobs, POLICIES[name], SimulationOptions(clock=perf_counter))
        figures[name] = {
            "seconds": round(reading + result.seconds, 1),
            "plans": result.plans,
            "slowest_plan_ms": round(result.slowest_plan_ms, 1),
            "finished": result.finished,
            "used_percent": round(result.utilisation_percent, 2),
            "unusable_percent": round(result.fragmentation_percent, 2),
            "mean_completion_s": round(result.completion.mean_s, 1),
            "resizes": result.resizes,
            "evictions": result.evictions,
        }
        print(f"{name}: {figures[name]}", flush=True)
    print_result(seconds=max(f["seconds"] for f in figures.values()), jobs=len(jobs), policies=figures)


if __name__ == "__main__":
    main()
