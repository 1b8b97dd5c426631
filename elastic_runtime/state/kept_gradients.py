"""Which parameters have a gradient when a step begins: zeros, as `zero_grad(set_to_none=False)` leaves them.

An optimizer acts on a parameter whose gradient is zero (momentum, weight decay), and leaves one without a gradient
alone. Where some steps do not use a parameter, or where it was frozen, its zeros are part of the state, by its name.

Invariant: the names are those of the step's beginning from there until the step's sum is complete, though gradients are
taken away and set meanwhile; after it, those of now. A loop that clears its gradients at the beginning of an iteration
has them when a step begins, too: it sets the zeros of a loaded state to None, or leaves them. Where the step before has
shown that it sets all to None, a joiner leaves them out: it would write them while the others wait, and these count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from elastic_runtime.state.sparse_parameters import sparse_parameters, zero_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch


class Gradients(Protocol):
    """The gradients of a model's parameters."""

    @property
    def kept(self) -> frozenset[str]:
        """The names of those that had one before the backward pass of the last step."""


class KeptGradients:
    """The names, and the zeros of a state that is loaded. `parameters`: those of now, by name, frozen ones, too."""

    def __init__(
        self, gradients: Gradients, parameters: Callable[[], Iterable[tuple[str, torch.nn.Parameter]]]
    ) -> None:
        self._gradients, self._parameters = gradients, parameters
        self._of_step: frozenset[str] | None = None  # from the step's beginning to its sum
        self._begun_with: frozenset[str] = frozenset()
        self._loaded: frozenset[str] | None = None  # since the last step's beginning
        self.cleared = False  # all of trained parameters by the loop, before the backward pass of the last step

    def begin_step(self) -> None:
        """Note the names: a step begins."""
        trained, now = set[str](), set[str]()
        for name, parameter in self._parameters():  # once: of a small model it is most of what this costs in a step
            if parameter.requires_grad:
                trained.add(name)
            if parameter.grad is not None:
                now.add(name)
        if self._of_step is None:  # else no step was complete since the last one began
            self.cleared = bool(self._begun_with & trained) and not self._gradients.kept & trained
        self._of_step = self._begun_with = frozenset(now)
        self._loaded = None

    def end_step(self) -> None:
        """Note that the step's sum is complete."""
        self._of_step = None

    def names(self) -> list[str]:
        """Return the names that belong to the state."""
        return sorted(self._now() if self._of_step is None else self._of_step)

    def of_repeated_step(self) -> frozenset[torch.nn.Parameter]:
        """Return the parameters that have zeros where the step of now is repeated, or where a loaded state begins."""
        names = self._gradients.kept if self._loaded is None else self._loaded
        return frozenset(parameter for name, parameter in self._parameters() if name in names)

    def load(self, names: Iterable[str], model: torch.nn.Module) -> None:
        """Set zeros for the parameters of these names that have no gradient."""
        self._of_step = self._loaded = frozenset(names)
        self.put_back(model)

    def put_back(self, model: torch.nn.Module) -> None:
        """Set the zeros of a loaded state again, which code that ran before its loop may have cleared."""
        if not self._loaded:
            return
        sparse = sparse_parameters(model)
        for name, parameter in self._parameters():
            if name in self._loaded and parameter.grad is None:
                parameter.grad = zero_gradient(parameter, sparse)

    def _now(self) -> frozenset[str]:
        return with_gradient(self._parameters())


def with_gradient(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> frozenset[str]:
    """Return the names of the parameters that have a gradient."""
    return frozenset(name for name, parameter in parameters if parameter.grad is not None)


def without_cleared(state: dict[str, Any]) -> dict[str, Any]:
    """Return a captured state without the zeros that its loop clears, in any case: those of trained parameters."""
    if not state.get("gradients_cleared"):
        return state
    return {**state, "zero_gradients": sorted({*state["zero_gradients"]} & {*state["frozen"]})}
