"""A small training that writes down what it consumed, and the worker process that runs it."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import elastic_runtime
from elastic_runtime.state.packing import pack
from tests.elastic_runtime.delays import delay_meetings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SAMPLES, FEATURES = 203, 12
HELD_OUT = 37  # samples of an evaluation: divided by no number of workers in the tests
IN_EVALUATION = 1 << 20  # reported by a worker instead of a step


class Points(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    def __init__(self, samples: int, *, noisy: bool = False) -> None:
        self.noisy = noisy
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(samples, FEATURES, generator=generator)
        self.y = torch.randint(0, 3, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        noise = 0.1 * torch.randn(FEATURES) + 0.1 * random.random() if self.noisy else 0.0
        return self.x[index] + noise, self.y[index], index


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """The same points, once an epoch, in an order drawn through a small buffer; it stores its position."""

    def __init__(self, points: Points) -> None:
        self.points = points
        self.at, self.buffer = 0, []  # type: tuple[int, list[int]]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        info = torch.utils.data.get_worker_info()
        share = (info.id, info.num_workers) if info else (0, 1)
        while self.at < len(self.points) or self.buffer:
            if self.at < len(self.points) and len(self.buffer) < 8:
                self.buffer.append(self.at)
                self.at += 1
                continue
            found = self.buffer.pop(random.randrange(len(self.buffer)))
            if found % share[1] == share[0]:
                yield self.points[found]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": list(self.buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.buffer = state["at"], list(state["buffer"])


@dataclass
class Plan:
    """What one test's workers train."""

    epochs: int = 3
    samples: int = SAMPLES
    global_batch: int = 16
    max_batch: int | None = 5
    loader_workers: int = 0
    normalise: bool = False
    mixed: bool = False  # dropout, bfloat16, noise in the dataset and in the loop
    options: dict[str, Any] = field(default_factory=dict)
    delays: int | None = None  # seed of delays.delay_meetings; None: none
    threads: int = 1
    weighting: str = "mean"  # of the loss: mean, sum, tokens
    capacities: tuple[int, ...] = ()  # by worker: for how many samples its backward pass has memory
    loader_batch: int = 4
    streamed: bool = False  # an iterable dataset
    compiled: str = ""  # by which of torch.compile's backends
    evaluates: bool = False  # together with the others, after every third step and each epoch
    body: Callable[..., None] | None = None  # another training than `train`


def build(plan: Plan) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(1)
    norm: list[nn.Module] = [nn.BatchNorm1d(24)] if plan.normalise else []
    norm += [nn.Dropout(0.3)] if plan.mixed else []
    model = nn.Sequential(nn.Linear(FEATURES, 24), *norm, nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)


def digest(*states: dict[str, Any]) -> str:
    """Of every bit of their tensors."""
    found = hashlib.sha256()
    for tensor in pack(list(states))[1]:
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def tokens_of(indices: torch.Tensor) -> torch.Tensor:
    """How many tokens each sample has."""
    return (indices % 7 + 1).float()


def check_capacity(capacity: int, samples: int, _gradient: torch.Tensor) -> None:
    if samples > capacity:
        raise torch.OutOfMemoryError(f"{samples} samples")


class Gate:
    """Shared memory: the step at which all workers stop, and the current step of each worker."""

    def __init__(self, context: Any, workers: int = 12) -> None:
        self.limit = context.RawValue(ctypes.c_long, 1 << 40)
        self.at = context.RawArray(ctypes.c_long, [-1] * workers)

    def pass_through(self, index: int, step: int) -> None:
        self.at[index] = step
        while step >= self.limit.value:
            time.sleep(0.002)


def stay_until_killed(gate: Gate, index: int) -> None:
    """Report that a victim is in an evaluation."""
    gate.at[index] = IN_EVALUATION
    time.sleep(600)


def evaluated(directory: Path, index: int) -> list[dict[str, Any]]:
    """What a worker has written about its evaluations."""
    return [json.loads(row) for row in (directory / f"evaluated-{index}.jsonl").read_text().splitlines()]


def backpropagate(
    job: Any, plan: Plan, index: int, model: nn.Module, x: torch.Tensor, y: torch.Tensor, indices: torch.Tensor
) -> float:
    """The forward and backward pass that the plan asks for; the mean of the losses."""
    if plan.mixed:
        x.add_(torch.randn_like(x), alpha=0.1)
    with torch.autocast("cpu", torch.bfloat16, enabled=plan.mixed):
        output = model(x).float()
        if plan.capacities:
            output.register_hook(partial(check_capacity, plan.capacities[index], len(x)))
        losses = nn.functional.cross_entropy(output, y, reduction="none")
    if plan.weighting == "tokens":
        tokens = tokens_of(indices)
        job.backward((losses * tokens).sum() / tokens.sum(), weight=float(tokens.sum()))
    else:
        job.backward(losses.sum() if plan.weighting == "sum" else losses.mean(), reduction=plan.weighting)
    return float(losses.detach().mean())


