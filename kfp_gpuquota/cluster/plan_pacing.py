"""Pacing of plans: the next plan follows at once, unless plans follow each other without end.

A plan that was executed leads to another one, and at last to an empty plan. If a plan were repeated endlessly, or two
plans undid each other, the cluster would do nothing else: so after `MAX_PLANS_IN_A_ROW` plans follow with a pause.

Under a stream of requests, each of which asks for a plan, `RestAfterPlans` leaves most of the time to the requests:
thousands of submissions then share plans. A forecast in the event loop ends `within` a time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_PLANS_IN_A_ROW: Final = 100
PAUSE_S: Final = 1.0
PLANNING_SHARE: Final = 1 / 3
"""The part of the time that planning may use in the long run."""
BURST_S: Final = 0.2
"""The pause that may be postponed, in seconds: the plans of a few arrivals follow without delay."""

LONGEST_FORECAST_S: Final = 0.5
"""For so long a forecast may delay the event loop, or for its first cycle, which takes as long as a plan."""


def within(longest_s: float) -> Callable[[], bool]:
    """Return a function that returns whether fewer seconds than that have passed since this call."""
    until = time.monotonic() + longest_s
    return lambda: time.monotonic() < until


@dataclass
class PlanPacing:
    """Counts the plans since the last empty one."""

    in_a_row: int = 0

    def planned(self, *, empty: bool) -> None:
        """Record a plan that was made and executed."""
        self.in_a_row = 0 if empty else self.in_a_row + 1

    @property
    def reached_limit(self) -> bool:
        """Whether the last plan was the first one to reach the limit, which is logged once."""
        return self.in_a_row == MAX_PLANS_IN_A_ROW

    @property
    def delay_s(self) -> float:
        """The pause before the next plan, in seconds."""
        return PAUSE_S if self.in_a_row >= MAX_PLANS_IN_A_ROW else 0.0


@dataclass
class RestAfterPlans:
    """Accumulates the pauses that follow plans; times are those of a monotonic clock, in seconds."""

    rest_until: float = 0.0

    def planned(self, began: float, ended: float) -> None:
        """Record the duration of a plan."""
        self.rest_until = max(self.rest_until, began) + (ended - began) / PLANNING_SHARE

    def delay_s(self, now: float) -> float:
        """Return the pause before the next plan, in seconds."""
        return max(0.0, self.rest_until - BURST_S - now)
