"""The number of samples of a step, and the limit for one iteration. Both may change between two steps.

`GlobalBatch` follows the number of workers where it is asked to, and the learning rate follows it: linearly (Goyal et
al., "Accurate, Large Minibatch SGD", 2017) or by the square root (Krizhevsky, "One weird trick", 2014), which suits
optimizers that normalise their steps, like Adam; or by the gain that is measured
(`reduction.gradient_noise`). `MicroBatchLimit` follows the memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_runtime.plan.batches import micro_batches

if TYPE_CHECKING:
    from elastic_runtime.plan.batches import MicroBatch

LR_RULES = ("linear", "sqrt", "adascale", "none")


@dataclass(frozen=True)
class GlobalBatch:
    """`samples` a step, at any size; or `per_worker` times the workers within `bounds`, where there are bounds."""

    samples: int
    per_worker: int = 0
    bounds: tuple[int, int] | None = None
    rule: str = "linear"

    def at(self, world_size: int) -> int:
        """Return the samples of a full step with `world_size` workers."""
        if self.bounds is None:
            return self.samples
        return min(max(self.per_worker * world_size, self.bounds[0]), self.bounds[1])

    def lr_factor(self, world_size: int, gain: float = 1.0, *, normalizes: bool = False) -> float:
        """Return the factor of the learning rate, which was chosen for `samples`, with `world_size` workers.

        `gain`: the measured one; `normalizes`: the optimizer divides by the size of the gradients, as Adam does.
        """
        if self.rule == "none":
            return 1.0
        if self.rule == "adascale":
            return math.sqrt(gain) if normalizes else gain
        ratio = self.at(world_size) / self.samples
        return math.sqrt(ratio) if self.rule == "sqrt" else ratio


class MicroBatchLimit:
    """The largest number of samples of one iteration: what the script allows, or less where memory is short."""

    def __init__(self, allowed: int | None) -> None:
        self._allowed = allowed
        self.now = allowed
        self._seen = 0  # the largest one since the limit was last changed

    def plan(self, samples: int, rank: int, world_size: int) -> list[MicroBatch]:
        """Return the micro-batches of this rank in a step of `samples`."""
        return micro_batches(samples, rank, world_size, self.now)

    @property
    def whole(self) -> bool:
        """Whether the limit is the one that the script allows."""
        return self.now == self._allowed

    def note(self, size: int) -> None:
        """Record that an iteration of this size is about to run."""
        self._seen = max(self._seen, size)

    def halve(self, failed: int) -> bool:
        """Halve the limit after an iteration of `failed` samples did not fit; return False if it had one sample."""
        if failed < 2:
            return False
        self.now, self._seen = failed // 2, 0
        return True

    def scale(self, part: float) -> None:
        """Scale the limit to `part` of the memory that was available before; 1 restores what the script allows."""
        if part == 1:
            self.now = self._allowed
        elif self._seen:
            self.now = max(1, int(self._seen * part))
            if self._allowed is not None:
                self.now = min(self.now, self._allowed)
        self._seen = 0
