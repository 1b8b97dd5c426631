"""A plan that raises: planning continues, and a process with repeated failures exits instead of stalling."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota import scheduler
from kfp_gpuquota.cluster.planning import MAX_FAILURES, PlanningHealth
from kfp_gpuquota.errors import PlanningFailedError
from tests.kubernetes.detached import detached
from tests.polling import until_async

if TYPE_CHECKING:
    from collections.abc import Callable


def failing(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """The planner raises so many times, then works; the calls so far."""
    works: Callable[..., Any] = scheduler.plan
    calls: list[int] = []

    def plan(*arguments: Any) -> scheduler.Plan:
        calls.append(1)
        if len(calls) <= times:
            raise ZeroDivisionError("a fault of the planner's own")
        return works(*arguments)  # type: ignore[no-any-return]

    monkeypatch.setattr(scheduler, "plan", plan)
    return calls


def test_a_plan_that_raises_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with detached() as test:
            test.controller.plans.health = PlanningHealth(asyncio.get_running_loop().time, first_pause_s=0.001)
            calls = failing(monkeypatch, MAX_FAILURES - 1)
            test.node()
            test.team("a")
            uid = test.pod("a", "first")
            await test.start()
            await until_async(lambda: test.sent(uid))
            assert len(calls) >= MAX_FAILURES
            assert test.controller.plans.health.healthy
            assert not test.controller.plans.failed.is_set()

    asyncio.run(scenario())


def test_plans_that_fail_again_and_again_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with detached() as test:
            test.controller.plans.health = PlanningHealth(asyncio.get_running_loop().time, first_pause_s=0.001)
            failing(monkeypatch, 1000)
            test.node()
            await test.start()
            await until_async(test.controller.plans.failed.is_set)
            assert test.controller.metrics.registry.get_sample_value("gpuquota_plan_failures_total") == MAX_FAILURES
            with pytest.raises(PlanningFailedError, match="5 plans in a row failed"):
                test.controller.plans.health.check()

    asyncio.run(scenario())


def test_health_is_bad_when_a_plan_is_needed_and_not_made() -> None:
    clock = [100.0]
    health = PlanningHealth(lambda: clock[0], max_overdue_s=60)
    seen = [health.healthy]
    clock[0] += 1000  # idle: no plan is needed
    seen.append(health.healthy)
    health.requested()
    clock[0] += 61
    seen.append(health.healthy)
    health.succeeded()
    seen.append(health.healthy)
    assert seen == [True, True, False, True]


def test_pauses_between_failed_plans_grow() -> None:
    health = PlanningHealth(lambda: 0.0, max_failures=4, first_pause_s=1.0)
    pauses = []
    for _ in range(3):
        health.failed()
        pauses.append(health.pause_s)
    assert pauses == [1.0, 2.0, 4.0]
    with pytest.raises(PlanningFailedError):
        health.failed()
