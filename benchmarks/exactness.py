"""Whether reduction="exact" gives one model whatever happens, and what its reduction costs.

`--schedules N`: N random histories of 1 to 8 workers that grow, shrink (divisors of the shards or not) and are killed,
over a model with BatchNorm, dropout, bfloat16, AdamW and clipping; `sha256` lists the distinct digests of parameters,
buffers and optimizer state at the end, of all finished workers and of an undisturbed single one: one is right.
`reduce_ratio`: for each number of workers, the median time to reduce `--mb` of gradients exactly over that of
all-reduce of the same buckets, taken in turns in the same processes. Last line: JSON with both.

Usage: python benchmarks/exactness.py [--schedules 50] [--seed 0] [--mb 100] [--workers 2,3,4,5,6,7,8]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the tests' training and cluster

import torch
import torch.distributed as dist
from common import print_conditions, print_result
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from elastic_runtime.membership.process_group import Group, Interrupt
from elastic_runtime.plan.batches import split
from elastic_runtime.reduction.bucket_layout import PADDING, Bucket
from elastic_runtime.reduction.exact import Exchange
from elastic_runtime.reduction.sum_tree import joint_plan, range_plan
from kfp_gpuquota.membership import Limits
from tests.elastic_runtime.harness import JOB, Cluster
from tests.elastic_runtime.training import Plan, train
from tests.forked import context
from tests.polling import until

if TYPE_CHECKING:
    from collections.abc import Callable

SHARDS = 8
BUCKETS = 4
ROUNDS = 5
NEWCOMERS_S = 4.0
TIMEOUT_S = 600.0
LIMITS = Limits(silence_s=TIMEOUT_S)  # no worker is stopped here: a silent one is only delayed by the others
PLAN = Plan(
    epochs=6,
    max_batch=None,
    normalise=True,
    mixed=True,
    global_batch=37,
    options={"reduction": "exact", "shards": SHARDS},
)


def undisturbed(directory: Path) -> str:
    """What one worker gets, in a process of its own."""
    process = context.Process(target=train, args=(PLAN, 0, directory, None))
    process.start()
    process.join()
    return str(torch.load(directory / "final-0.pt")["sha256"])


class Schedule:
    """One random history. At most 12 workers in all; one always stays."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.random = cluster, random.Random(seed)
        self.wanted = list(range(self.random.randint(1, 4)))
        self.fresh = len(self.wanted)

    def change(self) -> None:
        """Another size, or a loss."""
        members = self.cluster.commits[-1].members if self.cluster.commits else ()
        killable = [i for i in self.wanted if f"w{i}" in members]
        if len(killable) > 1 and self.random.random() < 0.4:
            victim = self.random.choice(killable)
            self.cluster.kill(f"w{victim}", signal.SIGKILL)
            self.wanted.remove(victim)
        elif self.fresh < 12 and len(self.wanted) < 8 and (len(self.wanted) == 1 or self.random.random() < 0.6):
            more = self.random.randint(1, min(12 - self.fresh, 8 - len(self.wanted), 3))
            self.wanted += range(self.fresh, self.fresh + more)
            self.fresh += more
        elif len(self.wanted) > 1:
            self.wanted = sorted(self.random.sample(self.wanted, self.random.randint(1, len(self.wanted) - 1)))
        self.cluster.target(*self.wanted)
        end = time.monotonic() + self.random.choice((0.0, NEWCOMERS_S))
        while time.monotonic() < end and not self.prepared():
            time.sleep(0.01)

    def prepared(self) -> bool:
        """Return whether all wanted workers are ready to switch at the end of the next step."""
        pending = self.cluster.coordinator.call(lambda service: service.machine(JOB)).pending
        wanted = {f"w{i}" for i in self.wanted}
        return pending is not None and wanted == set(pending.members) == pending.prepared & wanted


