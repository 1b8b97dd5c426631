"""The clock of the controller's machine is set while it leads: what waits for a moment waits no longer, and no less."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota import scheduler
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.steady_clock import SteadyClock
from tests.kubernetes.detached import JOBS, Detached, detached

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kfp_gpuquota.scheduler.state.state import State

DAY_S = 86_400.0
NOON = 1_800_000_000.0
TEMPLATE = {"spec": {"containers": [{"name": "main", "image": "none"}]}}


class Machine:
    """A machine's clock that tests set, and one of the seconds since boot."""

    def __init__(self) -> None:
        self.time, self.since_boot = NOON, 0.0

    def passes(self, seconds: float) -> None:
        self.time += seconds
        self.since_boot += seconds


def with_machine(scenario: Callable[[Detached, Machine], Awaitable[None] | None]) -> None:
    """Play the scenario to a controller on such a machine, which knows no job yet."""

    async def all_of_it() -> None:
        machine = Machine()
        clock = SteadyClock(0.0, lambda: machine.time, lambda: machine.since_boot)
        async with detached(clock=clock) as test:
            await test.start()
            if (more := scenario(test, machine)) is not None:
                await more

    asyncio.run(all_of_it())


def see_job(test: Detached, spec: dict[str, Any], status: dict[str, Any]) -> str:
    metadata = {"name": "train", "namespace": "team", "uid": "train", "generation": 1}
    body = {"apiVersion": labels.API_VERSION, "kind": "ElasticJob", "metadata": metadata}
    test.see(JOBS, {**body, "spec": {"gpus": 1, "template": TEMPLATE, **spec}, "status": status})
    return "train"


def due_in(test: Detached, uid: str) -> float:
    """Seconds until the job's next deadline, if it is set now."""
    test.controller.elastic._timers.set(uid)
    return test.controller.elastic._timers._timers[uid].when() - asyncio.get_running_loop().time()


def test_an_ended_job_is_deleted_in_time_after_the_clock_was_set_back() -> None:
    def scenario(test: Detached, machine: Machine) -> None:
        ended = {"phase": "Succeeded", "completionTime": datetime.fromtimestamp(NOON, UTC).isoformat()}
        uid = see_job(test, {"ttlSecondsAfterFinished": 1000}, ended)
        assert due_in(test, uid) == pytest.approx(1000, abs=60)
        machine.passes(300)
        due_in(test, uid)
        machine.time -= DAY_S
        machine.passes(300)
        assert due_in(test, uid) == pytest.approx(400, abs=60)

    with_machine(scenario)


@pytest.mark.parametrize("jump_s", [-DAY_S, DAY_S])
def test_a_lease_ends_when_its_time_is_over_whatever_the_clock_says(jump_s: float) -> None:
    def scenario(test: Detached, machine: Machine) -> None:
        uid = see_job(test, {"lease": {"holder": "launcher", "durationSeconds": 500}}, {})
        machine.time += jump_s
        assert due_in(test, uid) == pytest.approx(500, abs=60)

    with_machine(scenario)


def test_the_time_of_plans_never_decreases(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_at: list[float] = []
    plan = scheduler.plan

    def observed(state: State, now: float) -> scheduler.Plan:
        planned_at.append(now)
        return plan(state, now)

    async def scenario(test: Detached, machine: Machine) -> None:
        await test.controller.plans.plan_once(0.0)
        machine.time -= DAY_S
        machine.passes(5)
        await test.controller.plans.plan_once(0.0)
        assert planned_at == [NOON, NOON + 5]

    monkeypatch.setattr(scheduler, "plan", observed)
    with_machine(scenario)
