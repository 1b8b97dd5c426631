"""A second loader of the loop that `prepare` was not given: each worker would train the same samples of it again.

It is noticed in the first iterations, alone: a DataLoader's iterator that gives a batch in each of them while the model
trains. One that is read without gradients, or in `eval()`, is an evaluation's.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.data.dataloader import Batches
from elastic_runtime.errors import LoopError
from elastic_runtime.torch_internals.modules import LoaderIterator, index_sampler

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOKS_AT = 6
_IN_A_ROW = 3


class LoaderWatch:
    """Looks at what DataLoaders give, until `LOOKS_AT` iterations are over."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models, self._left, self._iteration = list(models), LOOKS_AT, 0
        self._runs: dict[int, tuple[object, int, int]] = {}  # by iterator: (it, its last iteration, how many in a row)

    def begin(self, samples: int) -> None:  # noqa: ARG002
        """Note that another iteration begins."""
        self._iteration += 1
        if not self._left:
            self.end()
            return
        self._left -= 1
        _watching.add(self)
        _install()

    def backward(self) -> None:
        """Do nothing: what is looked for happens before."""

    def end(self) -> None:
        """Remove the hooks."""
        self._left, self._runs = 0, {}
        _watching.discard(self)

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
_next: Any = LoaderIterator.__next__


def _install() -> None:
    """Replace `__iter__` once per process: replacements per training could not be removed in any order."""
    if LoaderIterator.__next__ is _next:
        LoaderIterator.__next__ = _watched  # type: ignore[method-assign, assignment]


def _watched(iterator: Any) -> Any:
    if _watching and not isinstance(index_sampler(iterator), Batches) and torch.is_grad_enabled():
        for watch in list(_watching):
            watch.note(iterator)
    return _next(iterator)
