"""Values that the script changes by itself: parameters, and attributes of its own optimizers.

Frozen parameters, before the backward pass of any iteration: a momentum encoder, an averaged teacher. Trained ones,
once and in the first iteration: an initialisation from the first batch, of which each worker has its own share, and a
resumed one another batch.

The step is repeated if a worker is lost in it, and its iterations are more than one where it is cut, so such a change
would be made several times. It is noticed in the first iterations, alone, by a few elements of each parameter. Copies
of other parameters are not meant: they are the same however often they are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import LoopError, UsageError
from elastic_runtime.torch_internals.modules import OPTIMIZER_ATTRIBUTES
from elastic_runtime.validation.loop_watch import LoopWatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LOOKS_AT = 6
_ELEMENTS = 8


class ChangedParameters(LoopWatch):
    """Compares the parameters of `models` at an iteration's beginning and at its first backward pass."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self._parameters = {name: p for model in models for name, p in model.named_parameters()}
        self._left = LOOKS_AT
        self._before: dict[str, list[float]] = {}
        self._trained_before: dict[str, list[float]] = {}
        self._set: set[str] = set()  # trained ones that changed in the first iteration

    def before_iteration(self, samples: int) -> None:  # noqa: ARG002
        """Another iteration begins."""
        self._before = self._samples(trained=False) if self._left else {}
        looks = self._left == LOOKS_AT or (self._left == LOOKS_AT - 1 and self._set)
        self._trained_before = self._samples(trained=True) if looks else {}
        self._left = max(0, self._left - 1)

    def accept(self) -> None:
        """Compare with the present values."""
        self._before = self._samples(trained=False) if self._before else {}
        self._trained_before = self._samples(trained=True) if self._trained_before else {}

    def before_backward(self) -> None:
        """A backward pass begins. LoopError for a parameter that was changed by hand."""
        before, self._before = self._before, {}
        if before:
            self._check_frozen(before)
        before, self._trained_before = self._trained_before, {}
        if before:
            self._check_trained(before)

    def _check_frozen(self, before: dict[str, list[float]]) -> None:
        changed = self._changed(before, trained=False)
        copied = list(self._samples(trained=True).values()) if changed else []
        for name, now in changed.items():
            if now not in copied:
                raise LoopError(
                    f"the frozen parameter {name!r} was changed by hand in an iteration before job.backward, and would "
                    "be changed twice in a step that is repeated after the loss of a worker; change it after "
                    "optimizer.step(), under `if job.applied:`"
                )

    def _check_trained(self, before: dict[str, list[float]]) -> None:
        """What changes in each iteration, as weights that are clipped, is the same however often it is done."""
        changed = set(self._changed(before, trained=True))
        once, self._set = sorted(self._set - changed), changed if self._left == LOOKS_AT - 1 else set()
        if once:
            raise LoopError(
                f"parameter {once[0]!r} was changed before job.backward in the first iteration, and not in the "
                "second: an initialisation from the first batch, of which each worker has its own share, and a worker "
                "that resumes or joins another batch; compute it from a fixed batch before prepare"
            )

    def _changed(self, before: dict[str, list[float]], *, trained: bool) -> dict[str, list[float]]:
        now = self._samples(trained=trained)
        return {name: now[name] for name, values in before.items() if now.get(name, values) != values}

    def end(self) -> None:
        """Look no more."""
        self._left, self._before, self._trained_before, self._set = 0, {}, {}, set()

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


COMPARED = 64
"""Iterations: of several steps, in whichever parts a step is computed."""


class OptimizerAttributes(LoopWatch):
    """Compares numbers and tensors in attributes of the script's own optimizers, which their state_dict leaves out.

    A worker that resumes or joins begins with the attribute's first value, and applies other updates. UsageError for
    one that changes in the first iterations.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = [each for each in optimizers if _is_own(each)]
        self._left = COMPARED if self._optimizers else 0
        self._before: list[dict[str, Any]] = []

    def before_iteration(self, samples: int) -> None:  # noqa: ARG002
        """Compare what the last iteration has changed."""
        if not self._left:
            return
        self._left -= 1
        now = [_attributes(each) for each in self._optimizers]
        for optimizer, before, after in zip(self._optimizers, self._before, now, strict=False):
            _check_keys(optimizer)
            changed = sorted(name for name, value in after.items() if _differs(before.get(name), value))
            if changed:
                raise UsageError(
                    f"{type(optimizer).__name__} changes its attribute {changed[0]!r}, which its state_dict "
                    "leaves out: a worker that resumes or joins would begin with its first value; keep it in "
                    "self.state[parameter] or in self.param_groups, or extend state_dict and load_state_dict (tensors "
                    "of intermediate results: let the name begin with '_')"
                )
        self._before = now

    def end(self) -> None:
        """Look no more."""
        self._left = 0


_STATE = {*OPTIMIZER_ATTRIBUTES, "state", "param_groups", "defaults"}


def _check_keys(optimizer: torch.optim.Optimizer) -> None:
    """UsageError for state that `load_state_dict` gives to a parameter: a state_dict numbers parameters."""
    state: dict[Any, Any] = optimizer.state
    numbered = [key for key in state if isinstance(key, int)]
    if numbered:
        raise UsageError(
            f"{type(optimizer).__name__} keeps state under the key {numbered[0]}, a number, as which its state_dict "
            "saves a parameter's: a worker that resumes or joins would lose it; keep it in self.state[parameter] or in "
            "self.param_groups, or let the key be a text"
        )


def _differs(before: Any, after: Any) -> bool:
    """Whether a value has changed; a whole number that was set for the first time is a constant."""
    if before is None and type(after) in {int, float}:
        return not float(after).is_integer()
    return repr(before) != repr(after)  # in which NaN is equal to itself


def _is_own(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    own = kind.state_dict is not torch.optim.Optimizer.state_dict
    return not own and not kind.__module__.startswith("torch.optim")


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return numbers, and a few elements of tensors, alone or in lists and dictionaries, by the attribute's name."""
    named = {name: value for name, value in vars(optimizer).items() if name not in _STATE}
    saved = {id(each) for each in _tensors(list(optimizer.state.values()))}
    found: dict[str, Any] = {name: value for name, value in named.items() if type(value) in {int, float}}
    for name, value in named.items():
        tensors = _tensors(value) if name[0] != "_" else ()
        held = [each for each in tensors if not isinstance(each, torch.nn.Parameter) and id(each) not in saved]
        if held:
            found[name] = [_few(each) for each in held]
    return found


def _tensors(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple) and depth:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each, depth - 1)


def _few(tensor: torch.Tensor) -> list[float]:
    flat = tensor.detach().flatten()
    return [float(each) for each in flat[:: max(1, flat.numel() // _ELEMENTS)][:_ELEMENTS].to("cpu", torch.float64)]
