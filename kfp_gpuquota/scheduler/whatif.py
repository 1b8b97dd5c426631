"""what_if(state, change, now): what would be planned if something happened, without its happening."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.scheduler.actions.decisions import Plan
from kfp_gpuquota.scheduler.planner import plan
from kfp_gpuquota.scheduler.state.copying import copied

if TYPE_CHECKING:
    from kfp_gpuquota.api import Reason
    from kfp_gpuquota.scheduler.state.events import Event
    from kfp_gpuquota.scheduler.state.state import State


class WhatIf(msgspec.Struct, frozen=True):
    """The plans as things are and with the change, and how they differ, as uids of jobs.

    `starts` and `grows` count a job that is only nominated: it does so when the workers it waits for are gone.
    `no_longer_starts` would start as things are, and with the change would not. `shrinks` gives back workers, `stops`
    returns to the queue, which without the change it would not.
    """

    before: Plan
    after: Plan
    starts: tuple[str, ...]
    no_longer_starts: tuple[str, ...]
    grows: tuple[str, ...]
    shrinks: tuple[str, ...]
    stops: tuple[str, ...]

    def why(self, uid: str) -> Reason | None:
        """What the plan with the change says of the job; None where it says nothing."""
        after = self.after
        shrinking = (r for r in after.resize if r.remove)
        decided = (after.evict, after.bind, shrinking, after.nominate, after.resize)
        reasons = (decision.reason for group in decided for decision in group if decision.job == uid)
        return next(reasons, after.waiting.get(uid))


def what_if(state: State, change: Event | Sequence[Event], now: float) -> WhatIf:
    """Answer for one event or several, in order; `state` stays as it is. Raises what `State.apply` raises."""
    changed = copied(state)
    for event in change if isinstance(change, Sequence) else (change,):
        changed.apply(event)
    before, after = plan(state, now), plan(changed, now)
    return WhatIf(
        before,
        after,
        starts=_only(_starts(after), _starts(before)),
        no_longer_starts=_only(_starts(before), _starts(after)),
        grows=_only(_grows(after), _grows(before)),
        shrinks=_only(_shrinks(after), _shrinks(before)),
        stops=_only(_stops(after), _stops(before)),
    )


def _only(these: set[str], not_those: set[str]) -> tuple[str, ...]:
    return tuple(sorted(these - not_those))


def _starts(decided: Plan) -> set[str]:
    return {b.job for b in decided.bind} | {n.job for n in decided.nominate if n.job in decided.waiting}


def _grows(decided: Plan) -> set[str]:
    nominated = {n.job for n in decided.nominate} - _starts(decided)
    return nominated | {r.job for r in decided.resize if r.to_workers > r.from_workers}


def _shrinks(decided: Plan) -> set[str]:
    return {r.job for r in decided.resize if r.remove}


def _stops(decided: Plan) -> set[str]:
    return {e.job for e in decided.evict}
