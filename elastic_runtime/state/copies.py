"""A copy of a state's tensors, in memory of its own that is kept: fresh memory costs several times what a copy does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_runtime.state.layouts import allocate, describe

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from elastic_runtime.state.layouts import Description


class Copies:
    """Copies of one state at a time, on `device`; None: on that of each tensor."""

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
