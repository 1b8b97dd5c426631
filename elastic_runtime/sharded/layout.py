"""Which rank holds which part of a tensor, and what must move when the number of ranks changes. Pure.

FSDP cuts a tensor as `torch.chunk` does: equal parts of ceil(size / ranks), of which the last ones may be short or
empty. Between two such layouts each rank's new part overlaps a few old ones: only that is sent. Tensors move in batches
of bounded size, cut along the sharded dimension, so no rank holds more than one batch beside its shards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

BATCH_BYTES = 32 << 20
"""The bytes of a batch over all ranks together; a rank holds less than this in its buffers."""

Range = tuple[int, int]


@dataclass(frozen=True)
class Sharded:
    """A tensor of this global `shape`, sharded along `dim`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int

    @property
    def size(self) -> int:
        """Along the sharded dimension."""
        return self.shape[self.dim]

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one element along the sharded dimension."""
        return math.prod(self.shape) // max(self.size, 1) * self.dtype.itemsize

    def part(self, rank: int, ranks: int) -> Range:
        """[start, stop) of this rank along the sharded dimension."""
        return part_of(self.size, rank, ranks)

    def local_shape(self, span: Range) -> tuple[int, ...]:
        """Return the shape of a range along the sharded dimension."""
        return (*self.shape[: self.dim], span[1] - span[0], *self.shape[self.dim + 1 :])


@dataclass(frozen=True)
class Cut:
    """A range along the sharded dimension of tensor number `index`."""

    index: int
    start: int
    stop: int

    def within(self, *others: Range) -> Range | None:
        """Return the intersection with all of them."""
        start = max(self.start, *(other[0] for other in others))
        stop = min(self.stop, *(other[1] for other in others))
        return (start, stop) if start < stop else None


def part_of(size: int, rank: int, ranks: int) -> Range:
    """[start, stop) of `rank` among `ranks`."""
    each = -(-size // ranks)
    return min(rank * each, size), min((rank + 1) * each, size)


def batches(tensors: Sequence[Sharded], limit: int = BATCH_BYTES) -> Iterator[list[Cut]]:
    """All of all tensors, in order, in batches of at most `limit` bytes (or one row, where that is more)."""
    batch: list[Cut] = []
    space = limit
    for cut in _cuts(tensors, limit):
        size = (cut.stop - cut.start) * tensors[cut.index].row_bytes
        if batch and size > space:
            yield batch
            batch, space = [], limit
        batch.append(cut)
        space -= size
    if batch:
        yield batch


def _cuts(tensors: Sequence[Sharded], limit: int) -> Iterator[Cut]:
    for index, tensor in enumerate(tensors):
        rows = max(1, limit // max(tensor.row_bytes, 1))
        for start in range(0, tensor.size, rows):
            yield Cut(index, start, min(start + rows, tensor.size))


def providers(old_size: int, held: Sequence[int]) -> list[list[int]]:
    """Return which of `old_size` parts each new rank provides; `held[r]`: the one that new rank r has, -1: none.

    Parts that only leaving workers have are forwarded by the ranks that stay, in turn.
    """
    found = [[old] if old >= 0 else [] for old in held]
    stayers = [rank for rank, old in enumerate(held) if old >= 0]
    missing = [old for old in range(old_size) if old not in set(held)]
    for number, old in enumerate(missing):
        found[stayers[number % len(stayers)]].append(old)
    return found
