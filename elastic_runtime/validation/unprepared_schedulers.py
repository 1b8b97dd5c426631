"""Schedulers that a script made for the job's optimizers and did not give to `prepare`.

Such a one acts in every iteration, and its state reaches no joiner and no checkpoint: a joiner's learning rate begins
anew. A scheduler marks its optimizer's `step`, so where none was made nothing is looked for; otherwise the garbage
collector's list of all objects is read once, when the loop begins.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from elastic_runtime.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch


def find_schedulers(
    optimizers: Sequence[torch.optim.Optimizer], prepared: Iterable[object]
) -> list[tuple[int, LRScheduler]]:
    """Return (the optimizer's index, scheduler) for each optimizer that has one which is not among `prepared`.

    UsageError if one has several: they could not be identified on other workers.
    """
    if not any(hasattr(optimizer.step, "_wrapped_by_lr_sched") for optimizer in optimizers):
        return []
    tracked = {id(part) for each in prepared for part in _with_parts(each)}
    found = [each for each in _schedulers() if id(each) not in tracked]
    inner = {id(part) for each in found for part in _with_parts(each)[1:]}
    outer = [each for each in found if id(each) not in inner]
    of_optimizer = [[each for each in outer if each.optimizer is optimizer] for optimizer in optimizers]
    for optimizer, schedulers in zip(optimizers, of_optimizer, strict=True):
        if len(schedulers) > 1:
            names = " and ".join(sorted(type(each).__name__ for each in schedulers))
            raise UsageError(
                f"{names} change the learning rate of one {type(optimizer).__name__} and were not given to prepare: "
                "their state would reach no joiner and no checkpoint; give it all of them, in order: prepare(model, "
                "optimizer, loader, [first, second])"
            )
    return [(index, each) for index, schedulers in enumerate(of_optimizer) for each in schedulers]


def _schedulers() -> list[LRScheduler]:
    """All that there are. By type and not by isinstance, which asks proxies for their class."""
    return [each for each in gc.get_objects() if issubclass(type(each), LRScheduler) and hasattr(each, "optimizer")]


def _with_parts(scheduler: Any) -> list[Any]:
    """A scheduler, and those that it is made of: of a sequence, of a wrapper."""
    parts = [*getattr(scheduler, "_schedulers", ()), getattr(scheduler, "scheduler", None)]
    return [scheduler, *(inner for part in parts if part is not None for inner in _with_parts(part))]
