"""Which parameters have a gradient when a step begins: zeros, as `zero_grad(set_to_none=False)` leaves them.

An optimizer acts on a parameter whose gradient is zero (momentum, weight decay), and leaves one without a gradient
alone. Where some steps do not use a parameter, its zeros are therefore part of the state, by its name.

Invariant: the names are those of the step's beginning from there until the step's sum is complete, though gradients are
taken away and set meanwhile; after it, those of now. A loop that clears its gradients at the beginning of an iteration
has them when a step begins, too: it sets the zeros of a loaded state to None, or leaves them. Where the step before has
shown that it sets all to None, a joiner leaves them out: it would write them while the others wait, and these count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from elastic_runtime.state.sparse_parameters import sparse_parameters, zero_gradient

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class Gradients(Protocol):
    """The gradients of a model's parameters."""

    @property
    def held(self) -> frozenset[str]:
        """The names of the parameters that have a gradient now."""

    @property
    def kept(self) -> frozenset[str]:
        """The names of those that had one before the backward pass of the last step."""


class KeptGradients:
    """The names, and the zeros of a state that is loaded."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._of_step: frozenset[str] | None = None  # from the step's beginning to its sum
        self._begun_with: frozenset[str] = frozenset()
        self.cleared = False  # all by the loop, before the backward pass of the last step

    def begin_step(self) -> None:
        """Note the names: a step begins."""
        self.cleared = bool(self._begun_with) and not self._gradients.kept
        self._of_step = self._begun_with = self._gradients.held

    def end_step(self) -> None:
        """Note that the step's sum is complete."""
        self._of_step = None

    def names(self) -> list[str]:
        """Return the names that belong to the state."""
        return sorted(self._gradients.held if self._of_step is None else self._of_step)

    def load(self, names: Iterable[str], model: torch.nn.Module) -> None:
        """Set zeros for the parameters of these names that have no gradient."""
        self._of_step = frozenset(names)
        if not self._of_step:
            return
        sparse = sparse_parameters(model)
        for name, parameter in model.named_parameters():
            if name in self._of_step and parameter.grad is None and parameter.requires_grad:
                parameter.grad = zero_gradient(parameter, sparse)
