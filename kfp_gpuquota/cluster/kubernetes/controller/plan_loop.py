"""Requests plans after changes, one at a time, and hands each one over to be carried out.

A change is planned at once if there was no recent plan, else together with the changes of a short interval: a single
pod does not wait, and thousands of pods do not cause thousands of plans. Planning takes at most a third of the time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.client.process.logging_setup import because_of, fields
from kfp_gpuquota.cluster.kubernetes.planner.settling import Settling
from kfp_gpuquota.cluster.planning import PlanningHealth
from kfp_gpuquota.errors import PlanningFailedError
from kfp_gpuquota.scheduler.actions.revalidate import still_valid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kfp_gpuquota import scheduler
    from kfp_gpuquota.api import Reason
    from kfp_gpuquota.cluster.kubernetes.controller.cache import Snapshot
    from kfp_gpuquota.cluster.kubernetes.controller.metrics import Metrics
    from kfp_gpuquota.cluster.kubernetes.pinning.unpinned import UnpinnedPods
    from kfp_gpuquota.cluster.kubernetes.planner.process import Planner
    from kfp_gpuquota.cluster.kubernetes.quota.move_budget import MoveBudget
    from kfp_gpuquota.engine.expected_starts import RunTimesOfWaiting

LONGEST_REST_S: Final = 0.5

log = logging.getLogger(__name__)


class PlanLoop:
    """Makes the plans of a controller. `failed` is set when they fail repeatedly, and no more are made.

    `run_times` has the expected run times of waiting jobs. `move_budget` holds back moves until their cost is stored.
    `carry_out(plan)` executes a plan that was made; `ended()` is called after each attempt. `now` gives the time of
    plans, in seconds since 1970.
    """

    def __init__(
        self,
        planner: Planner,
        snapshot: Snapshot,
        unpinned: UnpinnedPods,
        metrics: Metrics,
        now: Callable[[], float],
        *,
        run_times: RunTimesOfWaiting,
        move_budget: MoveBudget,
        carry_out: Callable[[scheduler.Plan], None],
        ended: Callable[[], None],
    ) -> None:
        self._planner, self._snapshot, self._unpinned = planner, snapshot, unpinned
        self._metrics, self._now = metrics, now
        self._run_times, self._carry_out, self._ended = run_times, carry_out, ended
        self._move_budget = move_budget
        self._loop = asyncio.get_running_loop()
        self.health = PlanningHealth(self._loop.time)
        self.failed = asyncio.Event()
        self._current: asyncio.Handle | asyncio.Task[None] | None = None
        self._carrying_out = self._changed_meanwhile = False
        self._reasons: dict[str, Reason] = {}
        self._settling = Settling()
        self._again: asyncio.TimerHandle | None = None
        self._planned_at = self._rests_until = 0.0
        self._worked_s = 0.0  # the CPU time of the last plan: see Planned
        self._continues = False  # the plan is for shapes that the one before has not considered, not for a change
        self._name, self._numbers = f"plan-{uuid.uuid4().hex[:6]}", itertools.count(1)

    @property
    def busy(self) -> bool:
        """Return whether a plan is requested or under way."""
        return self._current is not None

    def close(self) -> None:
        """Cancel what is planned next."""
        for timer in (self._current, self._again):
            if timer:
                timer.cancel()

    def wake(self) -> None:
        """Plan soon, after a change. Plans follow one another until one decides nothing."""
        self._wake(continues=False)

    def _wake(self, *, continues: bool) -> None:
        if self._current is not None:
            self._changed_meanwhile |= not self._carrying_out
        elif self._snapshot.complete and not self.failed.is_set():
            self.health.requested()
            self._continues = continues
            pause = max(self._rests_until, self._planned_at + self.health.pause_s) - self._loop.time()
            # Even without a pause, changes that arrive in one chunk are planned together: all of them are processed
            # before the event loop's next iteration.
            later = self._loop.call_later
            self._current = later(pause, self._begin) if pause > 0 else self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._changed_meanwhile = False
        self._current = self._loop.create_task(self._plan())

    async def _plan(self) -> None:
        started = self._loop.time()
        try:
            again_s = await self.plan_once(started)
        except Exception:  # noqa: BLE001 - a single job must not end planning for all others
            again_s = self._plan_failed()
        else:
            self.health.succeeded()
        self._current = None
        self._planned_at = self._loop.time()
        plan_s = self._planned_at - started
        rest_s = min(LONGEST_REST_S, 2 * self._worked_s)  # so that planning takes at most a third of the time
        if not self._continues:  # a change does not rest after the plans for what others submitted before
            self._rests_until = self._planned_at + rest_s
        self._metrics.plans.observe(plan_s)
        # The plans that only continue take a ninth of the time: a change is planned while none of them is under way.
        continues = again_s == 0.0
        self._plan_again(min(LONGEST_REST_S, 8 * self._worked_s) if continues else again_s, continues=continues)
        if self._changed_meanwhile:
            self.wake()
        self._ended()

    async def plan_once(self, started: float) -> float | None:
        """Plan, and carry out the plan; return in how many seconds to plan again without a change, if at all."""
        now = self._now()
        self._unpinned.reserve_again()
        self._snapshot.catch_up()
        for event in self._run_times.changes(self._snapshot.state):
            self._snapshot.emit(event)
        self._changed_meanwhile = False  # what has caught up is in this plan
        self._metrics.account(self._snapshot)
        self._worked_s = 0.0
        planned = await self._planner.plan(now)
        self._worked_s = planned.seconds
        self._reasons.update(planned.changed)
        for uid in planned.gone:
            self._reasons.pop(uid, None)
        plan = msgspec.structs.replace(planned.plan, waiting=self._reasons)
        plan, settles_s = self._settling.settled(plan, self._snapshot.state.promises, started)
        if self._planner.outdated:  # after settling: what an outdated plan wanted to stop was wanted nevertheless
            plan = still_valid(self._snapshot.state, plan)
        plan = self._move_budget.admitted(plan, self._snapshot.state.promises)
        self._carrying_out = True
        try:
            with because_of(f"{self._name}-{next(self._numbers)}"):
                _log_plan(plan, self._loop.time() - started)
                self._carry_out(plan)
        finally:
            self._carrying_out = False
        self._changed_meanwhile |= not plan.empty  # a higher priority may preempt what this plan has just started
        if planned.more:
            return 0.0
        again_s = None if plan.again_at is None else plan.again_at - now
        return min((delay for delay in (again_s, settles_s) if delay is not None), default=None)

    def _plan_failed(self) -> float | None:
        """Count the failure; return the pause in seconds before the next plan, or None if the process ends instead."""
        log.exception("the plan failed")
        self._metrics.plan_failures.inc()
        try:
            self.health.failed()
        except PlanningFailedError as error:
            log.error("%s", error.message)
            self.failed.set()
            return None
        return self.health.pause_s

    def _plan_again(self, delay_s: float | None, *, continues: bool) -> None:
        if self._again:
            self._again.cancel()
        again = partial(self._wake, continues=continues)
        self._again = None if delay_s is None else self._loop.call_later(max(0.0, delay_s), again)


def _log_plan(plan: scheduler.Plan, took_s: float) -> None:
    """Log a line for the plan, unless it is empty, and one for each job that is stopped, resized or moved.

    A job that starts is logged by its pods' writes only; otherwise a thousand pods would have two lines each.
    """
    if plan.empty:
        return
    counts = {kind: len(getattr(plan, kind)) for kind in ("bind", "evict", "resize", "move")}
    shown = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    extra = fields(plan=counts, waiting=len(plan.waiting), took_ms=round(1000 * took_s, 1))
    log.info("planned in %.1f ms: %s; %d jobs wait", 1000 * took_s, shown, len(plan.waiting), extra=extra)
    for kind, job, reason in _decisions(plan):
        extra = fields(decision=kind, job=job, reason=reason.code.value, beneficiary=reason.beneficiary)
        log.info("%s %s: %s", kind, job, reason.message, extra=extra)


def _decisions(plan: scheduler.Plan) -> Iterator[tuple[str, str, Reason]]:
    yield from (("evict", evict.job, evict.reason) for evict in plan.evict)
    yield from (("resize", resize.job, resize.reason) for resize in plan.resize)
    yield from (("move", move.job, move.reason) for move in plan.move)