def run(schedule_seed: int, directory: Path) -> tuple[set[str], list[int]]:
    """(digests of all finished workers, sizes that were had)."""
    with Cluster(directory, PLAN, limits=LIMITS) as cluster:
        schedule = Schedule(cluster, schedule_seed)
        cluster.target(*schedule.wanted)
        for step in range(2, 34, 4):
            cluster.hold_at(step)
            until(lambda step=step: max(cluster.gate.at) >= step, f"step {step}\n{cluster.logs()}", TIMEOUT_S)  # type: ignore[misc]
            schedule.change()
        cluster.let_go()
        for index in schedule.wanted:
            cluster.processes[f"w{index}"].join(TIMEOUT_S)
        cluster.wait_for_end(*schedule.wanted)
        for process in cluster.processes.values():
            process.join(30)
        sizes = [len(commit.members) for commit in cluster.commits if commit.complete]
        return {final["sha256"] for final in cluster.finals().values()}, sizes


def reducing(rank: int, size: int, port: int, elements: int, answer: Any) -> None:
    """One rank of the timing; rank 0 answers with the two medians, in seconds."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    assert dist.group.WORLD is not None
    group = Group(dist.group.WORLD, rank, size, Interrupt())
    nodes = tuple(range_plan(*part, SHARDS).nodes for part in split(SHARDS, size))
    merges = joint_plan(nodes, SHARDS)
    buckets = [Bucket(torch.float32, torch.device("cpu"), size=elements // BUCKETS) for _ in range(BUCKETS)]
    for bucket in buckets:
        bucket.whole = torch.randn(bucket.size + PADDING)
    rows = [[torch.randn(bucket.size + PADDING) for bucket in buckets] for _ in nodes[rank][1:]]
    rows = [[bucket.whole for bucket in buckets], *rows]
    exchanges = [Exchange(bucket) for bucket in buckets]

    def exact() -> None:
        for index, exchange in enumerate(exchanges):
            exchange.scatter(group, [row[index] for row in rows], nodes)
        for exchange in exchanges:
            exchange.gather(group, merges)
        for exchange in exchanges:
            exchange.finish(group)

    def plain() -> None:
        group.wait([group.all_reduce(bucket.flat) for bucket in buckets])

    times = in_turns(group, buckets, exact, plain)
    if rank == 0:
        answer.put(tuple(statistics.median(found[1:]) for found in times))
        answer.close()
        answer.join_thread()
    group.barrier()
    os._exit(0)


def in_turns(group: Group, buckets: list[Bucket], *kinds: Callable[[], None]) -> list[list[float]]:
    """Seconds of each run of each kind."""
    times: list[list[float]] = [[] for _ in kinds]
    for _ in range(ROUNDS + 1):
        for kind, found in zip(kinds, times, strict=True):
            group.barrier()
            began = time.perf_counter()
            kind()
            found.append(time.perf_counter() - began)
        for bucket in buckets:
            bucket.whole.mul_(1e-3)  # sums are not to grow beyond all bounds
    return times


def ratio(size: int, megabytes: int) -> float:
    """Exact over all-reduce, with `size` workers."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answer = context.SimpleQueue()
    arguments = (size, store.port, megabytes * 250_000, answer)
    processes = [context.Process(target=reducing, args=(rank, *arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    exact, plain = answer.get()
    for process in processes:
        process.join()
    print(f"{size} workers: exact {exact * 1e3:.0f} ms, all-reduce {plain * 1e3:.0f} ms of {megabytes} MB")
    return float(round(exact / plain, 2))


def main() -> None:
    """Schedules, then times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--workers", default="2,3,4,5,6,7,8")
    options = parser.parse_args()
    print_conditions("reduction='exact'", torch=torch.__version__, shards=SHARDS)
    digests: set[str] = set()
    with tempfile.TemporaryDirectory() as directory:
        digests.add(undisturbed(Path(directory)))
        for seed in range(options.seed, options.seed + options.schedules):
            place = Path(directory) / str(seed)
            place.mkdir()
            found, sizes = run(seed, place)
            print(f"schedule {seed}: sizes {sizes}: {sorted(d[:12] for d in found)}", flush=True)
            digests |= found
    ratios = {size: ratio(size, options.mb) for size in map(int, options.workers.split(",")) if options.mb}
    print_result(sha256=sorted(digests), schedules=options.schedules, reduce_ratio=ratios)


if __name__ == "__main__":
    main()
