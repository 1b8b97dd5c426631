"""Dropout and the statistics of batches, switched off while two sizes are compared.

Both make a gradient depend on the number of workers in any script, right or wrong. Without them, what still depends on
it is the script's: a mean over tokens, weights of classes, a balance of experts.

`model.eval()` is not used for this: models return other things then, as detectors and Hugging Face's do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def uses_batch_statistics(module: torch.nn.Module) -> bool:
    """Whether it normalizes with the mean and variance of the samples that one worker has."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


class SwitchedOff:
    """The layers of `models`. A loop may call `model.train()` in each step: they are switched at each forward, too."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        self._before: list[tuple[torch.nn.Module, str, Any]] | None = None
        for model in models:
            model.register_forward_pre_hook(self._before_forward)

    @property
    def off(self) -> bool:
        """Whether they are."""
        return self._before is not None

    def set(self, *, off: bool) -> None:
        """Switch them off, or back to what they were."""
        for module, name, value in reversed(self._before or ()):
            setattr(module, name, value)
        self._before = [] if off else None
        for model in self._models:
            self._before_forward(model)

    def _before_forward(self, model: torch.nn.Module, *_inputs: Any) -> None:
        if self._before is None:
            return
        for module in model.modules():
            for name, value in _to_change(module):
                self._before.append((module, name, getattr(module, name)))
                setattr(module, name, value)


def _to_change(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(attribute, value) of a layer that is not off. Own modules have probabilities of dropout as attributes, too."""
    if isinstance(module, torch.jit.ScriptModule):
        return
    if uses_batch_statistics(module) and module.training:
        yield "training", False
    for name, value in vars(module).items():
        drops = "drop" in name or (name == "p" and isinstance(module, _DropoutNd))
        if drops and isinstance(value, float) and value:
            yield name, 0.0
