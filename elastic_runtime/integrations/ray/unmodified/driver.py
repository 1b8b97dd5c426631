"""The job behind a loop of TorchTrainer: begun with its first training batch, ended with its function.

Invariant: iteration e of the loop over the training loader is epoch e of the job, counted from the epoch in which the
loop begins. A loop begins at its first epoch, also in a worker that joins in epoch e. It then runs the epochs before e
again, each with one batch, in which nothing acts and nothing is reported: so counters, schedules and lists of the loop
are filled as on the other workers. In epoch e it has the state of the others, whatever it did to its own before.

Rejected: replacing `range` in the loop's module, so that it begins with epoch e. It is called for much else, and
`while` loops, or epochs counted from a checkpoint, have none. Rejected: the loop's local variables as a part of the
state. They hold anything.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
import torch.distributed as dist

import elastic_runtime
from elastic_runtime.errors import UsageError
from elastic_runtime.membership.torchrun import init_alone
from elastic_runtime.torch_internals import make_default

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.utils.data import DataLoader

    from elastic_runtime.integrations.ray.unmodified.loaders import TrainingSource
    from elastic_runtime.loop.job import Job

PREPARE = (
    "model = ray.train.torch.prepare_model(model) and loader = ray.train.torch.prepare_data_loader(loader), or use "
    "job = elastic_runtime.init()"
)
SEE = "see docs/guides/ray_train.md"


@dataclass(frozen=True)
class LoopOptions:
    """`global_batch_size`: samples of a step at every size; None: each worker has the loader's batch_size, as in Ray.

    `least`: the least number of workers.
    """

    global_batch_size: int | None = None
    least: int = 1

    def of_job(self) -> dict[str, Any]:
        """Return the options of `elastic_runtime.init`."""
        if self.global_batch_size is not None:
            return {"global_batch_size": self.global_batch_size}
        return {"scale_batch": (1, sys.maxsize), "scale_lr": "none"}

    def kept(self, batch: int) -> int:
        """Return the samples of a step of a library that counts its steps before it trains: `batch` is a worker's."""
        return self.global_batch_size or batch * self.least


class Others(Protocol):
    """Where a worker asks what the others are doing."""

    def epoch(self) -> int:
        """Return the epoch that they train, as far as is known: 0 before."""

    def note_epoch(self, epoch: int) -> None:
        """Note that they train this epoch from now on. Does not wait."""

    def agreed_batch(self, size: int) -> int:
        """Return the first worker's batch size: a loop may divide by the number of workers, which has changed since."""


