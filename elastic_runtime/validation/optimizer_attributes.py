"""Optimizers of the script's own that keep a number in an attribute, which their state_dict leaves out.

A worker that resumes or joins begins with the attribute's first value, and applies other updates. It is noticed in the
first iterations, alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import UsageError
from elastic_runtime.torch_internals.modules import OPTIMIZER_ATTRIBUTES
from elastic_runtime.validation.loop_watch import LoopWatch

if TYPE_CHECKING:
    from collections.abc import Iterable

LOOKS_AT = 64
"""Iterations: of several steps, in whichever parts a step is computed."""


class OptimizerAttributes(LoopWatch):
    """Compares them in the first iterations. UsageError for one that changes."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = [each for each in optimizers if _is_own(each)]
        self._left = LOOKS_AT if self._optimizers else 0
        self._before: list[dict[str, Any]] = []

    def before_iteration(self, samples: int) -> None:  # noqa: ARG002
        """Compare what the last iteration has changed."""
        if not self._left:
            return
        self._left -= 1
        now = [_numbers(each) for each in self._optimizers]
        for optimizer, before, after in zip(self._optimizers, self._before, now, strict=False):
            changed = sorted(name for name, value in after.items() if before.get(name) != value)
            if changed:
                raise UsageError(
                    f"{type(optimizer).__name__} changes its attribute {changed[0]!r} in each step, which its "
                    "state_dict leaves out: a worker that resumes or joins would begin with its first value; keep it "
                    "in self.state[parameter] or in self.param_groups, or extend state_dict and load_state_dict"
                )
        self._before = now

    def end(self) -> None:
        """Look no more."""
        self._left = 0


def _is_own(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    own = kind.state_dict is not torch.optim.Optimizer.state_dict
    return not own and not kind.__module__.startswith("torch.optim")


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    named = vars(optimizer).items()
    return {name: value for name, value in named if type(value) in {int, float} and name not in OPTIMIZER_ATTRIBUTES}
