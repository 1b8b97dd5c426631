"""How soon the next plan is made: at once, unless plans follow each other without end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOST_IN_A_ROW: Final = 100
PAUSE_S: Final = 1.0


@dataclass
class Pace:
    """Counts plans that had something to do since the last one that had not.

    A plan that was carried out leads to the next one, and in the end to an empty one. Were a plan ever to say the same
    again and again, or two of them to undo each other, the cluster would spin and serve nobody: so from some number on
    it goes on slowly.
    """

    in_a_row: int = 0

    def planned(self, *, empty: bool) -> None:
        """A plan was made, and carried out."""
        self.in_a_row = 0 if empty else self.in_a_row + 1

    @property
    def runs_away(self) -> bool:
        """It has just become too many."""
        return self.in_a_row == MOST_IN_A_ROW

    @property
    def delay_s(self) -> float:
        """Before the next plan is made."""
        return PAUSE_S if self.in_a_row >= MOST_IN_A_ROW else 0.0
