"""One backward pass: the loss that the script computed, its scale, and what the reducer needs of the pass.

Losses are scaled so that the gradients of all workers sum to those of the global batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from elastic_runtime.errors import LoopError, UsageError
from elastic_runtime.plan.batches import MicroBatch


@dataclass(slots=True)
class Loss:
    """The arguments of `job.backward`. `options`: those of `torch.Tensor.backward`."""

    value: torch.Tensor
    weight: float | None = None
    reduction: str = "mean"
    options: dict[str, Any] = field(default_factory=dict)


class Exchanges(Protocol):
    """Other collectives of an iteration's backward passes."""

    outstanding: int
    """Those that a backward pass has to start before the gradients may be summed."""


@dataclass(slots=True, eq=False)
class Pass:
    """A backward pass, or what takes its place in the sum (`job.skip`).

    `first`: of its sum, so that no gradients were collected before; `last`: of its iteration. `scale`: the factor of
    its gradients when they are collected. `loss`: this worker's part of the global batch's loss, for an optimizer that
    asks for it. `running`: gradients that arrive at another time are not its own.
    """

    micro: MicroBatch
    first: bool = True
    last: bool = True
    exchanges: Exchanges | None = None
    scale: float = 1.0
    loss: float = 0.0
    skipped: bool = False
    running: bool = False

    @property
    def held(self) -> bool:
        """Whether complete buckets wait: all workers start their collectives in one order."""
        return self.exchanges is not None and self.exchanges.outstanding > 0

    def backpropagate(self, loss: torch.Tensor, seed: torch.Tensor | None = None, **options: Any) -> None:
        """Run autograd from `loss`, with the arguments of `torch.Tensor.backward`."""
        self.running = True
        try:
            loss.backward(seed, **options)  # type: ignore[no-untyped-call]
        finally:
            self.running = False


NO_PASS = Pass(MicroBatch(0, 0, 0, last=True))
"""In force before the first one."""


class StepLosses:
    """The losses of one step. `whole`: weights must be whole numbers, whose sum is the same in any order."""

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._kind = ""  # set by the step's first loss
        self.weight = 0.0  # of this worker's losses in this step: units, or samples
        self._share_of: tuple[object, ...] = ()
        self._share = torch.empty(0)

    def reset(self) -> None:
        """Begin another step, or another backward pass of one."""
        self.weight, self._kind = 0.0, ""

    def check(self, loss: Loss) -> None:
        """Raise UsageError or LoopError for invalid arguments of `job.backward`."""
        weight, reduction = loss.weight, loss.reduction
        if reduction not in {"mean", "sum"}:
            raise UsageError(f"job.backward got reduction={reduction!r}, but it must be 'mean' or 'sum'")
        if weight is not None and (reduction == "sum" or not weight >= 0):
            raise UsageError(
                f"job.backward got weight={weight!r} with reduction={reduction!r}; a weight is a number from 0 up and "
                "is the number of units (tokens, pixels) over which the loss is the mean"
            )
        if weight is not None and self._whole and weight != int(weight):
            raise UsageError(f"job.backward got weight={weight!r}; with reduction='exact' weights are whole numbers")
        kind = reduction if weight is None else "weighted"
        if self._kind and self._kind != kind:
            raise LoopError(
                f"job.backward got a {kind} loss in one iteration of a step and a {self._kind} one in another; a step "
                "has one kind: a mean, a sum, or a mean with a weight"
            )
        self._kind = kind

    def factor(self, micro: MicroBatch, loss: Loss, *, passive: bool) -> float:
        """Return the factor of this micro-batch's loss. `passive`: the gradients are not scaled afterwards."""
        if loss.reduction == "sum":
            return 0.0 if micro.padding else 1.0
        if passive:
            return 1.0
        counted = 0.0 if micro.padding else micro.size if loss.weight is None else float(loss.weight)
        self.weight += counted
        return counted / micro.step_samples

    def seed(self, loss: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the gradient with which the backward pass begins: `factor`, in the shape of the loss.

        Multiplying the loss was rejected: it adds an operation to both passes.
        """
        asked = (loss.shape, loss.dtype, loss.device, factor)
        if self._share_of != asked:
            if loss.numel() != 1:
                raise UsageError(f"job.backward got a loss of shape {tuple(loss.shape)}; it needs one number")
            self._share = torch.full(loss.shape, factor, dtype=loss.dtype, device=loss.device)
            self._share_of = asked
        return self._share

    def final(self, step_samples: int, total: float) -> float:
        """Return the factor of the summed gradients; `total`: the weight of all workers' losses, 0 for sums."""
        return step_samples / total if total else 1.0
