"""Frozen parameters that the loop changes by hand before the backward pass: a momentum encoder, an averaged teacher.

The step is repeated if a worker is lost in it, and its iterations are more than one where it is cut, so such a change
would be made several times. It is noticed in the first iterations, alone, by a few elements of each parameter. Copies
of other parameters are not meant: they are the same however often they are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from elastic_runtime.errors import LoopError

if TYPE_CHECKING:
    from collections.abc import Iterable

LOOKS_AT = 6
_ELEMENTS = 8


class FrozenParameters:
    """Compares the frozen parameters of `models` at an iteration's beginning and at its first backward pass."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self._parameters = {name: p for model in models for name, p in model.named_parameters()}
        self._left = LOOKS_AT
        self._before: dict[str, list[float]] = {}

    def begin(self, samples: int) -> None:  # noqa: ARG002
        """Another iteration begins."""
        self._before = self._samples(trained=False) if self._left else {}
        self._left = max(0, self._left - 1)

    def backward(self) -> None:
        """A backward pass begins. LoopError if a frozen parameter has changed in this iteration."""
        before, self._before = self._before, {}
        if not before:
            return
        now = self._samples(trained=False)
        changed = [name for name, values in before.items() if now.get(name, values) != values]
        copied = list(self._samples(trained=True).values()) if changed else []
        for name in changed:
            if now[name] not in copied:
                raise LoopError(
                    f"the frozen parameter {name!r} was changed by hand in an iteration before job.backward, and would "
                    "be changed twice in a step that is repeated after the loss of a worker; change it after "
                    "optimizer.step(), under `if job.applied:`"
                )

    def end(self) -> None:
        """Look no more."""
        self._left, self._before = 0, {}

    def _samples(self, *, trained: bool) -> dict[str, list[float]]:
        """A few elements of each parameter that is (not) trained, by name."""
        chosen = [
            (name, parameter.detach().flatten())
            for name, parameter in self._parameters.items()
            if parameter.requires_grad == trained and parameter.is_floating_point() and parameter.numel()
        ]
        if not chosen:
            return {}
        pieces = [flat[:: max(1, flat.numel() // _ELEMENTS)][:_ELEMENTS] for _, flat in chosen]
        whole = torch.cat([piece.to("cpu", torch.float64) for piece in pieces])
        rows = torch.split(whole, [len(piece) for piece in pieces])
        return {name: row.tolist() for (name, _), row in zip(chosen, rows, strict=True)}