class LoopDriver:
    """One worker's loop. `models` are those that it has prepared.

    `restarts`: each attempt begins at the newest checkpoint of `ray.train.report`, so the job must not be further. Else
    the loop begins at the same one each time, and the job resumes at a checkpoint of its own.
    """

    restarts = False

    def __init__(self, options: LoopOptions, others: Others) -> None:
        self.options, self._others = options, others
        self.models: list[torch.nn.Module] = []
        self.job: Job | None = None
        self.replaying = False  # epochs that the other workers have trained
        self._source: TrainingSource | None = None
        self._batches: Any = None
        self._epochs: Iterator[int] = iter(())
        self._epoch = -1  # of the job
        self._first = self._begun = 0  # the job's epoch in which the loop begins, and epochs of the loop since
        self._iterating = self._within = False  # in a batch of the training loader; in job.backward
        self._stepped, self._notes_steps = True, False  # in this batch; whether that is noted at all
        self._alone: Any = None  # the process groups: of this process, and of all workers
        self._members: Any = None

    # Process groups

    def begin_alone(self) -> None:
        """Give torch a default process group of this process, for collectives before the loop and at size 1."""
        if not dist.is_initialized():
            init_alone("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        self._alone = dist.group.WORLD

    def follow(self, job: Job) -> None:
        """Let the default process group be one of this process again where the job has one worker."""

        def resized(_line: dict[str, Any]) -> None:
            if job.world_size == 1:
                make_default(self._alone)

        job.on_resize(resized)

    # Batches

    @property
    def trains(self) -> bool:
        """Whether the loop is about to train: a prepared model is in training mode, with gradients."""
        return torch.is_grad_enabled() and any(model.training for model in self.models) and not self._iterating

    def epoch(self, source: TrainingSource) -> Iterator[Any]:
        """Yield this worker's batches of the loop's next epoch. UsageError for a second training loader."""
        source = self._prepare(source)
        number, self._begun = self._first + self._begun, self._begun + 1
        joined = self._epoch >= 0
        if joined or number >= self._others.epoch():
            self._enter(number, source)
            self._replay(replaying=number < self._epoch)
        else:
            self._replay(replaying=True)  # before the others have to wait for it
        if self.replaying:
            batch = source.sample()
            yield self._batches.sample() if batch is None else batch
            return
        for batch in self._batches:
            self._iterating, self._stepped = True, not self._notes_steps
            try:
                yield batch
            finally:
                self._iterating = False
            self._check_stepped()

    def _enter(self, number: int, source: TrainingSource) -> None:
        """Enter the job's next epoch, unless that is ahead of the loop's; the first time, join the other workers."""
        assert self.job is not None
        if number <= self._epoch:
            return
        self._epoch = next(self._epochs)
        self._members = dist.group.WORLD
        source.begin()
        if self.job.is_leader:
            self._others.note_epoch(self._epoch)

    def _replay(self, *, replaying: bool) -> None:
        """Let nothing act, and no collective reach the other workers, until the loop is where they are."""
        assert self.job is not None
        self.job.act(not replaying)
        if replaying:
            make_default(self._alone)
        elif self.replaying:
            make_default(self._members)
            self._set_gradients(None)
        self.replaying = replaying

    def _note_steps_of(self, actor: Any) -> None:
        """Note each call of `step` of an optimizer, or of a scaler, which calls an optimizer's where it acts."""
        step = actor.step

        @functools.wraps(step)
        def noted(_self: object, *args: Any, **options: Any) -> Any:
            if not self._iterating and not self.replaying:
                self.refuse_step(type(actor).__name__)
            self._stepped = True
            return step(*args, **options)

        actor.step = types.MethodType(noted, actor)

    def _check_stepped(self) -> None:
        """UsageError for a batch whose gradients the loop keeps for its next batches."""
        if self._stepped or self.job is None:
            return
        gradients = (parameter.grad for model in self.models for parameter in model.parameters())
        if not self.job.applied or any(gradient is not None and bool(gradient.any()) for gradient in gradients):
            refuse_accumulation("a batch ended without optimizer.step()")

    def _prepare(self, source: TrainingSource) -> TrainingSource:
        """Return the loader of the first epoch, which the job reads; a loop may make an equal one in each epoch."""
        if self._source is not None:
            if not source.same_as(self._source):
                raise UsageError(
                    f"the loop trains with a second loader ({source}), and the first one is {self._source}; a job has "
                    f"one training loader: make it before the loop over the epochs ({SEE})"
                )
            return self._source
        self._source = source
        self.job, self._batches = source.make_job()
        self.follow(self.job)
        self._first = self.job.position.epoch  # above 0 after accelerator.load_state
        self._epochs = self.job.epochs(None)  # how many there are is the loop's to know
        return source

    def before_job(self) -> None:
        """A job is about to be made, whose epochs are counted here."""
        if self.restarts:
            os.environ["ELASTIC_CHECKPOINT_DIR"] = ""

    def make_job(self, batch_size: int, loader_of: Callable[[int], DataLoader[Any]]) -> tuple[Job, Any]:
        """Make a job of what the loop has made, and of its loader of a batch size; return it, and the batches."""
        options, size = self.options, self._others.agreed_batch(batch_size)
        optimizers, scaler = _optimizers_of(self.models), _scaler()
        self.before_job()
        job = elastic_runtime.init(**options.of_job(), progress=False)
        if options.global_batch_size is not None:
            job.settle_batch(global_batch_size=options.global_batch_size, max_batch_per_gpu=size)
        _, _, batches = job.prepare(self.models, optimizers, loader_of(size), scaler=scaler)
        self._notes_steps = True
        for each in (*optimizers, *([scaler] if scaler is not None else [])):
            self._note_steps_of(each)
        if scaler is not None:
            self._leave_scaling_to_the_job(scaler)
        return job, batches

    def _leave_scaling_to_the_job(self, scaler: Any) -> None:
        scale = scaler.scale
        scaler.scale = lambda outputs: scale(outputs) if self._within else outputs

    # What the loop calls

    def backward(self, loss: torch.Tensor, **options: Any) -> bool:
        """Run `loss.backward()` as a part of the step; False where it is not one, and torch's own is to run."""
        if self._within:
            return False
        if self.replaying:
            self._set_gradients(torch.zeros_like)
            return True
        if self._iterating:
            assert self.job is not None
            self._within = True
            try:
                self.job.backward(loss, **options)
            finally:
                self._within = False
            return True
        if self.trains:
            raise UsageError(
                "loss.backward() outside of a loop over a prepared loader: each worker would train alone; write: "
                f"loader = ray.train.torch.prepare_data_loader(loader), or give it a DistributedSampler ({SEE})"
            )
        return False

    def refuse_step(self, kind: str) -> NoReturn:
        """UsageError for a step that no other worker would take part in; `kind` is the optimizer's class."""
        change = PREPARE
        if self.models and not any(model.training for model in self.models):
            change = (
                "model.train() before the loop over the training loader; no prepared model is in training mode, so its "
                "batches are those of an evaluation"
            )
        raise UsageError(
            f"{kind}.step() outside of a training batch: each worker would train alone; write: {change} ({SEE})"
        )

    def finish(self) -> None:
        """The training function has returned: end the training, together with the other workers."""
        if self.replaying:
            raise UsageError(
                f"the loop of a worker that joined in epoch {self._epoch} has ended in epoch "
                f"{self._first + self._begun - 1}, which the others have trained and it only ran through; decide on "
                f"the end by the number of the epoch, or use job.epochs of elastic_runtime and job.track ({SEE})"
            )
        if self._source is not None and self.job is not None and not self.job.leaving:
            self.job.finish()

    def _set_gradients(self, of: Any) -> None:
        for model in self.models:
            for parameter in model.parameters():
                parameter.grad = of(parameter) if of is not None and parameter.requires_grad else None


def _optimizers_of(models: Sequence[torch.nn.Module]) -> list[torch.optim.Optimizer]:
    """Return the optimizers that have parameters of these, in the order of their first ones. UsageError for none."""
    place = {id(p): number for number, p in enumerate(p for model in models for p in model.parameters())}
    found = []
    for each in gc.get_objects():
        if issubclass(type(each), torch.optim.Optimizer) and hasattr(each, "param_groups"):
            places = [place[id(p)] for group in each.param_groups for p in group["params"] if id(p) in place]
            found += [(min(places), each)] if places else []
    if not found:
        raise UsageError(
            "the loop over the training loader begins, and no optimizer has parameters of the prepared model; write: "
            f"optimizer = torch.optim.SGD(model.parameters(), lr=0.01), before the loop ({SEE})"
        )
    return [each for _, each in sorted(found, key=lambda pair: pair[0])]


def _scaler() -> torch.amp.GradScaler | None:
    """Return the loop's scaler, if it has one. UsageError for several."""
    found = [e for e in gc.get_objects() if issubclass(type(e), torch.amp.GradScaler) and e.is_enabled()]
    if len(found) > 1:
        raise UsageError(f"the loop has {len(found)} enabled GradScalers; use one for all optimizers ({SEE})")
    return found[0] if found else None


def refuse_accumulation(call: str) -> NoReturn:
    """UsageError for gradients that the loop adds up over several batches."""
    raise UsageError(
        f"{call}: gradients are accumulated in the loop, and a worker that joins has none of them; write: "
        "optimizer.step() and optimizer.zero_grad() for each batch, and ElasticTorchTrainer(..., global_batch_size=N) "
        f"for the samples of a step, which accumulates as the number of workers needs it ({SEE})"
    )
