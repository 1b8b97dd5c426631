"""Has a lowered limit enforced after a grace: the team may end what it can end itself until then.

The scheduler chooses what is stopped (scheduler/actions/enforcement.py). The grace is counted in memory: another leader
counts it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota import scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules


class LimitEnforcement:
    """Teams above their limit, and since when. `emit` receives the scheduler's events."""

    def __init__(self, emit: Callable[[scheduler.Event], None], rules: CurrentRules) -> None:
        self._emit, self._rules = emit, rules
        self._since: dict[str, float] = {}
        self._enforced: set[str] = set()

    def note(self, team: str, *, exceeded: bool, now: float) -> None:
        """Record whether a team holds more than its limit at `now`, in seconds of a steady clock."""
        if not exceeded:
            self._since.pop(team, None)
            if team in self._enforced:
                self._enforced.discard(team)
                self._emit(scheduler.LimitEnforced(team, enforced=False))
            return
        since = self._since.setdefault(team, now)
        if team not in self._enforced and now - since >= self._rules.rules.limit_grace_s:
            self._enforced.add(team)
            self._emit(scheduler.LimitEnforced(team))

    @property
    def pending(self) -> bool:
        """Return whether a team's grace has not passed yet."""
        return bool(self._since.keys() - self._enforced)
