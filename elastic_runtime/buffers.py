"""A model's buffers: they follow rank 0, inside the gradients' own reduction, and go back when a step is repeated.

Every worker normalises with its own batch statistics and would drift away from the others; DistributedDataParallel
broadcasts the buffers of rank 0 before each forward pass. Here rank 0 adds its values to the tail of the last bucket
and everybody else adds zeros: the sum is rank 0's, and no collective is added. Whole numbers (num_batches_tracked) and
double precision travel as three floats of 22 bits each, which is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_NUMEL = 1 << 20
"""Larger models of buffers (tables, caches) are constants in practice: only normalisation layers' buffers follow."""
_BITS = 22
_LOW = (1 << _BITS) - 1
_PARTS = ((2 * _BITS, -1), (_BITS, _LOW), (0, _LOW))
"""(shift, mask) of each part of a 64-bit number; the first has its sign."""


class FollowedBuffers:
    """The buffers of `modules` that follow rank 0, and the values of all of them at a step's beginning."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        modules = list(modules)
        every = [b for module in modules for b in module.buffers() if b.numel()]
        if sum(b.numel() for b in every) > MAX_NUMEL:
            every = [
                b
                for module in modules
                for part in module.modules()
                if isinstance(part, torch.nn.modules.batchnorm._NormBase)  # noqa: SLF001
                for b in part.buffers(recurse=False)
            ]
        self._floats = [b for b in every if b.dtype in {torch.float16, torch.bfloat16, torch.float32}]
        self._wide = [b for b in every if b.dtype in {torch.int32, torch.int64, torch.float64}]
        self._kept: list[torch.Tensor] = []
        self._saved = [b.detach().clone() for b in self._floats + self._wide]
        self.size = sum(b.numel() for b in self._floats) + 3 * sum(b.numel() for b in self._wide)

    def save(self) -> None:
        """Remember the values: a step begins."""
        for saved, buffer in zip(self._saved, self._floats + self._wide, strict=True):
            saved.copy_(buffer.detach())

    def restore(self) -> None:
        """Go back to the values remembered: the step is repeated."""
        for saved, buffer in zip(self._saved, self._floats + self._wide, strict=True):
            buffer.detach().copy_(saved)

    def rewound(self, model: dict[str, Any]) -> dict[str, Any]:
        """A model's `state_dict`, with the values that its buffers had at the step's beginning."""
        pairs = zip(self._floats + self._wide, self._saved, strict=True)
        saved = {buffer.data_ptr(): value for buffer, value in pairs}
        return {
            name: saved.get(value.data_ptr(), value) if isinstance(value, torch.Tensor) else value
            for name, value in model.items()
        }

    def keep(self) -> None:
        """Remember the values apart from those of the step's beginning."""
        self._kept = [b.detach().clone() for b in self._floats + self._wide]

    def restore_kept(self) -> None:
        """Go back to the values of `keep`."""
        for kept, buffer in zip(self._kept, self._floats + self._wide, strict=True):
            buffer.detach().copy_(kept)

    def fill(self, section: torch.Tensor, *, leader: bool) -> None:
        """Put the leader's values, or zeros, into `section`, of shape (size,)."""
        if not self.size:
            return
        if not leader:
            section.fill_(-0.0)  # which changes no number it is added to
            return
        parts = [b.detach().reshape(-1).to(section.dtype) for b in self._floats]
        for b in self._wide:
            bits = _bits(b).reshape(-1)
            parts += [(bits >> shift & mask).to(section.dtype) for shift, mask in _PARTS]
        torch.cat(parts, out=section)

    def take(self, section: torch.Tensor) -> None:
        """Take over the values in `section`."""
        at = 0
        for b in self._floats:
            b.detach().copy_(section[at : at + b.numel()].view_as(b))
            at += b.numel()
        for b in self._wide:
            high, middle, low = section[at : at + 3 * b.numel()].view(3, -1).to(torch.int64)
            bits = high << 2 * _BITS | middle << _BITS | low
            value = bits.view(torch.float64) if b.dtype == torch.float64 else bits
            b.detach().copy_(value.view_as(b))
            at += 3 * b.numel()


def _bits(buffer: torch.Tensor) -> torch.Tensor:
    """As 64-bit whole numbers."""
    value = buffer.detach()
    return value.view(torch.int64) if value.dtype == torch.float64 else value.to(torch.int64)
