"""The gradient noise scale of a training, and the gain of a larger batch.

A step's batch of B samples has n parts: the micro-batches of all workers, part i with b_i samples and mean gradient
g_i. Their mean over the batch is G. With g the expected gradient and S the covariance of one sample's gradient

    E[sum_i b_i / B * |g_i|^2] = |g|^2 + n * tr(S) / B    and    E[|G|^2] = |g|^2 + tr(S) / B,

so both unknowns are estimated without bias, for parts of any sizes (for two batch sizes: McCandlish et al., "An
Empirical Model of Large-Batch Training", 2018, appendix A.1). The sum over the parts and their number travel in the
step's metadata; G is what every worker has after the sum. The noise scale is tr(S) / |g|^2, in samples, as the ratio of
two averages over the steps: an average of ratios is biased.

A step of one part is not measured. Rejected: the difference to the gradient of the step before, as Pollux does. It
counts the movement of g as noise, and needs a copy of the gradients.

The gain is that of AdaScale (Johnson et al., "AdaScale SGD", 2020): the number of steps of the base batch that one step
of this batch is worth, from 1 (no noise) to the ratio of the batches (all noise).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST, MOST = 20.0, 1000.0
"""The shortest and the longest window of the averages, in degrees of freedom (n - 1 in a step of n parts)."""
RECENT = 0.25
"""The window in between, as a part of all so far: gradients change fast at first, and more and more slowly later."""
_HALF = frozenset({torch.float16, torch.bfloat16})


class PartNorms:
    """The squared gradient norms of this worker's parts of a step, each divided by the part's share of the batch.

    Two numbers of a worker travel: the sum, and the number of parts.
    """

    size = 2

    def __init__(self) -> None:
        self._squares: list[torch.Tensor] = []
        self._share = 0.0
        self._parts = 0
        self.total, self.parts = 0.0, 0  # of all workers, in the step that was taken last

    def begin(self, *, first: bool) -> None:
        """Begin a part without a share; `first`: of its step."""
        self._share = 0.0
        if first:
            self._squares, self._parts = [], 0

    def count(self, share: float) -> None:
        """Count the part that was begun, whose gradients are `share` times their mean. 0: it counts for nothing."""
        self._share = share
        self._parts += share > 0

    def add(self, gradients: Sequence[torch.Tensor], scale: float) -> None:
        """Add some of the part's gradients, which are still to be multiplied by `scale`."""
        if gradients and self._share > 0:
            self._squares.append(_square(gradients) * (scale**2 / self._share))

    def fill(self, section: torch.Tensor) -> None:
        """Write this worker's two numbers. Shape: (2,)."""
        section[0] = self._own(section.device)
        section[1] = self._parts

    def take(self, section: torch.Tensor) -> None:
        """Read the sums over all workers."""
        self.total, parts = section.tolist()
        self.parts = round(parts)

    def take_alone(self) -> None:
        """Take this worker's own numbers as the sums."""
        self.total, self.parts = float(self._own(torch.device("cpu"))), self._parts

    def _own(self, device: torch.device) -> torch.Tensor:
        if not self._squares:
            return torch.zeros((), device=device)
        return torch.stack([square.to(device) for square in self._squares]).sum()


def squared_norm(gradients: Sequence[torch.Tensor]) -> float:
    """Return the sum of the squares of all elements."""
    return float(_square(gradients)) if gradients else 0.0


def _square(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    real = [torch.view_as_real(each) if each.is_complex() else each for each in gradients]
    return torch.nn.utils.get_total_norm([each.float() if each.dtype in _HALF else each for each in real]).square()


@dataclass(frozen=True)
class Averages:
    """What the steps so far have shown. `variance`: of tr(S), and `signal`: of |g|^2, both with the same weights.

    `freedom`: the degrees of freedom of all steps; below LEAST nothing is known. `scaled_steps`: the sum of the gains.
    """

    variance: float = 0.0
    signal: float = 0.0
    freedom: float = 0.0
    scaled_steps: float = 0.0

    @property
    def noise_scale(self) -> float | None:
        """tr(S) / |g|^2 in samples; None while it is unknown, and where the noise hides the gradient."""
        if self.freedom < LEAST or self.signal <= 0:
            return None
        return max(self.variance, 0.0) / self.signal

    def gain(self, batch: int, base: int) -> float:
        """Return how many steps of `base` samples one of `batch` samples is worth; unknown: 1, or less if smaller."""
        if self.freedom < LEAST:
            return min(1.0, batch / base)
        variance, signal = max(self.variance, 0.0), max(self.signal, 0.0)
        if not variance:
            return 1.0
        return (variance / base + signal) / (variance / batch + signal)

    def with_step(self, batch: int, parts: int, of_parts: float, of_whole: float) -> Averages:
        """Return the averages after a step. `of_parts`, `of_whole`: the two sums of the module's docstring."""
        freedom = parts - 1
        if freedom < 1:
            return self
        variance = (of_parts - of_whole) * batch / freedom
        total = self.freedom + freedom
        kept = math.exp(-freedom / min(max(LEAST, RECENT * total), MOST))
        return replace(
            self,
            variance=kept * self.variance + (1 - kept) * variance,
            signal=kept * self.signal + (1 - kept) * (of_whole - variance / batch),
            freedom=total,
        )


class GradientNoise:
    """The averages of a training: the same on all workers, and a part of its state. `base`: samples, of gain 1.

    A step is added by `add` before optimizers act, and counts from `commit` on; `drop` forgets one that is repeated.
    """

    def __init__(self, base: int) -> None:
        self.parts = PartNorms()
        self._base = base
        self._counted = Averages()
        self._current: Averages | None = None  # of the step that is being applied
        self.gain = 1.0  # of the newest step
        self.ticks = 0  # by which schedules advance in it

    @property
    def averages(self) -> Averages:
        """The newest averages."""
        return self._current or self._counted

    @property
    def scaled_steps(self) -> float:
        """The sum of the gains of all steps that count."""
        return self._counted.scaled_steps

    def add(self, batch: int, of_whole: float, loss_scale: float = 1.0, factor: float = 1.0) -> None:
        """Add a step whose mean gradient has the square `of_whole`; all gradients have `loss_scale` times their size.

        `factor`: by which the sum was multiplied to be the mean. A step that is not finite is not measured. It counts,
        as any step does: else a training whose weights have become NaN would never end.
        """
        of_parts, parts = self.parts.total * factor / loss_scale**2, self.parts.parts
        of_whole /= loss_scale**2
        finite = math.isfinite(of_parts) and math.isfinite(of_whole)
        found = self._counted.with_step(batch, parts, of_parts, of_whole) if finite else self._counted
        self.gain = found.gain(batch, self._base)
        self._current = replace(found, scaled_steps=found.scaled_steps + self.gain)
        self.ticks = math.floor(self._current.scaled_steps) - math.floor(self._counted.scaled_steps)

    def commit(self) -> None:
        """Count the step."""
        self._counted, self._current = self.averages, None

    def drop(self) -> None:
        """Forget the step, which is computed again."""
        self._current, self.ticks = None, 0

    def state_dict(self) -> dict[str, Any]:
        """Return what counts so far."""
        return asdict(self._counted)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from this state."""
        self._counted, self._current = Averages(**state), None
