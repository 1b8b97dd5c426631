"""The memory layout of tensors that travel or are stored: (dtype, shape), with the strides where they are not the
usual.

Invariant: a tensor arrives with the strides that it was sent with, if its elements fill their memory in some order
(channels_last, a transposed moment); its bytes are those of its memory, in order. A kernel that goes through memory,
and the order in which a reduction adds up, depend on them. Tensors with gaps or overlaps become contiguous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    Description = tuple[torch.dtype, tuple[int, ...]] | tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]


def describe(tensors: Sequence[torch.Tensor]) -> list[Description]:
    """Return the tensors that a receiver must allocate."""
    return [_described(tensor) for tensor in tensors]


def _described(tensor: torch.Tensor) -> Description:
    if tensor.is_contiguous() or not _fills_its_memory(tensor):
        return tensor.dtype, tuple(tensor.shape)
    return tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def allocate(
    description: Description, device: torch.device | str | None = None, *, zeros: bool = False
) -> torch.Tensor:
    """Return a new tensor of this description. RuntimeError for strides that do not fill the memory."""
    dtype, shape, *strides = description
    if not strides:
        return (torch.zeros if zeros else torch.empty)(shape, dtype=dtype, device=device)
    found = torch.empty_strided(shape, strides[0], dtype=dtype, device=device)
    if not _fills_its_memory(found):
        raise RuntimeError(f"a tensor of shape {shape} cannot have the strides {strides[0]}")
    return found.zero_() if zeros else found


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order of their memory, as a view; of a tensor with gaps a copy. Shape: (elements,)."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if _fills_its_memory(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous().view(-1)


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in a row, in whichever order of the dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0


class Copies:
    """Copies of one state's tensors at a time, on `device`; None: on that of each tensor.

    Their memory is kept: fresh memory costs several times what a copy does.
    """

    def __init__(self, device: str | None = "cpu") -> None:
        self._device = device
        self._tensors: list[torch.Tensor] = []

    def make_room(self, tensors: list[Description]) -> None:
        """Allocate memory for a copy of such tensors; writing zeros makes the system provide its pages."""
        self._tensors = [allocate(each, self._device, zeros=True) for each in tensors]

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The copy, valid until the next one is taken."""
        if describe(tensors) != describe(self._tensors):
            pairs = zip(describe(tensors), tensors, strict=True)
            self._tensors = [allocate(each, self._device or tensor.device) for each, tensor in pairs]
        for copy, tensor in zip(self._tensors, tensors, strict=True):
            copy.copy_(tensor)
        return self._tensors
