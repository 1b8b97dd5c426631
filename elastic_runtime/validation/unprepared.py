"""What a script has made and did not give to `prepare`: a second loader of the loop, schedulers.

Of a second loader each worker would train the same samples again. It is noticed in the first iterations, alone: a
DataLoader's iterator that gives a batch in each of them while the model trains. One that is read without gradients, or
in `eval()`, is an evaluation's.

A scheduler acts in every iteration, and its state reaches no joiner and no checkpoint: a joiner's learning rate starts
again. A scheduler marks its optimizer's `step`, so where none was made nothing is looked for; otherwise the garbage
collector's list of all objects is read once, when the loop begins.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from elastic_runtime.data.dataloader import Batches
from elastic_runtime.errors import LoopError, UsageError
from elastic_runtime.process.replacement import Replacement
from elastic_runtime.torch_internals.modules import (
    LoaderIterator,
    index_sampler,
    inner_schedulers,
    was_given_to_a_scheduler,
)
from elastic_runtime.validation.loop_watch import LoopWatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def find_schedulers(
    optimizers: Sequence[torch.optim.Optimizer], prepared: Iterable[object]
) -> list[tuple[int, LRScheduler]]:
    """Return (the optimizer's index, scheduler) for each optimizer that has one which is not among `prepared`.

    UsageError if one has several: they could not be identified on other workers.
    """
    if not any(was_given_to_a_scheduler(optimizer) for optimizer in optimizers):
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
    parts = [*inner_schedulers(scheduler), getattr(scheduler, "scheduler", None)]
    return [scheduler, *(inner for part in parts if part is not None for inner in _with_parts(part))]


LOOKS_AT = 6
_IN_A_ROW = 3


class LoaderWatch(LoopWatch):
    """Looks at what DataLoaders give, until `LOOKS_AT` iterations are over."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models, self._left, self._iteration = list(models), LOOKS_AT, 0
        self._runs: dict[int, tuple[object, int, int]] = {}  # by iterator: (it, its last iteration, how many in a row)

    def before_iteration(self, samples: int) -> None:  # noqa: ARG002
        """Note that another iteration begins."""
        self._iteration += 1
        if not self._left:
            self.end()
            return
        self._left -= 1
        _watching.add(self)
        _next.begin()

    def end(self) -> None:
        """Remove the hooks."""
        self._left, self._runs = 0, {}
        _watching.discard(self)
        if not _watching:
            _next.end()

    def note(self, iterator: Any) -> None:
        """A DataLoader's iterator is asked for a batch. LoopError in the third iteration of a training in a row."""
        if not any(model.training for model in self._models):
            return
        _, last, run = self._runs.get(id(iterator), (iterator, -1, 0))
        if last != self._iteration:
            run = run + 1 if last == self._iteration - 1 else 1
            self._runs[id(iterator)] = (iterator, self._iteration, run)
        if run >= _IN_A_ROW:
            self.end()
            raise LoopError(
                "a DataLoader that prepare was not given gave one batch in each of several iterations: every worker "
                "would train the same samples of it; give prepare all loaders of the loop, the first one's batches "
                "making the steps: model, optimizer, [first, second] = job.prepare(model, optimizer, [first, second])"
            )


_watching: weakref.WeakSet[LoaderWatch] = weakref.WeakSet()


def _watched(original: Any) -> Any:
    def __next__(self: Any) -> Any:  # noqa: N807
        if _watching and not isinstance(index_sampler(self), Batches) and torch.is_grad_enabled():
            for watch in list(_watching):
                watch.note(self)
        return original(self)

    return __next__


_next = Replacement(LoaderIterator, "__next__", _watched)
