"""What a script does to the objects that it gave to `prepare`: guarded where it would act at another time, and watched
for what would train another model with more workers.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.loop.optimizer_guards import guard_class, guard_method
from elastic_runtime.torch_internals.modules import uncompiled
from elastic_runtime.validation.carried_state import CarriedState
from elastic_runtime.validation.changed_parameters import ChangedParameters, OptimizerAttributes
from elastic_runtime.validation.new_parameters import NewParameters
from elastic_runtime.validation.unprepared import LoaderWatch, find_schedulers

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from elastic_runtime.loop.session import Session
    from elastic_runtime.state.training_state import TrainingState

_log = logging.getLogger("elastic_runtime")
WARMUP = ("dampening",)
"""Of the schedulers of pytorch_warmup: `with warmup.dampening(): scheduler.step()`."""


@dataclass(frozen=True)
class PreparedObjects:
    """The arguments of `prepare`, as lists."""

    models: list[Any]
    optimizers: list[Any]
    schedulers: list[Any]
    scaler: torch.amp.GradScaler | None

    def guard(
        self, session: Session, around: Callable[[torch.optim.Optimizer], AbstractContextManager[None]] | None
    ) -> None:
        """Let them act where a step is complete only. `around`: the context in which an optimizer steps."""
        for number, each in enumerate(self.optimizers):
            within = partial(around, each) if around else None
            draws = nullcontext if _is_of_torch(each) else partial(session.drawing_alike, number)
            guard_method(each, "step", session.may_step, within, session.closure_steps.step, draws)
        for part in self.schedulers:
            guard_class(part, ("step",), session.schedule_steps, WARMUP)
        if self.scaler is not None:
            guard_class(self.scaler, ("update", "unscale_"), session.may_act)
            guard_class(self.scaler, ("step",), session.may_scale)
        session.optimizers = self.optimizers

    def watch(self, session: Session, whole: torch.nn.Module, *, sharded: bool) -> None:
        """Watch the first iterations. `whole`: the models as one."""
        session.watches += [LoaderWatch(self.models), OptimizerAttributes(self.optimizers)]
        if sharded:
            return
        session.structure = NewParameters(whole, self.optimizers)
        if all(each is uncompiled(each) for each in self.models):
            session.watches.append(CarriedState(self.models))
        session.watches.append(ChangedParameters(self.models))


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it draws no random numbers, as none of torch's does."""
    return type(optimizer).__module__.startswith("torch.optim")


def take_schedulers(session: Session, state: TrainingState) -> None:
    """Carry schedulers along that `prepare` was not given; UsageError for several of one optimizer."""
    parts = state.parts
    optimizers = [part for _, part in parts if isinstance(part, torch.optim.Optimizer)]
    for index, scheduler in find_schedulers(optimizers, [part for _, part in parts]):
        parts.append((f"scheduler of optimizer{index + 1}", scheduler))
        session.compare(scheduler)
        guard_class(scheduler, ("step",), session.schedule_steps)
        _log.info("%s was not given to prepare, and is carried along", type(scheduler).__name__)
