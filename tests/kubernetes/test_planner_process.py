"""The planner's process: its plans are those of the controller's own state, and it may die or hang at any time."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import JobSpec
from kfp_gpuquota.cluster.kubernetes.planner.process import PlannerError, PlannerProcess
from kfp_gpuquota.scheduler import Event, JobRemoved, JobSubmitted, NodeChanged, Plan, QuotaChanged, WorkerGone, plan
from kfp_gpuquota.scheduler.actions.revalidate import still_valid
from tests.kubernetes.detached import detached
from tests.polling import until_async
from tests.scheduler.world import World

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kfp_gpuquota.scheduler import State


def cluster() -> World:
    """Eight GPUs that team a holds, of which team b may reclaim four, and a job of b that waits."""
    world = World()
    world.node("n0", 8)
    for team in "ab":
        world.project(team, 4)
    for number in range(8):
        world.submit(f"held-{number}", "a")
    world.settle()
    world.submit("waits", "b", 2)
    return world


@asynccontextmanager
async def planning(state: State, hang_s: float = 30.0) -> AsyncIterator[PlannerProcess]:
    process = PlannerProcess(state, hang_s)
    try:
        yield process
    finally:
        await process.close()


def feeding(world: World, process: PlannerProcess) -> Callable[[Event], None]:
    def feed(event: Event) -> None:
        world.state.apply(event)
        process.feed(event)

    return feed


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_its_plan_is_that_of_the_controllers_state_after_events_too() -> None:
    async def scenario() -> None:
        world = cluster()
        async with planning(world.state) as process:
            feed = feeding(world, process)
            for event in (
                None,
                JobSubmitted("more", JobSpec(name="more", project="b", command=("true",), gpus=1), 50.0),
                JobRemoved("held-3"),
                NodeChanged(world.machines["n0"]),
                QuotaChanged(world.projects["a"]),
            ):
                if event is not None:
                    feed(event)
                planned, here = await process.plan(100.0), plan(world.state, 100.0)
                assert (planned.plan.evict, planned.plan.nominate) == (here.evict, here.nominate)
                assert not planned.more
            assert not process.outdated

    asyncio.run(scenario())


def test_reasons_are_sent_when_they_change() -> None:
    async def scenario() -> None:
        world = cluster()
        async with planning(world.state) as process:
            first = await process.plan(100.0)
            assert first.changed.keys() == {"waits"}
            assert not (await process.plan(100.0)).changed
            feeding(world, process)(JobRemoved("waits"))
            assert (await process.plan(100.0)).gone == ["waits"]

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_died_or_hangs_is_replaced_and_the_failure_is_counted(number: signal.Signals) -> None:
    async def scenario() -> None:
        world = cluster()
        async with planning(world.state, hang_s=0.5) as process:
            before = await process.plan(100.0)
            pid = process.pid
            feeding(world, process)(JobRemoved("held-0"))
            os.kill(pid, number)
            with pytest.raises(PlannerError, match=r"has ended|has not answered"):
                await process.plan(100.0)
            assert is_gone(pid)
            after = await process.plan(100.0)
            assert after.plan != before.plan
            assert after.plan.evict == plan(world.state, 100.0).evict

    asyncio.run(scenario())


def test_a_plan_that_raises_is_reported_and_the_process_goes_on() -> None:
    async def scenario() -> None:
        world = cluster()
        broken = world.state.jobs["waits"].pending
        world.state.jobs["waits"].pending = None  # type: ignore[assignment]
        async with planning(world.state) as process:
            with pytest.raises(PlannerError, match="TypeError"):
                await process.plan(100.0)
            assert not is_gone(process.pid)
        world.state.jobs["waits"].pending = broken

    asyncio.run(scenario())


def test_it_ends_with_the_controller() -> None:
    async def scenario() -> int:
        async with planning(cluster().state) as process:
            await process.plan(100.0)
            return process.pid

    assert is_gone(asyncio.run(scenario()))


def decided() -> tuple[World, Plan]:
    world = cluster()
    found = plan(world.state, world.now)
    assert found.evict
    assert found.nominate
    return world, found


def test_a_plan_of_the_present_state_is_carried_out_whole() -> None:
    world, found = decided()
    before = world.state.ledger.state
    assert still_valid(world.state, found) == found
    assert world.state.ledger.state == before
    world.submit("idle", "a")
    for worker in world.of("held-0"):
        world.exit(worker)
    world.state.apply(JobRemoved("held-0"))
    starts = plan(world.state, world.now)
    assert starts.bind
    assert still_valid(world.state, starts) == starts


def test_no_worker_is_stopped_for_a_job_that_was_deleted_meanwhile() -> None:
    world, found = decided()
    world.state.apply(JobRemoved("waits"))
    assert still_valid(world.state, found).empty


def test_a_worker_that_has_ended_meanwhile_is_not_stopped() -> None:
    world, found = decided()
    victim = found.evict[0].workers[0]
    world.state.apply(WorkerGone(victim))
    assert victim not in {worker for evict in still_valid(world.state, found).evict for worker in evict.workers}


@pytest.mark.parametrize("what", ["node", "limit", "taken", "job"])
def test_a_start_that_does_not_fit_any_more_is_dropped(what: str) -> None:
    world = World()
    world.node("n0", 1)
    for team in "ab":
        world.project(team, 1)
    world.submit("first", "a")
    found = plan(world.state, world.now)
    assert [one.job for one in found.bind] == ["first"]
    match what:
        case "node":
            world.set_ready("n0", ready=False)
        case "limit":
            world.project("a", 0, limit=0)
        case "taken":
            world.submit("other", "b")
            world.start("other", found.bind[0].placements[0])
        case "job":
            world.state.apply(JobRemoved("first"))
    assert still_valid(world.state, found).empty


def test_the_controller_serves_its_loop_while_a_plan_is_made() -> None:
    async def scenario() -> None:
        async with detached(planner=PlannerProcess) as test:
            test.node()
            test.team("a")
            await test.start()
            await until_async(lambda: test.controller._planner.pid and not test.controller.plans.busy)  # type: ignore[attr-defined]
            pid = test.controller._planner.pid  # type: ignore[attr-defined]
            os.kill(pid, signal.SIGSTOP)  # a plan that takes long
            uid = test.pod("a", "waits")
            late = test.pod("a", "late", gpus=8)
            for _ in range(50):
                await asyncio.sleep(0.001)
            assert not test.sent(uid)
            test.see("/api/v1/pods", {"metadata": {"name": "late", "namespace": "a", "uid": late}}, "DELETED")
            os.kill(pid, signal.SIGCONT)
            await until_async(lambda: test.sent(uid))
            await test.controller._planner.close()

    asyncio.run(scenario())
