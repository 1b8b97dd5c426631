"""The embedded cluster's planner raises: planning continues, and a daemon whose plans keep failing ends."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota import scheduler
from kfp_gpuquota.cluster.local.devices import ClusterConfig, discover_nodes
from kfp_gpuquota.cluster.local.driver import Driver
from kfp_gpuquota.cluster.local.home import Home
from kfp_gpuquota.cluster.local.storage.state import ClusterState
from kfp_gpuquota.cluster.local.storage.store import Store
from kfp_gpuquota.cluster.planning import MAX_FAILURES, PlanningHealth
from kfp_gpuquota.errors import PlanningFailedError
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def driver_with(plans: list[bool], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Driver, list[str]]]:
    """Return a driver whose plans raise as `plans` determines, without pauses, and its reports."""
    works, ended = scheduler.plan, []

    def plan(*arguments: Any) -> scheduler.Plan:
        if plans and not plans.pop(0):
            raise ZeroDivisionError("a fault of the planner's own")
        return works(*arguments)

    monkeypatch.setattr(scheduler, "plan", plan)
    home = Home(folder)
    home.create()
    store = Store(home.database)
    state = ClusterState(store, discover_nodes(ClusterConfig(gpus_per_node=1)), None)
    driver = Driver(home, state, give_up=lambda: ended.append("gave up"))
    driver.health = PlanningHealth(asyncio.get_running_loop().time, first_pause_s=0.0)
    try:
        yield driver, ended
    finally:
        driver.close()
        store.close()


def test_a_daemon_plans_again_after_a_plan_that_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        plans = [False] * (MAX_FAILURES - 1)
        with driver_with(plans, tmp_path, monkeypatch) as (driver, ended):
            driver.wake()
            async with asyncio.timeout(TIMEOUT_S):
                while plans or driver.health.failures:
                    await asyncio.sleep(0)
            assert not ended

    asyncio.run(scenario())


def test_a_daemon_whose_plans_keep_failing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        with driver_with([False] * 100, tmp_path, monkeypatch) as (driver, ended):
            driver.wake()
            async with asyncio.timeout(TIMEOUT_S):
                while not ended:
                    await asyncio.sleep(0)
            with pytest.raises(PlanningFailedError):
                driver.health.check()

    asyncio.run(scenario())
