"""Values that must be equal on all workers: compared with rank 0's in the sum that each step has anyway.

A worker whose learning rate, GradScaler's scale or parameters differ from the others' trains another model, and nothing
fails. So rank 0 adds its values to the tail of the last bucket, the others add zeros, and each compares the sum with
its own: learning rates in each step; elements of 1/8 of the parameters in every 8th step, so that each parameter is
looked at once in `FULL_TURN` steps.

Values are compared within a tolerance. Equal bits were rejected: devices of two kinds may round an optimizer's
operations differently, while the gradients that they apply are the same to the bit, so such differences do not grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from elastic_runtime.errors import ModelMismatchError
from elastic_runtime.torch_internals.modules import scale_of

if TYPE_CHECKING:
    from collections.abc import Sequence

TURNS = 8
EVERY = 8
FULL_TURN = TURNS * EVERY
"""Steps within which a parameter that differs is found."""
_RATE_TOLERANCE = 1e-5
_TOLERANCE = 1e-3


class Agreement:
    """`size` numbers of a step's tail: the sum of the learning rates, the scaler's scale, and sampled elements."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]] = (),
        optimizers: Sequence[torch.optim.Optimizer] = (),
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._optimizers, self._scaler = list(optimizers), scaler
        named = [(name, p) for name, p in parameters if p.numel() and p.is_floating_point()]
        self._turns = [named[turn::TURNS] for turn in range(TURNS)]
        self._sampled = max(map(len, self._turns), default=0)
        self.size = 2 + self._sampled if optimizers else 0
        self._rates = 0.0
        self._own: torch.Tensor | None = None  # of the elements that this step compares

    def fill(self, section: torch.Tensor, step: int, *, leader: bool) -> None:
        """Write rank 0's values, or zeros, into `section`, of shape (size,); with one worker (`step` -1) do nothing."""
        if step < 0:
            return
        self._rates = sum(_rates(self._optimizers))
        self._own = self._sample(step) if step % EVERY == 0 else None
        section.fill_(-0.0)  # which changes no number it is added to
        if not leader:
            return
        section[0] = self._rates
        if self._own is not None:
            section[1 : 1 + self._own.numel()].copy_(self._own)

    def check(self, section: torch.Tensor, step: int) -> None:
        """ModelMismatchError where this worker's values are not rank 0's, which are in `section`."""
        theirs = float(section[0])
        if abs(theirs - self._rates) > _RATE_TOLERANCE * max(abs(theirs), abs(self._rates)):
            raise ModelMismatchError(
                f"the learning rates of this worker differ from rank 0's in step {step}: they are "
                f"{list(_rates(self._optimizers))}, {self._rates:g} in all, and rank 0's {theirs:g}; a rate must be a "
                "function of what all workers have: of job.step, of job.mean(loss) in place of this worker's loss "
                "(ReduceLROnPlateau), or of a scheduler that prepare was given"
            )
        if self._own is not None:
            self._check_sample(section[1 : 1 + self._own.numel()], self._own, step)

    def _sample(self, step: int) -> torch.Tensor:
        """Rank-independent elements of this turn's parameters, and the scaler's scale. Shape: (1 + parameters,)."""
        scale = scale_of(self._scaler) if self._scaler is not None else None
        chosen = self._turns[step // EVERY % TURNS]
        values = [_element(parameter, step) for _, parameter in chosen]
        first = torch.zeros(1) if scale is None else scale.detach().reshape(1)
        device = values[0].device if values else first.device
        return torch.cat([value.to(device, torch.float32) for value in (first, *values)])

    def _check_sample(self, theirs: torch.Tensor, own: torch.Tensor, step: int) -> None:
        theirs = theirs.to(own.device, torch.float32)
        same = torch.isclose(own, theirs, rtol=_TOLERANCE, atol=1e-6, equal_nan=True)
        if bool(same.all()):
            return
        index = int((~same).nonzero()[0])
        chosen = self._turns[step // EVERY % TURNS]
        what = "the GradScaler's scale" if index == 0 else f"parameter {chosen[index - 1][0]!r}"
        raise ModelMismatchError(
            f"{what} of this worker differs from rank 0's in step {step}: {float(own[index]):g} here, "
            f"{float(theirs[index]):g} there. Something changes it by this worker's own samples, time or rank: an "
            "initialisation from the first batch (compute it from a fixed batch before prepare), a decision on a local "
            "loss (use job.mean(loss)), an optimizer or scheduler that prepare was not given"
        )


def _rates(optimizers: Sequence[torch.optim.Optimizer]) -> list[float]:
    """The learning rates that the host has; those in a GPU's memory are left out, for to read them is to wait."""
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
    return [float(rate) for rate in rates if not isinstance(rate, torch.Tensor) or rate.device.type == "cpu"]


def _element(parameter: torch.nn.Parameter, step: int) -> torch.Tensor:
    """One element, another one in each turn. Shape: (1,)."""
    flat = parameter.detach().reshape(-1) if not parameter.is_contiguous() else parameter.detach().view(-1)
    at = step * 2654435761 % flat.numel()
    return flat[at : at + 1]
