"""The job as a training script sees it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.batches import micro_batches, shard_batches
from elastic_runtime.errors import LoopError, UsageError
from elastic_runtime.guards import guard_class, guard_method
from elastic_runtime.loader import ElasticLoader
from elastic_runtime.member import Member
from elastic_runtime.modes import numerics
from elastic_runtime.session import Session
from elastic_runtime.state import Stateful, TrainingState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import DataLoader

    from elastic_runtime.environment import Environment
    from elastic_runtime.loader import Plan
    from elastic_runtime.options import Options


class Job:
    """One elastic training job, as this worker takes part in it. Made by `elastic_runtime.init`."""

    def __init__(
        self,
        environment: Environment,
        options: Options,
    ) -> None:
        self._options = options
        self._member = Member(
            environment,
            options.seed,
            checkpoint_every_s=options.checkpoint_every_s,
            keep_checkpoints=options.keep_checkpoints,
        )
        self._session: Session | None = None

    @property
    def rank(self) -> int:
        """This worker's rank now; it may change at each step. LoopError before the loop begins."""
        return self._member.place[0]

    @property
    def world_size(self) -> int:
        """How many workers train now. LoopError before the loop begins."""
        return self._member.place[1]

    @property
    def is_leader(self) -> bool:
        """Whether this worker is rank 0: the one to print and to save."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """Global steps applied so far, over all epochs and all sizes."""
        return self._prepared.position.step

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        scheduler: Stateful | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> tuple[Any, ...]:
        """Make the objects elastic, and return them in the same order: (model, optimizer, loader[, scheduler]).

        Model, optimizer and scheduler are returned as they are, the optimizer's and scheduler's methods guarded; the
        loader is a new one over the same dataset. A `scaler` is given the loss by `backward` itself. UsageError where
        one of them cannot be used.
        """
        if self._session is not None:
            raise LoopError("prepare was called twice; make one job for each training")
        if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError("prepare takes (model, optimizer, loader[, scheduler]), in this order")
        given: dict[str, Stateful | None] = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        parts = [(name, part) for name, part in given.items() if part is not None]
        options = self._options
        batch = options.global_batch_size or getattr(loader, "batch_size", None) or 1
        options.check(batch)
        state = TrainingState(model, parts, reduction=options.reduction_text)
        session = Session(state, self._member, scaler, options.seed if options.exact else None)
        guard_method(optimizer, "step", session.may_act)
        for part in (scheduler, scaler):
            if part is not None:
                guard_class(part, ("step", "update", "unscale_"), session.may_act)
        if options.exact:
            state.numerics = numerics()
            plan: Plan = partial(shard_batches, shards=options.shards)
        else:
            plan = partial(micro_batches, max_batch=options.max_batch_per_gpu)
        elastic_loader = ElasticLoader(loader, session, options.seed, batch, plan, seeded=options.exact)
        session.steps_in_epoch = elastic_loader.steps
        self._session = session
        found = (model, optimizer, elastic_loader)
        return found if scheduler is None else (*found, scheduler)

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs from where the training stands up to `count`; a joiner begins in the middle of one."""
        session = self._prepared
        session.start(count)
        while session.position.epoch < count:
            epoch = session.position.epoch
            yield epoch
            session.leave_epoch(epoch)
        session.finish()

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate this micro-batch's share of the global batch, in place of `loss.backward()`.

        `loss` is the mean over the micro-batch, a scalar. After the last micro-batch of a step the gradients are those
        of the whole global batch; or the step is going to be repeated, and they are None. LoopError where it is not
        called exactly once in an iteration.
        """
        self._prepared.backward(loss)

    def report(self, **metrics: float) -> None:
        """Figures of the script's own (loss, accuracy): to the report file, and with the next progress."""
        self._member.reporter.metrics(self.step, {name: float(value) for name, value in metrics.items()})

    @property
    def _prepared(self) -> Session:
        if self._session is None:
            raise LoopError("job.prepare(model, optimizer, loader) comes before this")
        return self._session
