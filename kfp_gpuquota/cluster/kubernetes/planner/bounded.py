"""Makes plans that take about BUDGET_S: it measures them, and lets the next one consider fewer or more shapes.

Only teams with more shapes than rotation.FEWEST are ever limited, so a plan takes longer than the budget where many
teams need it.

The plan itself is a pure function of the state and of the shapes that it considers (scheduler/fairness/rotation.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Reason
from kfp_gpuquota.scheduler.fairness.rotation import Rotation

if TYPE_CHECKING:
    from collections.abc import Callable


BUDGET_S: Final = 0.02
FIRST_SIZE: Final = 64
SMALLEST_SIZE: Final = 16
LARGEST_SIZE: Final = 1 << 14


class Planned(msgspec.Struct, frozen=True):
    """A plan, without the reasons of waiting jobs: `changed` are those that are new or other than before.

    `gone` are the jobs that wait no more. `seconds` of work were needed, of the CPU if a process of its own planned:
    waiting for a busy machine is no reason to plan less often. `more`: waiting jobs were not considered since the last
    change, so that another plan is due.
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
        self._reasons: dict[str, Reason] = {}
        self._perhaps_gone: set[str] = set()

    def applied(self, event: scheduler.Event) -> None:
        """Record an event that the state has applied."""
        self._rotation.changed()
        if isinstance(event, scheduler.JobRemoved | scheduler.JobCompleting):
            self._perhaps_gone.add(event.uid)
        elif isinstance(event, scheduler.WorkerStarted):
            self._perhaps_gone.add(event.job)

    def plan(self, now: float) -> Planned:
        """Return the plan at `now`, in seconds since the epoch."""
        started = self._clock()
        chosen = self._rotation.choose(self._state.ledger, self._size)
        plan = scheduler.plan(self._state, now, shapes=chosen) if chosen else scheduler.plan(self._state, now)
        nominated = [self._state.jobs[one.job] for one in plan.nominate]
        self._rotation.considered(chosen, plan.waiting, nominated)
        gone = self._gone(plan)
        changed = {uid: reason for uid, reason in plan.waiting.items() if self._reasons.get(uid) != reason}
        self._reasons.update(changed)
        for uid in gone:
            del self._reasons[uid]
        seconds = self._clock() - started
        self._adapt(seconds, limited=bool(chosen))
        bare = msgspec.structs.replace(plan, waiting={})
        return Planned(bare, changed, gone, seconds, more=self._rotation.unvisited > 0)

    def _adapt(self, seconds: float, *, limited: bool) -> None:
        """Choose the number of shapes for which the next plan takes the budget, in steps of at most 2."""
        if seconds > self._budget_s:
            self._size = max(SMALLEST_SIZE, int(self._size * max(0.25, self._budget_s / seconds)))
        elif limited and seconds < self._budget_s / 2:
            self._size = min(LARGEST_SIZE, 2 * self._size)

    def _gone(self, plan: scheduler.Plan) -> list[str]:
        """Return the jobs that wait no more: those that start, and those whose events say so.

        Rejected: a comparison with all reasons, which costs the number of waiting jobs for each plan.
        """
        started = {bind.job for bind in plan.bind}
        ended = {uid for uid in self._perhaps_gone if not self._waits(uid)}
        self._perhaps_gone = set()
        return [uid for uid in started | ended if uid in self._reasons and uid not in plan.waiting]

    def _waits(self, uid: str) -> bool:
        job = self._state.jobs.get(uid)
        return job is not None and not job.active and not job.removed and not job.completing
