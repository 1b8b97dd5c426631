"""What a lost worker costs a training in shards (FSDP2), and what the copies of the shards cost that prevent it.

overhead: the median step with copies every K steps over that without, less 1; the trainings take turns, `--rounds`
times, on the same machine. losses: one of the workers, a random one, is killed by SIGKILL at a random moment,
`--losses` times; a new one replaces it. There are no checkpoints, so a training that could not go on would end the
benchmark.

Last line: JSON. For each K: overhead_K, repeated_K (steps that all had applied and that were trained again, the mean
and the most of a loss, beside the one that the loss interrupted), recover_s_K (from the last step before a loss to the
first one after it, less a step: median and longest); mirror_mib: host memory of the copies of one worker.

Usage: python benchmarks/sharded_loss.py [--mparams 26] [--workers 3] [--batch 256] [--every 1 10] [--losses 50]
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import print_conditions, print_result
from elastic_bench import Bench, Step, Task, _Noise, build
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import elastic_runtime


def shard(model: Any, mesh: Any) -> None:
    """Each layer, and the rest."""
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(task: Task, environment: dict[str, str], every: int) -> None:
    """A worker's body: as `elastic_bench.train`, in shards that are copied every so many steps (0: never)."""
    os.environ.update(environment, ELASTIC_MIRROR=str(every))
    torch.set_num_threads(1)
    log = Path(environment["BENCH_STEPS"]).open("w", buffering=1)  # noqa: SIM115  (as long as the process)
    job = elastic_runtime.init(global_batch_size=task.global_batch, progress=False)
    model, optimizer = build(task)
    loader: Any = DataLoader(_Noise(task.width), batch_size=task.global_batch)
    model, optimizer, loader = job.prepare(model, optimizer, loader, shard=shard)
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


def median_step_s(directory: Path, task: Task, workers: int, every: int, steps: int) -> float:
    """Of a training of its own."""
    names = [f"w{i}" for i in range(workers)]
    with Bench(directory, task, steps) as bench:
        bench.target(*names)
        bench.start(*names, body=train, arguments=(every,))
        bench.wait_for_size(workers)
        found = bench.steps("w0")[3:]
        end(bench, names)
    return statistics.median(b.end - a.end for a, b in itertools.pairwise(found))


def measure_overhead(task: Task, workers: int, everys: list[int], rounds: int, steps: int) -> dict[str, float]:
    """The trainings take turns, so that all have the same neighbours."""
    times: dict[int, list[float]] = {every: [] for every in [0, *everys]}
    for _ in range(rounds):
        for every, found in times.items():
            with tempfile.TemporaryDirectory() as directory:
                found.append(median_step_s(Path(directory), task, workers, every, steps))
            print(f"copies every {every} steps: {found[-1] * 1e3:.0f} ms a step", flush=True)
    plain = statistics.median(times[0])
    ratios = {every: statistics.median(e / p for e, p in zip(times[every], times[0], strict=True)) for every in everys}
    return {"step_ms": round(plain * 1e3, 1), **{f"overhead_{every}": round(r - 1, 4) for every, r in ratios.items()}}


def measure_losses(task: Task, workers: int, every: int, losses: int) -> list[Loss]:
    """Kill one of the workers, and have it replaced, again and again."""
    generator, found = random.Random(1), []
    with tempfile.TemporaryDirectory() as directory, Bench(Path(directory), task, 2 * every) as bench:
        names = [f"w{i}" for i in range(workers)]
        bench.target(*names)
        bench.start(*names, body=train, arguments=(every,))
        bench.wait_for_size(workers)
        for number in range(losses):
            victim = generator.choice(names)
            watched = next(name for name in names if name != victim)
            time.sleep(generator.uniform(0, 2 * every * step_s(bench.steps(watched))))
            found.append(lose(bench, names, victim, watched))
            names = [*(name for name in names if name != victim), f"r{number}"]
            bench.target(*names)
            bench.start(names[-1], body=train, arguments=(every,))
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=20, help="steps of each training of which the overhead is measured"
    )
    parser.add_argument("--losses", type=int, default=50, help="for each of --every")
    options = parser.parse_args()
    task = Task(options.mparams, options.batch)
    print_conditions(
        "a lost worker of a training in shards",
        torch=torch.__version__,
        model=f"{options.mparams:g} M parameters in linear layers, AdamW, {options.batch} samples a step",
        workers=f"{options.workers}, gloo",
    )
    result: dict[str, object] = {"mparams": options.mparams, "workers": options.workers, "batch": options.batch}
    result |= measure_overhead(task, options.workers, options.every, options.rounds, options.steps)
    for every in options.every:
        losses = measure_losses(task, options.workers, every, options.losses)
        repeated = [loss.repeated for loss in losses]
        pauses = [loss.recover_s for loss in losses]
        result |= {
            f"repeated_{every}": [round(statistics.mean(repeated), 2), max(repeated)],
            f"recover_s_{every}": [round(statistics.median(pauses), 2), round(max(pauses), 2)],
        }
    state_mib = 3 * options.mparams * 4e6 / options.workers / 2**20
    print_result(**result, losses=options.losses, mirror_mib=round(4 * state_mib), load=round(os.getloadavg()[0], 1))


if __name__ == "__main__":
    main()
