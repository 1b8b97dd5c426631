"""A project that is held starts nothing; one that drains also loses what can be preempted. Both for those below it."""

from __future__ import annotations

import pytest

from kfp_gpuquota.api import Kind, ReasonCode, StopPolicy
from kfp_gpuquota.scheduler import plan
from kfp_gpuquota.scheduler.actions.revalidate import still_valid
from kfp_gpuquota.scheduler.dump import take_dump
from kfp_gpuquota.scheduler.dump.reading import read_state
from kfp_gpuquota.scheduler.forecast import RunTime, expected_starts
from tests.scheduler.world import World

HOLD, DRAIN, NONE = StopPolicy.HOLD, StopPolicy.HOLD_AND_DRAIN, StopPolicy.NONE


def world_of(gpus: int = 8) -> World:
    world = World()
    world.node("n0", gpus)
    world.project("a", 4)
    world.project("b", 0)
    return world


def test_nothing_of_a_held_project_starts_and_all_of_it_does_afterwards_with_its_age() -> None:
    world = world_of()
    world.project("a", 4, stop_policy=HOLD)
    world.submit("old", "a", 4)
    world.submit("young", "b", 8)
    world.settle()
    assert (world.size("old"), world.size("young")) == (0, 8)
    reason = world.plan().waiting["old"]
    assert reason.code is ReasonCode.PROJECT_HELD
    assert reason.message == (
        "project a is held by an administrator, so that none of its jobs starts (stop policy Hold)"
    )
    world.project("a", 4)
    world.settle()
    assert world.size("old") == 4


def test_what_runs_goes_on_at_its_size_and_a_lost_worker_of_a_gang_is_replaced() -> None:
    world = world_of()
    world.submit("elastic", "a", 2, 2, 8)
    world.submit("filler", "b", 4)
    world.settle()
    world.project("a", 4, stop_policy=HOLD)
    world.remove("filler")
    world.release()
    before = world.size("elastic")
    world.settle()
    assert world.size("elastic") == before < 8, "it grows no more"
    for worker in world.of("elastic")[: before - 1]:
        world.crash(worker)
    world.settle()
    assert world.size("elastic") == 2, "its gang is completed, and no more"


def test_what_is_idle_and_what_a_held_project_borrows_is_for_others() -> None:
    world = world_of()
    world.submit("borrower", "b", 2, 1, 8)
    world.settle()
    world.submit("waiting", "b", 1)
    world.project("b", 0, stop_policy=HOLD)
    world.submit("own", "a", 4)
    world.settle()
    assert (world.size("own"), world.size("waiting")) == (4, 0)


def test_a_project_that_drains_loses_all_but_what_cannot_be_preempted() -> None:
    world = world_of()
    world.session("notebook", "a", 1)
    world.submit("core", "a", 3, 2, 6, preemptible=False)
    world.submit("train", "b", 1)
    world.settle()
    world.project("a", 4, stop_policy=DRAIN)
    world.project("b", 0, stop_policy=DRAIN)
    decided = world.step()
    (evict,) = decided.evict
    assert not decided.waiting, "it runs until it has been asked to stop"
    assert evict.reason.code is ReasonCode.PROJECT_DRAINED
    assert evict.reason.message == (
        "stopped, and back in the queue with its age: project b is drained (stop policy HoldAndDrain)"
    )
    world.release()
    world.settle()
    assert (world.size("notebook"), world.size("core"), world.size("train")) == (1, 2, 0)
    assert world.plan().waiting["train"].details == {"stop_policy": "HoldAndDrain"}


@pytest.mark.parametrize("policy", [HOLD, DRAIN])
def test_a_department_holds_the_projects_below_it(policy: StopPolicy) -> None:
    world = world_of()
    world.project("above", 8)
    world.project("below", 4, parent="above")
    world.submit("job", "below", 2, 1, 2)
    world.submit("later", "below", 8)
    world.settle()
    world.project("above", 8, stop_policy=policy)
    world.settle()
    assert world.size("job") == (2 if policy is HOLD else 0)
    assert "project above is" in world.plan().waiting["later"].message
    world.project("below", 4)  # moved out of it
    world.settle()
    assert world.size("job") == 2


@pytest.mark.parametrize("department", ["", "above"])
def test_a_job_in_a_pool_without_nodes_is_held_and_let_go_as_any_other(department: str) -> None:
    """A pool that is scaled to zero has jobs before it has nodes: such a job stayed held for good."""
    world = world_of()
    if department:
        world.project(department, 4)
        world.project("a", 4, parent=department)
    world.submit("job", "a", 1, node_pool="a100")
    for policy in (HOLD, NONE):
        name = department or "a"
        world.project(name, 4, stop_policy=policy)
        assert ("job" in world.state.halted) is (policy is HOLD)
    world.node("n1", 1, pool="a100")
    world.step()
    assert world.size("job") == 1


def test_a_job_for_which_room_is_made_gives_it_up_when_its_project_is_held() -> None:
    world = world_of()
    world.submit("lent", "b", 8, 1)
    world.settle()
    world.submit("own", "a", 4)
    world.step()
    assert world.state.promises
    world.project("a", 4, stop_policy=HOLD)
    world.step()
    assert not world.state.promises
    world.settle()
    assert (world.size("own"), world.size("lent")) == (0, 8)


def test_no_worker_of_a_held_project_is_moved_not_even_by_a_plan_that_was_made_before() -> None:
    world = World()
    world.project("a", 8)
    world.project("b", 4)
    for node in ("n0", "n1"):
        world.node(node, 2)
    for job in range(4):
        world.submit(f"j{job}", "a", 1)
    world.settle()
    for node in ("n0", "n1"):
        world.remove(min(job for job in world.specs if world.nodes_of(job) == {node}))
    world.release()
    world.submit("whole", "b", 2)
    decided = world.plan()
    assert decided.move
    world.project("a", 8, stop_policy=HOLD)
    late = still_valid(world.state, decided)
    assert (late.move, late.nominate, late.promises) == ((), (), {})
    assert not world.plan().move


def test_sessions_of_a_held_project_wait_and_have_no_expected_start() -> None:
    world = world_of()
    world.project("a", 4, stop_policy=HOLD)
    world.submit("session", "a", 1, kind=Kind.BUILD)
    world.settle()
    assert not expected_starts(world.state, world.now, lambda _: RunTime((60.0,)))


def test_a_dump_of_held_projects_plans_the_same() -> None:
    world = world_of()
    world.submit("job", "a", 2)
    world.settle()
    world.submit("next", "a", 2)
    world.project("a", 4, stop_policy=DRAIN)
    dump = take_dump(world.state, world.now, "test")
    assert plan(read_state(dump), world.now) == world.plan()
