"""A job is not stopped for others before it has run for its minimum time; the plan states when that ends."""

from __future__ import annotations

from kfp_gpuquota.api import ReasonCode
from tests.scheduler.test_victims import victims, world_of


def test_a_job_is_not_reclaimed_before_its_minimum_run_time_and_is_right_after_it() -> None:
    world = world_of(1, greedy=0, owner=1)
    world.submit("train", "greedy", 1, min_run_time_s=60)
    world.step()
    started_at = world.now
    world.submit("needy", "owner", 1)
    decided = world.step()
    assert decided.empty
    assert decided.again_at == started_at + 60
    world.now = started_at + 59
    assert [e.job for e in world.step().evict] == ["train"]


def test_the_job_that_waits_for_it_is_told_so() -> None:
    world = world_of(1, greedy=0, owner=1)
    world.submit("train", "greedy", 1, min_run_time_s=60)
    world.settle()
    started_at = world.state.jobs["train"].started_at
    world.submit("needy", "owner", 1)
    world.now = started_at + 20
    reason = world.plan().waiting["needy"]
    assert reason.code is ReasonCode.MIN_RUN_TIME
    assert reason.message == (
        "needs 1 GPU; what may be taken for it has not yet run for its minimum time, so it starts when 1 more is "
        "released or that has passed, for the first of them in 40 s"
    )
    assert reason.details["min_run_time_left_s"] == 40


def test_another_job_goes_in_the_place_of_one_that_is_too_young() -> None:
    world = world_of(2, greedy=0, owner=2)
    world.submit("old", "greedy", 1, priority=60)
    world.submit("young", "greedy", 1, priority=10, min_run_time_s=600)
    world.settle()
    world.submit("needy", "owner", 1)
    assert victims(world) == {"old": 1}


def test_workers_above_the_minimum_are_taken_all_the_same() -> None:
    world = world_of(2, greedy=0, owner=2)
    world.submit("elastic", "greedy", 2, 1, 2, min_run_time_s=600)
    world.settle()
    world.submit("needy", "owner", 1)
    assert victims(world) == {"elastic": 1}


def test_a_higher_priority_of_the_same_project_waits_too() -> None:
    world = world_of(1, team=1)
    world.submit("train", "team", 1, min_run_time_s=60)
    world.settle()
    world.submit("urgent", "team", 1, priority=90)
    decided = world.step()
    assert decided.empty
    assert decided.again_at is not None


def test_the_time_is_that_of_the_present_run() -> None:
    world = world_of(1, greedy=0, owner=1)
    world.submit("train", "greedy", 1, min_run_time_s=60)
    world.settle()
    world.submit("needy", "owner", 1)
    world.settle()
    world.remove("needy")
    world.settle()
    assert world.size("train") == 1
    restarted_at = world.state.jobs["train"].started_at
    world.submit("again", "owner", 1)
    assert world.step().again_at == restarted_at + 60


def test_a_job_is_not_moved_before_its_minimum_run_time() -> None:
    world = world_of(2, 1, a=1, b=2)
    world.submit("blocker", "a", 1, node="n1")
    world.submit("small", "a", 1, min_run_time_s=600)
    world.settle()
    assert world.nodes_of("small") == {"n0"}
    world.remove("blocker")
    world.settle()
    world.submit("pair", "b", 2)
    assert world.step().empty


def test_a_plan_does_not_wait_for_a_time_that_would_change_nothing() -> None:
    world = world_of(1, greedy=0, owner=0)
    world.submit("train", "greedy", 1, min_run_time_s=600)
    world.settle()
    world.submit("other", "owner", 1)
    world.submit("large", "owner", 2)
    assert world.step().again_at is None


def test_borrowed_gpus_are_reclaimed_once_the_cap_is_over_and_a_teams_own_priorities_wait_for_all_of_it() -> None:
    world = world_of(1, greedy=0, owner=1)
    world.state.ledger.reclaim_shelter_s = 10.0
    world.submit("train", "greedy", 1, min_run_time_s=600)
    world.step()
    started_at = world.now
    world.submit("needy", "owner", 1)
    decided = world.step()
    assert decided.empty
    assert decided.again_at == started_at + 10
    world.now = started_at + 9
    assert [e.job for e in world.step().evict] == ["train"]
    own = world_of(1, team=1)
    own.state.ledger.reclaim_shelter_s = 10.0
    own.submit("train", "team", 1, min_run_time_s=600)
    own.settle()
    own.submit("urgent", "team", 1, priority=90)
    own.now += 300
    assert own.step().empty
