"""A second loader of the loop that `prepare` was not given: each worker would train the same samples of it again.

It is noticed in the first iterations, alone: a DataLoader's iterator that gives a batch in each of them while the model
trains. One that is read without gradients, or in `eval()`, is an evaluation's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from elastic_runtime.errors import LoopError
from elastic_runtime.inner import Batches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOOKS_AT = 6
_IN_A_ROW = 3


class LoaderWatch:
    """Looks at what DataLoaders give, until `LOOKS_AT` iterations are over."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models, self._left, self._iteration = list(models), LOOKS_AT, 0
        self._runs: dict[int, tuple[object, int, int]] = {}  # by iterator: (it, its last iteration, how many in a row)
        self._original: Callable[[Any], Any] | None = None

    def begin(self, samples: int) -> None:  # noqa: ARG002
        """Another iteration begins."""
        self._iteration += 1
        if not self._left:
            self.end()
            return
        self._left -= 1
        if self._original is None:
            self._install()

    def end(self) -> None:
        """Look no more."""
        if self._original is not None:
            _BaseDataLoaderIter.__next__ = self._original  # type: ignore[method-assign, assignment]
        self._original, self._left, self._runs = None, 0, {}

    def _install(self) -> None:
        original = self._original = _BaseDataLoaderIter.__next__

        def watched(iterator: Any) -> Any:
            self._note(iterator)
            return original(iterator)

        _BaseDataLoaderIter.__next__ = watched  # type: ignore[method-assign, assignment]

    def _note(self, iterator: Any) -> None:
        if isinstance(iterator._index_sampler, Batches) or not torch.is_grad_enabled():  # noqa: SLF001
            return
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
