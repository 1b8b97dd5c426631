"""Makes plans that take about BUDGET_S: it measures them, and lets the next one consider fewer or more shapes.

The plan itself is a pure function of the state and of the shapes that it considers (scheduler/fairness/rotation.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Reason
from kfp_gpuquota.scheduler.fairness.rotation import Rotation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


BUDGET_S: Final = 0.25
FIRST_SIZE: Final = 512
SMALLEST_SIZE: Final = 16
LARGEST_SIZE: Final = 1 << 14


class Planned(msgspec.Struct, frozen=True):
    """A plan, without the reasons of waiting jobs: `changed` are those that are new or other than before.

    `gone` are the jobs that wait no more. `more`: waiting jobs were not considered since the last change, so that
    another plan is due.
    """

    plan: scheduler.Plan
    changed: dict[str, Reason]
    gone: list[str]
    seconds: float
    more: bool


class BoundedPlanner:
    """Plans of one state. `clock` returns seconds."""

    def __init__(self, state: scheduler.State, clock: Callable[[], float], budget_s: float = BUDGET_S) -> None:
        self._state, self._clock, self._budget_s = state, clock, budget_s
        self._rotation = Rotation()
        self._size = FIRST_SIZE
        self._reasons: Mapping[str, Reason] = {}

    def changed(self) -> None:
        """Record that events have changed the state."""
        self._rotation.changed()

    def plan(self, now: float) -> Planned:
        """Return the plan at `now`, in seconds since the epoch."""
        started = self._clock()
        chosen = self._rotation.choose(self._state.ledger, self._size)
        plan = scheduler.plan(self._state, now, shapes=chosen) if chosen else scheduler.plan(self._state, now)
        nominated = [self._state.jobs[one.job] for one in plan.nominate]
        self._rotation.considered(chosen, plan.waiting, nominated)
        seconds = self._clock() - started
        self._adapt(seconds, limited=bool(chosen))
        reasons = {**self._kept(plan), **plan.waiting} if chosen else plan.waiting
        before, self._reasons = self._reasons, reasons
        changed = {uid: reason for uid, reason in reasons.items() if before.get(uid) != reason}
        gone = [uid for uid in before if uid not in reasons]
        bare = msgspec.structs.replace(plan, waiting={})
        return Planned(bare, changed, gone, seconds, more=self._rotation.unvisited > 0)

    def _adapt(self, seconds: float, *, limited: bool) -> None:
        """Choose the number of shapes for which the next plan takes the budget, in steps of at most 2."""
        if seconds > self._budget_s:
            self._size = max(SMALLEST_SIZE, int(self._size * max(0.25, self._budget_s / seconds)))
        elif limited and seconds < self._budget_s / 2:
            self._size = min(LARGEST_SIZE, 2 * self._size)

    def _kept(self, plan: scheduler.Plan) -> dict[str, Reason]:
        """Return the reasons of jobs that this plan has not considered, and that still wait."""
        started = {bind.job for bind in plan.bind}
        jobs = self._state.jobs
        return {
            uid: reason
            for uid, reason in self._reasons.items()
            if uid in jobs and not jobs[uid].active and not jobs[uid].removed and uid not in started
        }
