"""Further loaders of a loop (unlabelled samples, a second domain), shared out by the first one's plan.

Sample t of the first loader, counted over all epochs, has the samples from t * B / G to (t + 1) * B / G of the second
one, whose epochs follow each other without an end; B and G are their samples of a step. So which samples a step has is
a function of the position alone, at every size, and each worker's share of them is that of the first loader's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from elastic_runtime.data.dataloader import Batches, like
from elastic_runtime.data.sources import SeededDataset, SeededIndices, Source
from elastic_runtime.errors import LoopError, UsageError
from elastic_runtime.plan.order import mix_seed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.utils.data import DataLoader

    from elastic_runtime.plan.batch_sizes import GlobalBatch
    from elastic_runtime.plan.batches import MicroBatch


class SecondLoader:
    """Gives one batch in each iteration over the first loader, and never ends by itself."""

    def __init__(self, loader: DataLoader[Any], number: int, seed: int, per_first: tuple[int, int]) -> None:
        """A loader that follows the first one. `per_first`: (B, G)."""
        if isinstance(loader.dataset, IterableDataset):
            raise UsageError(
                f"loader number {number + 1} reads an IterableDataset, which cannot be shared out beside another "
                "loader; give prepare a map-style dataset, or read both in one dataset"
            )
        self.dataset = loader.dataset
        self._given, self._per_first = loader, per_first
        self._seed = mix_seed(seed, number)
        self._source = Source(loader, self._seed)
        self._orders: dict[int, Sequence[int]] = {}
        self._plan: Batches[Sequence[int]] = Batches()
        self._generator = torch.Generator()
        self._inner = like(loader, SeededDataset(loader.dataset), self._plan, loader.collate_fn, self._generator)
        self._batches: Iterator[Any] | None = None
        self._begun = self._taken = 0

    @property
    def length(self) -> int:
        """Samples of its dataset."""
        return self._source.length

    def __len__(self) -> int:
        """Global steps until each of its samples was used once."""
        return math.ceil(self.length / self._per_first[0])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._given, name)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._next()

    def follow(self, iterations: Iterator[tuple[int, MicroBatch]], checksum: int) -> None:
        """The first loader plans again: `iterations` are (samples before its step, micro-batch)."""
        self._generator.manual_seed(mix_seed(self._seed, checksum))
        self._plan.of_span = (self._indices(before, micro) for before, micro in iterations)
        self._batches, self._begun, self._taken = None, 0, 0

    def advance(self) -> None:
        """The loop has got the next batch of the first loader."""
        self._begun += 1

    def _next(self) -> Any:
        if self._taken >= self._begun:
            raise LoopError(
                "a second loader gives one batch in each iteration over the first one, after the first one's: write "
                "zip(first, second), or call next(iter(second)) once in the loop over the first"
            )
        if self._batches is None:
            self._batches = iter(self._inner)
        batch = None
        while self._taken < self._begun:  # those of iterations that did not ask are left out
            batch = next(self._batches)
            self._taken += 1
        return batch

    def _indices(self, before: int, micro: MicroBatch) -> Sequence[int]:
        per_step, of_first = self._per_first
        first = (before + micro.start) * per_step // of_first
        last = max((before + micro.stop) * per_step // of_first, first + 1)
        found = [self._order(at // self.length)[at % self.length] for at in range(first, last)]
        return SeededIndices(found, mix_seed(self._seed, first, 1))

    def _order(self, epoch: int) -> Sequence[int]:
        if epoch not in self._orders:
            self._orders = {number: order for number, order in self._orders.items() if number == epoch - 1}
            self._orders[epoch] = self._source.epoch(epoch)
        return self._orders[epoch]


def check_seconds(first: DataLoader[Any], batch: GlobalBatch) -> None:
    """Raise UsageError if the first of several loaders cannot determine the others' positions."""
    if isinstance(first.dataset, IterableDataset):
        raise UsageError(
            "the first of several loaders reads an IterableDataset, whose length the others' samples depend on; give a "
            "map-style dataset first"
        )
    if batch.bounds is not None:
        raise UsageError("scale_batch and several loaders exclude each other; leave scale_batch out")
