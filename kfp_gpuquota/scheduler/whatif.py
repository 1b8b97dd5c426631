"""what_if(state, change, now): the plan that would follow from hypothetical events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api import ExpectedStart
from kfp_gpuquota.scheduler.actions.decisions import Plan
from kfp_gpuquota.scheduler.forecast import RunTime, expected_starts
from kfp_gpuquota.scheduler.planner import plan
from kfp_gpuquota.scheduler.state.copying import copied

if TYPE_CHECKING:
    from kfp_gpuquota.api import Reason
    from kfp_gpuquota.scheduler.state.events import Event
    from kfp_gpuquota.scheduler.state.state import State


class WhatIf(msgspec.Struct, frozen=True):
    """The plans without and with the change, and their differences, as uids of jobs.

    `starts` and `grows` include jobs that are only nominated: they start when the workers that they wait for have
    exited. Jobs in `no_longer_starts` would start only without the change. With the change, but not without it, those
    in `shrinks` lose workers and those in `stops` return to the queue. `expected` is when jobs
    that wait with the change are expected to start, as far as that is known.
    """

    before: Plan
    after: Plan
    starts: tuple[str, ...]
    no_longer_starts: tuple[str, ...]
    grows: tuple[str, ...]
    shrinks: tuple[str, ...]
    stops: tuple[str, ...]
    expected: dict[str, ExpectedStart] = {}

    def why(self, uid: str) -> Reason | None:
        """Return the reason for the job in the plan with the change; None where it is not in the plan."""
        after = self.after
        shrinking = (r for r in after.resize if r.remove)
        decided = (after.evict, after.bind, shrinking, after.nominate, after.resize)
        reasons = (decision.reason for group in decided for decision in group if decision.job == uid)
        return next(reasons, after.waiting.get(uid))


def what_if(
    state: State,
    change: Event | Sequence[Event],
    now: float,
    run_time: Callable[[str], RunTime] | None = None,
    *,
    in_time: Callable[[], bool] = lambda: True,
) -> WhatIf:
    """Return the effect of one event or several, in order; `state` is not changed. Raises what `State.apply` raises.

    `run_time(uid)` is what is known of a job's run time, for the expected starts; without it these are left out, as are
    later ones once `in_time()` is false.
    """
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
        expected=expected_starts(changed, now, run_time, in_time=in_time) if run_time else {},
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
