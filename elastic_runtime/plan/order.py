"""The order in which the samples of an epoch are trained: a pure function of (seed, epoch, length, shuffle).

Global step k of an epoch is [k * G, (k + 1) * G) of that order whatever the world size, so a resize changes which
worker computes a sample and never which samples a step is made of. The seeds are mixed by SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), so that neighbouring seeds share nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, overload

import torch

_MASK = (1 << 64) - 1
_CHECKSUM_SAMPLES = 1000
_PART = 4096


def mix_seed(*parts: int) -> int:
    """Return one 63-bit seed made of several numbers."""
    state = 0
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class Permutation(Sequence[int]):
    """An order in 8 bytes a sample, where a list takes about 36. A slice is a list."""

    def __init__(self, order: torch.Tensor) -> None:
        self._order = order

    def __len__(self) -> int:
        return self._order.numel()

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = self._order[index]
        return found.tolist() if isinstance(index, slice) else int(found)


class Drawn(Sequence[int]):
    """The order of a RandomSampler of very many samples, drawn in parts on demand: a function of the seed alone.

    With `replacement` each index is drawn independently; else every `data` indices are a permutation.
    """

    def __init__(self, seed: int, data: int, length: int, *, replacement: bool) -> None:
        self._seed, self._data, self._length, self._replacement = seed, data, length, replacement
        self._part = _PART if replacement else data
        self._kept: tuple[int, torch.Tensor] = (-1, torch.empty(0))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self._length))]
        part, place = divmod(index, self._part)
        if self._kept[0] != part:
            generator = torch.Generator().manual_seed(mix_seed(self._seed, part))
            drawn = (
                torch.randint(0, self._data, (self._part,), generator=generator)
                if self._replacement
                else torch.randperm(self._data, generator=generator)
            )
            self._kept = (part, drawn)
        return int(self._kept[1][place])


def epoch_order(seed: int, epoch: int, length: int, *, shuffle: bool) -> Sequence[int]:
    """Return the dataset's indices in the order of this epoch."""
    if not shuffle:
        return range(length)
    generator = torch.Generator().manual_seed(mix_seed(seed, epoch))
    return Permutation(torch.randperm(length, generator=generator))


def order_checksum(order: Sequence[Any]) -> int:
    """Return a checksum of an order, computed from about a thousand of its elements."""
    sampled = list(order[:: len(order) // _CHECKSUM_SAMPLES + 1])
    return zlib.crc32(f"{len(order)} {sampled}".encode())


def steps_in_epoch(length: int, global_batch: int, *, drop_last: bool) -> int:
    """Return the number of global steps of one epoch; the last one is smaller unless it is dropped."""
    return length // global_batch if drop_last else -(-length // global_batch)
