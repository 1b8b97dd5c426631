"""Where the training stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """`step` global steps are applied in all, `index` of them in `epoch`."""

    epoch: int = 0
    index: int = 0
    step: int = 0

    def after_step(self) -> Position:
        """One step further."""
        return Position(self.epoch, self.index + 1, self.step + 1)

    def after_epoch(self) -> Position:
        """At the beginning of the next epoch."""
        return Position(self.epoch + 1, 0, self.step)
