"""One sentence for each thing that is decided or waits, compared as a whole."""

from __future__ import annotations

from kfp_gpuquota.api import Order, ReasonCode, StopPolicy
from kfp_gpuquota.scheduler import why_not_larger
from tests.scheduler import test_victims
from tests.scheduler.test_growth import report
from tests.scheduler.world import World


def world_of(*nodes: int) -> World:
    world = World()
    for i, size in enumerate(nodes):
        world.node(f"node-{i}", size)
    return world


def why(world: World, job: str) -> str:
    return world.step().waiting[job].message


def test_over_its_limit() -> None:
    world = world_of(4)
    world.project("team-a", 2, 2)
    world.submit("first", "team-a", 2)
    world.settle()
    world.submit("second", "team-a", 2)
    assert why(world, "second") == (
        "needs 2 GPUs; project team-a holds 2 of its limit of 2, "
        "so it starts when it releases 2 GPUs or its limit grows by as much"
    )


def test_a_session_over_quota() -> None:
    world = world_of(4)
    world.project("team-a", 1)
    world.session("first", "team-a")
    world.settle()
    world.session("second", "team-a")
    assert why(world, "second") == (
        "needs 1 GPU; project team-a uses 1 GPU of its guaranteed 1 GPU for jobs that cannot be preempted, and such "
        "jobs do not borrow, so it starts when those release 1 GPU or the guaranteed quota grows by as much"
    )


def test_fragmented() -> None:
    world = world_of(2, 2)
    world.project("team-a", 4)
    world.session("one", "team-a")
    world.settle()
    world.submit("filler", "team-a", 1)
    world.settle()
    world.session("two", "team-a")
    world.settle()
    world.remove("filler")
    world.settle()
    world.submit("pair", "team-a", 2)
    reason = world.step().waiting["pair"]
    assert reason.code is ReasonCode.FRAGMENTED
    assert reason.message == (
        "needs 2 GPUs; 2 are idle, but the largest free block on one node is 1 on node-0, "
        "so it starts when 1 more is released there"
    )
    assert reason.details == {"needed_gpus": 2.0, "idle_gpus": 2, "largest_block": 1, "node": "node-0"}


def test_beyond_its_fair_share() -> None:
    world = world_of(4)
    world.project("team-a", 2)
    world.project("team-b", 2)
    world.submit("a", "team-a", 2)
    world.submit("b", "team-b", 2)
    world.settle()
    world.submit("more", "team-a", 1)
    assert why(world, "more") == (
        "needs 1 GPU; 0 are idle, and project team-a holds 2 of its fair share of 2, "
        "so it starts when 1 more is released"
    )


def test_nothing_may_be_taken() -> None:
    world = world_of(2)
    world.project("team-a", 2)
    world.project("team-b", 2)
    world.session("a", "team-a", 2)
    world.settle()
    world.submit("b", "team-b", 1)
    assert why(world, "b") == (
        "needs 1 GPU; 0 are idle, and nothing that runs may be taken for it, so it starts when 1 more is released"
    )


def test_stopped_for_a_higher_priority() -> None:
    world = world_of(2)
    world.project("team-a", 2)
    world.submit("low", "team-a", 2)
    world.settle()
    world.submit("high", "team-a", 2, priority=60)
    (evict,) = world.step().evict
    assert evict.reason.message == (
        "stopped, and back in the queue with its age: high has a higher priority in project team-a"
    )
    assert evict.reason.code is ReasonCode.PREEMPTED


def test_stopped_for_a_guarantee() -> None:
    world = world_of(2)
    world.project("team-a", 0)
    world.project("team-b", 2)
    world.submit("greedy", "team-a", 2)
    world.settle()
    world.submit("own", "team-b", 2)
    decided = world.step()
    assert decided.evict[0].reason.message == (
        "stopped, and back in the queue with its age: project team-b takes back its guaranteed 2 GPUs for own"
    )
    assert decided.waiting["own"].message == "starts when 1 worker of greedy is gone"


def test_lent_within_a_project() -> None:
    world = world_of(2)
    world.project("team-a", 2)
    world.submit("elastic", "team-a", 1, 1, 2)
    world.settle()
    world.session("notebook", "team-a")
    (resize,) = world.step().resize
    assert resize.reason.message == (
        "shrunk from 2 to 1 GPUs: it was only lent, and notebook of project team-a needs it"
    )


def test_starting_with_less_than_requested() -> None:
    world = world_of(1)
    world.project("team-a", 1)
    world.submit("elastic", "team-a", 2, 1, 2)
    (bind,) = world.step().bind
    assert bind.reason.message == "starts with 1 GPU of the 2 requested"


def test_jobs_that_lack_the_same_do_not_all_start_when_it_is_released() -> None:
    world = world_of(2)
    world.project("team-a", 2)
    world.submit("runs", "team-a", 2)
    world.settle()
    for number in range(3):
        world.submit(f"waits{number}", "team-a", 2)
    reasons = {reason.message for reason in world.step().waiting.values()}
    assert reasons == {
        "needs 2 GPUs; 0 are idle, and project team-a holds 2 of its fair share of 2, so the first of 3 such jobs "
        "starts when 2 more are released"
    }


def not_larger(world: World, job: str) -> str:
    reason = why_not_larger(world.state, job, world.now)
    return "" if reason is None else reason.message


def test_a_job_that_does_not_grow_has_a_reason_that_names_what_prevents_it() -> None:
    world = test_victims.world_of(2, team=0)
    world.submit("elastic", "team", 1, 1, 4, cool_down_s=0.0)
    world.settle()
    assert world.size("elastic") == 2
    assert not_larger(world, "elastic") == "needs 1 GPU; 0 are idle, so it grows when 1 more is released"
    world.project("team", 0, 2)
    world.node("more", 2)
    assert not_larger(world, "elastic").startswith("needs 1 GPU; project team holds 2 of its limit of 2")
    world.project("team", 0)
    assert not_larger(world, "elastic") == "", "it grows in the next plan"
    world.project("team", 0, stop_policy=StopPolicy.HOLD)
    assert "project team is held by an administrator" in not_larger(world, "elastic")


def test_a_job_that_does_not_grow_has_grown_recently_or_gains_nothing() -> None:
    world = test_victims.world_of(4, team=4)
    world.submit("runs", "team", 2)
    world.submit("elastic", "team", 1, 1, 4, cool_down_s=60.0)
    world.step()
    world.remove("runs")
    world.release()
    world.now += 100
    world.step()
    assert world.size("elastic") == 4
    world.state.jobs["elastic"].most = 5
    assert not_larger(world, "elastic") == "it has grown recently, and does not grow again for 1m (cool-down)"
    world.now += 100
    world.node("more", 2)
    for size, rate in ((4, 20.0), (5, 20.0)):
        report(world, "elastic", size, rate, pause_s=30.0)
    assert not_larger(world, "elastic") == (
        "GPUs are idle, but by what it has measured it trains no faster with more than 4 GPUs"
    )


def test_growth_beyond_the_request_does_not_wait_for_the_first_job_of_a_strict_project() -> None:
    world = test_victims.world_of(2, team=2)
    world.project("team", 2, order=Order.STRICT)
    world.submit("elastic", "team", 1, 1, 4, cool_down_s=0.0)
    world.submit("runs", "team", 1)
    world.settle()
    world.submit("large", "team", 2)
    world.plan()
    assert not_larger(world, "elastic") == "needs 1 GPU; 0 are idle, so it grows when 1 more is released"
