"""What elastic_runtime costs in steady state, against plain DistributedDataParallel in the same processes.

Both train copies of one model over one process group, in turns of `--turn` steps, so that whatever else the machine
does falls on both. `ratio` is the median step of elastic_runtime over that of DDP; `python_us_per_step` the CPU time
of the loop's thread that a step of a tiny model of 16 parameters takes beyond forward, backward and optimizer. In it is
what any reduction costs there: to start a collective and to wait for it, which is most of `ddp_us_per_step`, the same
for DDP; `beyond_ddp_us_per_step` is the difference, what elastic_runtime adds to a step. `agreement_percent`: what part
of a step without reduction comparing learning rates and parameters takes. Last line: JSON.

Usage: python benchmarks/overhead.py [--mparams 26] [--workers 2] [--steps 60]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from elastic_bench import Bench, Task, build, context
from torch import nn

import elastic_runtime
from elastic_runtime.plan.batches import MicroBatch
from elastic_runtime.validation.agreement import FULL_TURN, Agreement

if TYPE_CHECKING:
    from collections.abc import Callable


def worker(task: Task, environment: dict[str, str], steps: int, turn: int, answer: Any) -> None:
    """One rank: joins, then measures both kinds of step in turns; rank 0 answers."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    job = elastic_runtime.init(global_batch_size=task.global_batch)
    model, optimizer = build(task)
    data = torch.utils.data.TensorDataset(torch.zeros(1 << 16, 1))
    model, optimizer, _loader = job.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=1))
    epochs = job.epochs(1)
    next(epochs)
    ddp_model, ddp_optimizer = build(task)
    wrapped = nn.parallel.DistributedDataParallel(ddp_model)
    x = torch.randn(task.global_batch // job.world_size, task.width)
    session = job._session  # noqa: SLF001  (a step without the loader, which DDP does not have either)
    assert session is not None

    def elastic_step() -> None:
        iteration = session.begin_iteration(MicroBatch(0, len(x), len(x) * job.world_size, last=True))
        job.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        session.end_iteration(iteration)

    def plain_step() -> None:
        wrapped(x).square().mean().backward()
        ddp_optimizer.step()
        ddp_optimizer.zero_grad()

    def local_step() -> None:
        ddp_model(x).square().mean().backward()
        ddp_optimizer.step()
        ddp_optimizer.zero_grad()

    found = interleaved([elastic_step, plain_step, local_step], steps, turn)
    if job.rank == 0:
        answer.put(found)
        answer.close()
        answer.join_thread()  # what its thread has not written yet would be lost
    dist.barrier()
    os._exit(0)


Times = list[tuple[float, float]]
"""Of each step: seconds that went by, and seconds of CPU of the loop's own thread."""


def interleaved(kinds: list[Callable[[], None]], steps: int, turn: int) -> list[Times]:
    """Each kind's `steps` steps, in turns; the first step of a turn is left out."""
    found: list[Times] = [[] for _ in kinds]
    while len(found[-1]) < steps:
        for step, times in zip(kinds, found, strict=True):
            dist.barrier()
            step()
            for _ in range(turn):
                began, cpu = time.perf_counter(), time.thread_time()
                step()
                times.append((time.perf_counter() - began, time.thread_time() - cpu))
    return found


def measure(task: Task, workers: int, steps: int, turn: int) -> list[Times]:
    """Rank 0's times of: an elastic step, a DDP step, a step without any reduction."""
    answer = context.Queue()
    with tempfile.TemporaryDirectory() as directory, Bench(Path(directory), task) as bench:
        names = [f"w{i}" for i in range(workers)]
        bench.target(*names)
        bench.start(*names, body=worker, arguments=(steps, turn, answer))
        found: list[Times] = answer.get(timeout=1200)
    return found


def agreement_part(task: Task, steps: int) -> float:
    """What finding workers that differ costs, as a part of a step without any reduction, in CPU time of one thread."""
    torch.set_num_threads(1)
    model, optimizer = build(task)
    agreement = Agreement(list(model.named_parameters()), [optimizer])
    section, x = torch.zeros(agreement.size), torch.randn(task.global_batch, task.width)
    compared, trained = [], []
    for step in range(steps * FULL_TURN):
        began = time.thread_time()
        marks = agreement.marks()
        agreement.fill(section, step, leader=True)
        agreement.check(marks, section, step, 1)
        compared.append(time.thread_time() - began)
        if step % FULL_TURN == 0:
            began = time.thread_time()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            trained.append(time.thread_time() - began)
    return statistics.mean(compared) / statistics.median(trained)


def median(times: Times, column: int) -> float:
    """Of one of the two columns."""
    return statistics.median(row[column] for row in times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mparams", type=float, default=26)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turn", type=int, default=5)
    parser.add_argument("--tiny-steps", type=int, default=1000, help="of the model of 16 parameters")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, gloo, {options.mparams:g} M parameters, AdamW")
    elastic, ddp, _ = measure(Task(mparams=options.mparams), options.workers, options.steps, options.turn)
    print(f"ratio {median(elastic, 0) / median(ddp, 0):.4f} at load {os.getloadavg()[0]:.1f}", flush=True)
    tiny = measure(Task(mparams=0.001), options.workers, options.tiny_steps, 50)
    tiny_elastic, tiny_ddp, tiny_local = tiny
    result = {
        "ratio": round(median(elastic, 0) / median(ddp, 0), 4),
        "step_ms": round(median(elastic, 0) * 1e3, 2),
        "ddp_step_ms": round(median(ddp, 0) * 1e3, 2),
        "python_us_per_step": round((median(tiny_elastic, 1) - median(tiny_local, 1)) * 1e6, 1),
        "ddp_us_per_step": round((median(tiny_ddp, 1) - median(tiny_local, 1)) * 1e6, 1),
        "beyond_ddp_us_per_step": round((median(tiny_elastic, 1) - median(tiny_ddp, 1)) * 1e6, 1),
        "agreement_percent": round(agreement_part(Task(mparams=options.mparams), 5) * 100, 3),
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
