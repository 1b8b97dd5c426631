"""What a lost worker costs a training in shards (FSDP2), and what the copies of the shards cost that prevent it.

overhead: the time of a block of steps with copies every K steps over that of the block before, without, less 1; the
median of `--pairs` in one training. losses: one of the workers, a random one, is killed by SIGKILL at a random moment,
`--losses` times; a new one replaces it. There are no checkpoints, so a training that could not go on would end the
benchmark.

The workers are of one node, where copies are mapped by other workers; with --apart they are sent over TCP, as between
nodes.

Last line: JSON. For each K: overhead_K, repeated_K (steps that all had applied and that were trained again, the mean
and the most of a loss, beside the one that the loss interrupted), recover_s_K (from the last step before a loss to the
first one after it, less a step: median and longest); mirror_mib: host memory of the copies of one worker.

Usage: python benchmarks/sharded_loss.py [--mparams 26] [--workers 3] [--every 1 10] [--losses 50] [--apart]
                                          [--shard-size 2]
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import print_conditions, print_result
from elastic_bench import Bench, Step, Task, _Noise, build
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import elastic_runtime
from elastic_runtime.plan.replica_groups import Grid
from elastic_runtime.sharded import mirror
from elastic_runtime.sharded.mirror import Mirror


def shard(model: Any, mesh: Any) -> None:
    """Each layer, and the rest."""
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


@dataclass(frozen=True)
class How:
    """Copies every so many steps; `in_turns`: in every second block of steps only; `apart`: as if each worker were on a
    node of its own; `shard_size`: the workers of a replica group, None: all.
    """

    every: int
    apart: bool
    shard_size: int | None
    in_turns: bool = False

    @property
    def block(self) -> int:
        """Return the length of a block, in steps."""
        return max(4, self.every)


def copy_in_turns(length: int) -> None:
    """In this process, make copies in every second block of steps."""
    begin = Mirror.begin_step

    def begin_step(self: Mirror, step: int, capture: Any) -> None:
        if step // length % 2:
            begin(self, step, capture)

    Mirror.begin_step = begin_step  # type: ignore[method-assign]


def train(task: Task, environment: dict[str, str], how: How) -> None:
    """A worker's body: as `elastic_bench.train`, in shards that are copied."""
    os.environ.update(environment, ELASTIC_MIRROR=str(how.every))
    if how.apart:
        mirror.node_number = os.getpid
    if how.in_turns:
        copy_in_turns(how.block)
    torch.set_num_threads(1)
    log = Path(environment["BENCH_STEPS"]).open("w", buffering=1)  # noqa: SIM115  (as long as the process)
    job = elastic_runtime.init(global_batch_size=task.global_batch, progress=False)
    model, optimizer = build(task)
    loader: Any = DataLoader(_Noise(task.width), batch_size=task.global_batch)
    model, optimizer, loader = job.prepare(model, optimizer, loader, shard=shard, shard_size=how.shard_size)
    for _epoch in job.epochs(1):
        for x in loader:
            job.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            log.write(f"{job.step} {job.world_size} {time.monotonic()}\n")


@dataclass
class Loss:
    """What one loss has cost."""

    repeated: int
    recover_s: float


def measure_overhead(task: Task, workers: int, how: How, pairs: int) -> dict[str, float]:
    """Of one training in which blocks of steps with and without copies take turns: both have the same neighbours.

    The first pair of blocks is left out: it has the first allocations.
    """
    names, length = [f"w{i}" for i in range(workers)], how.block
    with tempfile.TemporaryDirectory() as directory, Bench(Path(directory), task, 2 * length * (pairs + 1)) as bench:
        bench.target(*names)
        bench.start(*names, body=train, arguments=(replace(how, in_turns=True),))
        bench.wait_for_size(workers, timeout_s=3600)
        ends = {each.step: each.end for each in bench.steps("w0")}
        end(bench, names)
    first = next(step for step in sorted(ends) if step % (2 * length) == 0) + 2 * length
    starts = range(first, first + 2 * length * pairs, 2 * length)
    plain = [ends[start + length] - ends[start] for start in starts]
    copying = [ends[start + 2 * length] - ends[start + length] for start in starts]
    ratios = [with_copies / without for with_copies, without in zip(copying, plain, strict=True)]
    print(f"copies every {how.every} steps: {', '.join(f'{r - 1:+.1%}' for r in ratios)}", flush=True)
    return {
        "step_ms": round(statistics.median(plain) / length * 1e3, 1),
        f"overhead_{how.every}": round(statistics.median(ratios) - 1, 4),
    }


