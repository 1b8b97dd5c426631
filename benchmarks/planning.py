"""How long one planning cycle takes, and how much memory it needs.

    python benchmarks/planning.py --case allocate --nodes 100 --jobs 500
    python benchmarks/planning.py --case reclaim --nodes 1000 [--mix single]
    python benchmarks/planning.py --case consolidate --nodes 500
    python benchmarks/planning.py --case defragment --nodes 1000
    python benchmarks/planning.py --case gang --nodes 1000 --size 4096
    python benchmarks/planning.py --case steady --nodes 5000 --jobs 50000
    python benchmarks/planning.py --case reclaim --nodes 10 --growth 1,10,100
    python benchmarks/planning.py --case reclaim --nodes 10000 --gpus 1000
    python benchmarks/planning.py --case cold --nodes 10000 --jobs 50000
    python benchmarks/planning.py --case elastic --nodes 1000

Nodes have 8 GPUs. The cluster is filled by events, as a driver would. Time is of `plan` alone (for `steady` and
`elastic`: applying one arrival and planning), the best of --repeats, and of the first plan (`first_s`); memory is the
process's peak. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from kfp_gpuquota.api import Device, JobSpec, Kind, Node, Project
from kfp_gpuquota.api.defragmentation import Defragmentation
from kfp_gpuquota.scheduler import (
    JobSubmitted,
    NodeChanged,
    Plan,
    ProgressReported,
    QuotaChanged,
    State,
    WorkerStarted,
    plan,
)

if TYPE_CHECKING:
    from collections.abc import Callable

GPUS = 8
MIX = (1, 2, 4, 8)


@dataclass
class Options:
    """Parse the command line."""

    case: str
    nodes: int
    jobs: int
    size: int
    mix: str
    repeats: int
    seed: int
    gpus: int = 0


class Builder:
    """Fills a state by events."""

    def __init__(self, options: Options) -> None:
        self.random = random.Random(options.seed)
        self.state = State()
        self.jobs = 0
        self.free = {f"node-{i:05}": list(range(GPUS)) for i in range(options.nodes)}
        devices = tuple(Device(index=i) for i in range(GPUS))
        for name in self.free:
            self.state.apply(NodeChanged(Node(name=name, devices=devices)))

    def project(self, name: str, guaranteed: int) -> None:
        """A project without a limit."""
        self.state.apply(QuotaChanged(Project(name=name, guaranteed=guaranteed)))

    def submit(self, project: str, gpus: int, workers: int = 1, priority: int | None = None) -> str:
        """A job of that many workers with `gpus` each."""
        self.jobs += 1
        uid = f"job-{self.jobs:06}"
        spec = JobSpec(
            name=uid,
            project=project,
            command=("train",),
            gpus=gpus * workers,
            gpus_per_worker=gpus,
            priority=priority,
            kind=Kind.TRAIN,
        )
        self.state.apply(JobSubmitted(uid, spec, float(self.jobs)))
        return uid

    def run(self, uid: str, node: str, gpus: int) -> None:
        """Start the job's one worker on the node."""
        devices = tuple(self.free[node][:gpus])
        del self.free[node][:gpus]
        self.state.apply(WorkerStarted(f"{uid}-0", uid, node, devices, float(self.jobs)))

    def draw(self, mix: str, most: int = GPUS) -> int:
        """A job's size."""
        return 1 if mix == "single" else self.random.choice([n for n in MIX if n <= most])

    def fill(self, project: str, mix: str, until: int = 0) -> int:
        """Fill every node down to `until` free GPUs with jobs of mixed age and priority; returns the GPUs taken."""
        taken = 0
        for node, free in self.free.items():
            while len(free) > until:
                size = self.draw(mix, len(free) - until)
                uid = self.submit(project, size, priority=self.random.choice((40, 50, 60)))
                self.run(uid, node, size)
                taken += size
        return taken

    def demand(self, project: str, mix: str, gpus: int) -> None:
        """Jobs that wait, of `gpus` GPUs together."""
        while gpus > 0:
            size = self.draw(mix, min(GPUS, gpus))
            self.submit(project, size)
            gpus -= size


