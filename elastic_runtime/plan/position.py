"""The position of a training: epoch, step and samples."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """`step` global steps were applied in all; `index` of them in `epoch`, over `samples` samples."""

    epoch: int = 0
    index: int = 0
    step: int = 0
    samples: int = 0

    def after_step(self, samples: int) -> Position:
        """Return the position after one more step of `samples` samples."""
        return Position(self.epoch, self.index + 1, self.step + 1, self.samples + samples)

    def after_epoch(self) -> Position:
        """Return the position at the beginning of the next epoch."""
        return Position(self.epoch + 1, 0, self.step)
