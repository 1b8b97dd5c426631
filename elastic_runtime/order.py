"""In which order an epoch's samples are trained: a pure function of (seed, epoch, length, shuffle).

Global step k of an epoch is [k * G, (k + 1) * G) of that order whatever the world size, so a resize changes who
computes a sample and never which samples a step is made of. The seeds are mixed by SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014), so that neighbouring seeds share nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_MASK = (1 << 64) - 1


def mix_seed(*parts: int) -> int:
    """One 63-bit seed out of several numbers."""
    state = 0
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def epoch_order(seed: int, epoch: int, length: int, *, shuffle: bool) -> Sequence[int]:
    """The dataset's indices in the order of this epoch."""
    if not shuffle:
        return range(length)
    generator = torch.Generator().manual_seed(mix_seed(seed, epoch))
    order: list[int] = torch.randperm(length, generator=generator).tolist()
    return order


def steps_in_epoch(length: int, global_batch: int, *, drop_last: bool) -> int:
    """Global steps of one epoch; the last one is smaller unless it is dropped."""
    return length // global_batch if drop_last else -(-length // global_batch)