def measure_losses(task: Task, workers: int, how: How, losses: int) -> list[Loss]:
    """Kill one of the workers, and have it replaced, again and again."""
    generator, found, every = random.Random(1), [], how.every
    with tempfile.TemporaryDirectory() as directory, Bench(Path(directory), task, 2 * every) as bench:
        names = [f"w{i}" for i in range(workers)]
        bench.target(*names)
        bench.start(*names, body=train, arguments=(how,))
        bench.wait_for_size(workers)
        for number in range(losses):
            victim = generator.choice(names)
            watched = next(name for name in names if name != victim)
            time.sleep(generator.uniform(0, 2 * every * step_s(bench.steps(watched))))
            found.append(lose(bench, names, victim, watched))
            names = [*(name for name in names if name != victim), f"r{number}"]
            bench.target(*names)
            bench.start(names[-1], body=train, arguments=(how,))
            bench.wait_for_size(workers)
            print(
                f"every {every}: loss {number + 1}: {found[-1].repeated} repeated, {found[-1].recover_s:.2f} s",
                flush=True,
            )
        end(bench, names)
    return found


def end(bench: Bench, names: list[str]) -> None:
    """All at once: a worker that ends by itself would be a loss for the others."""
    for name in names:
        bench.kill(name)


def lose(bench: Bench, names: list[str], victim: str, watched: str) -> Loss:
    """Kill the victim, and wait until the others go on."""
    known = len(bench.commits)
    bench.kill(victim)
    killed = time.monotonic()
    bench.target(*(name for name in names if name != victim))
    bench.wait_for(lambda: len(bench.commits) > known and bench.commits[-1].complete, "a generation without the victim")
    commit = bench.commits[-1]
    bench.wait_for(lambda: bool(after(bench.steps(watched), commit.step, len(names) - 1)), "a step after the loss")
    first = after(bench.steps(watched), commit.step, len(names) - 1)[0]
    return Loss(commit.lost_steps, first.end - killed - step_s(bench.steps(watched)))


def after(steps: list[Step], step: int, size: int) -> list[Step]:
    """Return the steps at this size from this one on."""
    return [each for each in steps[-200:] if each.size == size and each.step > step]


def step_s(steps: list[Step]) -> float:
    """Return the median of the last steps."""
    return statistics.median(b.end - a.end for a, b in itertools.pairwise(steps[-20:]))


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mparams", type=float, default=26)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=256, help="samples of a step, of all workers together")
    parser.add_argument("--every", type=int, nargs="+", default=[1, 10], help="steps between two copies")
    parser.add_argument("--pairs", type=int, default=8, help="of blocks of steps with and without copies")
    parser.add_argument("--losses", type=int, default=50, help="for each of --every")
    parser.add_argument("--shard-size", type=int, help="workers of a replica group (HSDP), which keep own copies only")
    parser.add_argument("--apart", action="store_true", help="send the copies over TCP, as between nodes")
    options = parser.parse_args()
    task = Task(options.mparams, options.batch)
    print_conditions(
        "a lost worker of a training in shards",
        torch=torch.__version__,
        model=f"{options.mparams:g} M parameters in linear layers, AdamW, {options.batch} samples a step",
        workers=f"{options.workers}, gloo, copies {'sent over TCP' if options.apart else 'mapped'}",
        groups=f"of {options.shard_size} workers" if options.shard_size else "one",
    )
    result: dict[str, object] = {"mparams": options.mparams, "workers": options.workers, "batch": options.batch}
    for every in options.every:
        how = How(every, options.apart, options.shard_size)
        result |= measure_overhead(task, options.workers, how, options.pairs) if options.pairs else {}
        losses = measure_losses(task, options.workers, how, options.losses) if options.losses else []
        if not losses:
            continue
        repeated = [loss.repeated for loss in losses]
        pauses = [loss.recover_s for loss in losses]
        result |= {
            f"repeated_{every}": [round(statistics.mean(repeated), 2), max(repeated)],
            f"recover_s_{every}": [round(statistics.median(pauses), 2), round(max(pauses), 2)],
        }
    copies = mirror.needed(int(options.mparams * 4e6), Grid.of(options.workers, options.shard_size))
    print_result(**result, losses=options.losses, mirror_mib=copies >> 20, load=round(os.getloadavg()[0], 1))


if __name__ == "__main__":
    main()