def allocate(options: Options) -> tuple[State, Callable[[Plan], str]]:
    """An empty cluster and jobs of mixed sizes of two projects."""
    builder = Builder(options)
    half = options.nodes * GPUS // 2
    builder.project("a", half)
    builder.project("b", half)
    for i in range(options.jobs):
        builder.submit("ab"[i % 2], builder.draw(options.mix))
    return builder.state, lambda p: f"{len(p.bind)} of {options.jobs} jobs bound"


def reclaim(options: Options) -> tuple[State, Callable[[Plan], str]]:
    """One project fills the cluster; the other has as many GPUs, or `gpus`, in jobs within its quota."""
    builder = Builder(options)
    total = options.nodes * GPUS
    builder.project("borrower", 0)
    builder.project("owner", total)
    builder.fill("borrower", options.mix)
    builder.demand("owner", options.mix, options.gpus or total)
    return builder.state, lambda p: f"{len(p.nominate)} nominated, {len(p.evict)} evicted, {len(p.waiting)} wait"


def consolidate(options: Options) -> tuple[State, Callable[[Plan], str]]:
    """Every node is half full of small jobs; jobs that need whole nodes wait."""
    builder = Builder(options)
    builder.project("a", options.nodes * GPUS)
    builder.fill("a", options.mix if options.mix == "single" else "single", until=GPUS // 2)
    for _ in range(options.nodes // 10):
        builder.submit("a", GPUS)
    return builder.state, lambda p: f"{len(p.move)} moves for {len(p.nominate)} jobs"


def defragment(options: Options) -> tuple[State, Callable[[Plan], str]]:
    """Nodes that are 1/8 to all full of jobs with a checkpoint, in the window, with a budget that allows all moves."""
    builder = Builder(options)
    builder.project("a", options.nodes * GPUS)
    for node, free in builder.free.items():
        left = builder.random.randint(1, GPUS)
        while left:
            size = min(left, builder.draw(options.mix, len(free)))
            builder.run(builder.submit("a", size), node, size)
            left -= size
    builder.state.ledger.defragmentation = Defragmentation(
        window="00:00-24:00", time_zone="UTC", budget_gpu_minutes=1e8, max_gpu_minutes_per_gpu=1e8
    )
    return builder.state, lambda p: f"{len(p.move)} moves"


def gang(options: Options) -> tuple[State, Callable[[Plan], str]]:
    """One gang of `size` workers of one GPU on an empty cluster."""
    builder = Builder(options)
    builder.project("a", options.nodes * GPUS)
    builder.submit("a", 1, options.size)
    return builder.state, lambda p: f"{sum(len(b.placements) for b in p.bind)} workers bound"


def cold(options: Options) -> tuple[State, Callable[[Plan], str]]:
    """Half of the jobs run on a full cluster, the others wait, and nothing was planned yet: a restarted scheduler."""
    builder = Builder(options)
    names = [f"team-{i:02}" for i in range(20)]
    for name in names:
        builder.project(name, options.nodes * GPUS // len(names))
    for number, (node, free) in enumerate(builder.free.items()):
        while free and builder.jobs < options.jobs // 2:
            size = builder.draw("mixed", len(free))
            builder.run(builder.submit(names[number % len(names)], size), node, size)
    while builder.jobs < options.jobs:
        builder.submit(builder.random.choice(names), builder.draw("mixed"))
    return builder.state, lambda p: f"{len(p.bind)} bound, {len(p.waiting)} wait, {len(p.evict)} evicted"


def steady(options: Options) -> tuple[State, Callable[[Plan], str]]:
    """A full cluster with jobs that wait, planned once; then one arrival."""
    builder = Builder(options)
    total = options.nodes * GPUS
    names = [f"team-{i:02}" for i in range(20)]
    for name in names:
        builder.project(name, total // len(names))
    for i, (node, free) in enumerate(builder.free.items()):
        while free and builder.jobs < options.jobs:
            builder.run(builder.submit(names[i % len(names)], 1), node, 1)
    while builder.jobs < options.jobs:
        builder.submit(names[builder.jobs % len(names)], builder.draw("mixed"))
    return builder.state, lambda p: f"{len(p.waiting)} jobs wait, {len(p.evict)} evicted"


def elastic(options: Options) -> tuple[State, Callable[[Plan], str]]:
    """A cluster full of elastic jobs that have reported several sizes and keep theirs; then one arrival."""
    builder = Builder(options)
    names = [f"team-{i:02}" for i in range(20)]
    for name in names:
        builder.project(name, options.nodes * GPUS // len(names))
    for number, node in enumerate(builder.free):
        uid = f"job-{number:06}"
        spec = JobSpec(
            name=uid, project=names[number % len(names)], command=("train",), gpus=2, min_gpus=1, max_gpus=2 * GPUS
        )
        builder.state.apply(JobSubmitted(uid, spec, float(number)))
        for device in range(GPUS):
            builder.state.apply(WorkerStarted(f"{uid}-{device}", uid, node, (device,), float(number)))
        single = 10.0 * builder.random.uniform(0.5, 2)
        for workers in (2, 4, GPUS):
            rate = single * workers**0.9
            builder.state.apply(ProgressReported(uid, 100 * workers, 1000.0, throughput=rate, workers=workers))
    return builder.state, lambda p: f"{len(p.bind)} bound, {len(p.resize)} sizes changed, {len(p.evict)} evicted"


CASES = {
    "elastic": elastic,
    "allocate": allocate,
    "reclaim": reclaim,
    "consolidate": consolidate,
    "defragment": defragment,
    "gang": gang,
    "cold": cold,
    "steady": steady,
}


def measure(options: Options) -> dict[str, object]:
    """Plan the case `repeats` times; the best time in seconds."""
    started = perf_counter()
    state, describe = CASES[options.case](options)
    built = perf_counter() - started
    first = perf_counter()
    decided = plan(state, 1e6)
    times = [perf_counter() - first]
    for i in range(options.repeats):
        gc.collect()
        began = perf_counter()
        if options.case in ("steady", "elastic"):
            state.apply(JobSubmitted(f"late-{i}", _late(i), 1e6 + i))
        decided = plan(state, 1e6)
        times.append(perf_counter() - began)
    measured = times[1:] or times
    print(f"{options.case}: {options.nodes} nodes, {describe(decided)}; built in {built:.2f} s, first {times[0]:.3f} s")
    return {
        "case": options.case,
        "nodes": options.nodes,
        "plan_s": round(min(measured), 4),
        "first_s": round(times[0], 4),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def _late(i: int) -> JobSpec:
    return JobSpec(name=f"late-{i}", project="team-00", command=("train",))


def main(arguments: list[str] | None = None) -> None:
    """Measure one case at one or several sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES), required=True)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--size", type=int, default=4096, help="workers of the gang")
    parser.add_argument("--gpus", type=int, default=0, help="that are reclaimed; else all")
    parser.add_argument("--mix", choices=("mixed", "single"), default="mixed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--growth", help="factors by which nodes, jobs and size grow, as 1,10,100")
    options = vars(parser.parse_args(arguments))
    growth = options.pop("growth")
    result: dict[str, object] = {}
    for factor in [int(f) for f in (growth or "1").split(",")]:
        grown = {k: v * factor if k in ("nodes", "jobs", "size") else v for k, v in options.items()}
        result = measure(Options(**grown))
        print(f"  x{factor}: {result['plan_s']} s", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