class Record:
    """Writes down which samples were computed, and which of them were applied. `more`: what else is of interest."""

    def __init__(
        self,
        job: Any,
        index: int,
        directory: Path,
        optimizer: torch.optim.Optimizer,
        more: Callable[[], dict[str, Any]],
    ) -> None:
        self._job, self._more = job, more
        self._log = (directory / f"consumed-{index}.jsonl").open("a", buffering=1)
        self._consumed: list[int] = []
        optimizer.register_step_post_hook(lambda *_: self._note("applied"))

    def computes(self, indices: torch.Tensor) -> None:
        """The loop begins an iteration over these samples."""
        session = self._job._session
        if session._step.first:
            self._consumed.clear()
        if not session._step.micro.padding:
            self._consumed += indices.tolist()
        if session._step.micro.last:
            self._note("computed")

    def _note(self, what: str) -> None:
        row = {what: self._job.step, "generation": self._job._member.generation, "indices": self._consumed}
        self._log.write(json.dumps({**row, **self._more()}) + "\n")


def evaluate(job: Any) -> None:
    """All workers together see each of so many samples once."""

    def count() -> float:
        mine = range(job.rank, 31, job.world_size)
        return float(job.all_reduce(torch.tensor(float(len(mine)))))

    assert job.repeat(count) == 31


def train(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    torch.set_num_threads(plan.threads)
    job = elastic_runtime.init(global_batch_size=plan.global_batch, max_batch_per_gpu=plan.max_batch, **plan.options)
    model, optimizer, scheduler = build(plan)
    points = Points(plan.samples, noisy=plan.mixed)
    data: Any = Stream(points) if plan.streamed else points
    fork = "fork" if plan.loader_workers else None  # a script's default; a process of a fork server has another one
    loader = DataLoader(
        data,
        batch_size=plan.loader_batch,
        shuffle=not plan.streamed,
        num_workers=plan.loader_workers,
        multiprocessing_context=fork,
    )
    model, optimizer, loader, scheduler = job.prepare(model, optimizer, loader, scheduler)
    record = Record(
        job, index, directory, optimizer, lambda: {"processes": [c.pid for c in multiprocessing.active_children()]}
    )
    for _epoch in job.epochs(plan.epochs):
        for x, y, indices in loader:
            if gate:
                gate.pass_through(index, job.step)
            record.computes(indices)
            backpropagate(job, plan, index, model, x, y, indices)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            if plan.evaluates and job.applied and job.step % 3 == 0:
                evaluate(job)
            scheduler.step()
            if torch.distributed.is_initialized():
                assert torch.distributed.get_rank() == job.rank
                assert torch.distributed.get_world_size() == job.world_size
        if plan.evaluates:
            evaluate(job)
    torch.save(
        {
            "model": model.state_dict(),
            "sha256": digest(model.state_dict(), optimizer.state_dict()),
            "lr": scheduler.get_last_lr(),
            "step": job.step,
            "rank": job.rank,
        },
        directory / f"final-{index}.pt",
    )


def trained_alone(body: Callable[..., None], plan: Plan, directory: Path) -> dict[str, Any]:
    """What one undisturbed worker gets; in this process, and in a directory of its own."""
    directory.mkdir(exist_ok=True)
    threads = torch.get_num_threads()
    body(plan, 0, directory, None)
    torch.set_num_threads(threads)
    result: dict[str, Any] = torch.load(directory / "final-0.pt")
    return result


def worker_main(
    plan: Plan, index: int, directory: str, environment: dict[str, str], gate: Gate, module: str = ""
) -> None:
    """The body of a worker process: its output is written to a file, its exit is that of the script.

    That runs what is registered with `atexit`, which processes of a fork server leave out.
    """
    atexit._clear()  # what the fork server itself has registered
    os.environ.update(environment)
    output = os.open(f"{directory}/log-{index}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1)
    if plan.delays is not None:
        delay_meetings(plan.delays * 100 + index)
    try:
        (plan.body or train)(plan, index, Path(directory), gate)
    except SystemExit:
        raise
    except Exception as error:  # noqa: BLE001  (what a script does not catch ends it)
        traceback.print_exc()
        sys.stderr.flush()
        raise SystemExit(getattr(error, "exit_code", 1)) from None
    finally:
        atexit._run_exitfuncs()
