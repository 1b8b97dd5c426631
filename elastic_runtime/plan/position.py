"""Where the training stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """`step` global steps are applied in all, `index` of them in `epoch`, which made `samples` of its samples."""

    epoch: int = 0
    index: int = 0
    step: int = 0
    samples: int = 0

    def after_step(self, samples: int) -> Position:
        """One step of so many samples further."""
        return Position(self.epoch, self.index + 1, self.step + 1, self.samples + samples)

    def after_epoch(self) -> Position:
        """At the beginning of the next epoch."""
        return Position(self.epoch + 1, 0, self.step)
