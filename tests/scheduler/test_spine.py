"""The rules that every user of the scheduler relies on, on small clusters."""

from __future__ import annotations

import pytest

from kfp_gpuquota.api import ReasonCode
from kfp_gpuquota.scheduler import JobCompleting, JobResumed, JobSuspended, NodeRemoved, Placement, QuotaRemoved
from tests.scheduler.world import World


@pytest.fixture
def pair() -> World:
    """One node of 2 GPUs, two teams with 1 guaranteed each."""
    world = World()
    world.node("node-1", 2)
    world.project("team-a", 1)
    world.project("team-b", 1)
    return world


@pytest.fixture
def farm() -> World:
    """Four nodes of 10, two teams with 20 guaranteed each."""
    world = World()
    for i in range(1, 5):
        world.node(f"node-{i}", 10)
    world.project("a", 20)
    world.project("b", 20)
    return world


def test_an_elastic_job_borrows_the_idle_gpu_and_gives_it_back_to_a_session(pair: World) -> None:
    pair.submit("train", "team-a", 1, 1, 2)
    pair.settle()
    assert pair.size("train") == 2
    pair.session("notebook", "team-b")
    decided = pair.step()
    (resize,) = decided.resize
    assert (resize.from_workers, resize.to_workers, len(resize.remove)) == (2, 1, 1)
    assert resize.reason.code is ReasonCode.LENT_GPUS_RETURNED
    assert resize.reason.message == (
        "shrunk from 2 to 1 GPUs: project team-b takes back its guaranteed GPU for notebook"
    )
    assert resize.reason.beneficiary == "notebook"
    (nominate,) = decided.nominate
    assert nominate.waiting_for == resize.remove
    assert decided.waiting["notebook"].code is ReasonCode.WAITS_FOR_RELEASE
    pair.settle()
    assert pair.size("notebook") == 1
    pair.remove("notebook")
    plans = pair.settle()
    assert pair.size("train") == 2
    grown = [r for p in plans for r in p.resize]
    assert grown[0].reason.message == "expanded from 1 to 2 GPUs: 1 GPU is idle"


def test_no_further_victim_is_taken_while_one_is_leaving(pair: World) -> None:
    pair.submit("train", "team-a", 1, 1, 2)
    pair.settle()
    pair.session("notebook", "team-b")
    pair.step()
    for _ in range(3):
        decided = pair.step()
        assert decided.empty
        assert [n.job for n in decided.nominate] == ["notebook"]


def test_the_newest_worker_goes_first(pair: World) -> None:
    pair.submit("train", "team-a", 1, 1, 2)
    pair.settle()
    newest = max(pair.workers)
    pair.session("notebook", "team-b")
    assert pair.step().resize[0].remove == (newest,)


def test_within_a_project_a_session_takes_what_is_lent(pair: World) -> None:
    world = World()
    world.node("node-1", 2)
    world.project("team-a", 2)
    world.submit("elastic1", "team-a", 1, 1, 2)
    world.settle()
    assert world.size("elastic1") == 2
    world.session("filler1", "team-a")
    world.settle()
    assert (world.size("elastic1"), world.size("filler1")) == (1, 1)
    world.remove("elastic1")
    world.remove("filler1")
    world.settle()
    assert not world.workers


def test_a_job_starts_with_less_than_it_requested_and_grows_when_it_can() -> None:
    world = World()
    world.node("node-1", 2)
    world.project("team-a", 2)
    world.session("filler2", "team-a")
    world.settle()
    world.submit("elastic2", "team-a", 2, 1, 2)
    plans = world.settle()
    assert world.size("elastic2") == 1
    assert [len(b.placements) for p in plans for b in p.bind] == [1]
    world.remove("filler2")
    world.settle()
    assert world.size("elastic2") == 2


def test_a_greedy_team_falls_to_its_guarantee_and_elastic_jobs_shrink_first(farm: World) -> None:
    farm.submit("elastic", "a", 10, 2, 10)
    for i in range(20):
        farm.submit(f"job-{i:02}", "a", 1)
    farm.settle()
    assert farm.held("a") == 30
    for i in range(20):
        farm.submit(f"new-{i:02}", "b", 1)
    farm.settle()
    assert (farm.held("a"), farm.held("b")) == (20, 20)
    assert farm.size("elastic") == 2
    assert [i for i in range(20) if not farm.size(f"job-{i:02}")] == [18, 19]


def test_a_stopped_job_keeps_its_place_in_the_queue(farm: World) -> None:
    for i in range(4):
        farm.submit(f"job-{i}", "a", 10)
    farm.settle()
    farm.submit("other", "b", 10)
    farm.settle()
    assert farm.size("job-3") == 0
    farm.submit("younger", "a", 10)
    farm.remove("other")
    farm.settle()
    assert (farm.size("job-3"), farm.size("younger")) == (10, 0)


def test_small_jobs_share_nodes_so_that_a_large_one_starts_at_once(farm: World) -> None:
    for i in range(6):
        farm.submit(f"small-{i}", "a", 3)
    farm.settle()
    assert len(set().union(*(farm.nodes_of(f"small-{i}") for i in range(6)))) == 2
    farm.submit("large", "b", 8)
    decided = farm.step()
    assert [b.job for b in decided.bind] == ["large"]
    assert not decided.evict


def test_spread_jobs_are_moved_together_only_when_that_lets_a_job_start() -> None:
    world = World()
    world.project("a", 20)
    world.project("b", 20)
    world.node("node-1", 4)
    world.submit("one", "a", 2)
    world.submit("two", "a", 2)
    world.settle()
    world.node("node-2", 4)
    world.submit("three", "a", 2)
    world.settle()
    world.remove("two")
    assert not world.settle()[0].move
    world.submit("large", "b", 4)
    decided = world.step()
    assert [m.job for m in decided.move] == ["one"] or [m.job for m in decided.move] == ["three"]
    assert decided.move[0].reason.code is ReasonCode.CONSOLIDATED
    world.settle()
    assert world.size("large") == 4
    assert world.size("one") == world.size("three") == 2


def test_a_project_may_use_all_that_is_idle_but_not_beyond_its_limit(farm: World) -> None:
    farm.project("static", 20, 20)
    for i in range(50):
        farm.submit(f"job-{i:02}", "a", 1)
    farm.submit("elastic", "static", 1, 1, 40)
    farm.settle()
    assert farm.held("a") == 39
    for i in range(50):
        farm.remove(f"job-{i:02}")
    farm.settle()
    assert farm.held("static") == 20


def test_a_session_within_quota_starts_though_trainings_must_give_way(farm: World) -> None:
    for i in range(40):
        farm.submit(f"job-{i:02}", "a", 1)
    farm.settle()
    farm.session("notebook", "a", 2)
    plans = farm.settle()
    assert farm.size("notebook") == 2
    assert sorted(e.job for p in plans for e in p.evict) == ["job-38", "job-39"]
    assert {e.reason.code for p in plans for e in p.evict} == {ReasonCode.PREEMPTED}


def test_a_session_over_quota_waits_with_the_reason(pair: World) -> None:
    pair.session("first", "team-a")
    pair.settle()
    pair.session("second", "team-a")
    decided = pair.step()
    assert decided.empty
    reason = decided.waiting["second"]
    assert reason.code is ReasonCode.OVER_QUOTA_BUILD
    assert "team-a" in reason.message


def test_sessions_are_never_victims(pair: World) -> None:
    pair.project("team-c", 2)
    pair.session("one", "team-a")
    pair.session("two", "team-b")
    pair.settle()
    pair.submit("train", "team-c", 2)
    assert pair.step().empty


def test_a_gang_starts_whole_or_not_at_all(farm: World) -> None:
    farm.project("b", 20, 20)
    farm.submit("gang", "b", 24, 16, 24)
    farm.submit("blocked", "b", 8)
    farm.settle()
    assert farm.size("gang") == 20
    assert farm.size("blocked") == 0


def test_a_running_elastic_job_does_not_grow_past_a_waiting_one(pair: World) -> None:
    pair.submit("first", "team-a", 1, 1, 2)
    pair.submit("second", "team-a", 1)
    pair.settle()
    assert (pair.size("first"), pair.size("second")) == (1, 1)


def test_quota_is_not_released_while_a_worker_still_runs() -> None:
    world = World()
    world.node("node-1", 4)
    world.project("team-a", 2, 2)
    world.submit("first", "team-a", 2)
    world.settle()
    world.remove("first")
    world.submit("second", "team-a", 2)
    decided = world.step()
    assert decided.empty
    assert decided.waiting["second"].code is ReasonCode.WAITS_FOR_RELEASE
    world.release()
    assert [b.job for b in world.step().bind] == ["second"]


def test_a_higher_priority_preempts_in_its_own_project_only(farm: World) -> None:
    farm.project("a", 20, 20)
    farm.submit("low", "a", 10)
    farm.submit("other", "b", 20, 10, 20, gpus_per_worker=10)
    farm.submit("low-2", "a", 10)
    farm.settle()
    farm.submit("high", "a", 10, priority=60)
    farm.settle()
    assert (farm.size("high"), farm.size("low"), farm.size("low-2"), farm.size("other")) == (10, 10, 0, 20)


def test_a_job_waits_for_its_node(farm: World) -> None:
    farm.submit("here", "a", 10, node="node-3")
    farm.settle()
    assert farm.nodes_of("here") == {"node-3"}
    farm.submit("nowhere", "a", 1, node="node-9")
    assert farm.step().waiting["nowhere"].code is ReasonCode.NO_SUCH_NODE


def test_a_job_that_fits_on_no_node_is_told_so(farm: World) -> None:
    farm.submit("huge", "a", 11)
    reason = farm.step().waiting["huge"]
    assert reason.code is ReasonCode.TOO_LARGE
    assert reason.message == "needs 11 GPUs; the largest node has 10"


def test_a_suspended_job_is_not_considered(pair: World) -> None:
    pair.submit("train", "team-a")
    pair.state.apply(JobSuspended("train"))
    decided = pair.step()
    assert decided.empty
    assert decided.waiting["train"].code is ReasonCode.SUSPENDED
    pair.state.apply(JobResumed("train"))
    assert len(pair.step().bind) == 1


def test_a_completing_job_does_not_grow_in_whatever_order_a_restart_reports_it(pair: World) -> None:
    pair.submit("train", "team-a", 1, 1, 2)
    pair.state.apply(JobCompleting("train"))  # before its workers
    pair.start("train", Placement("node-1", (0,)))
    assert pair.step().empty
    pair.state.apply(JobCompleting("train", completing=False))
    assert len(pair.step().resize) == 1


def test_nothing_is_placed_on_a_node_that_is_gone_and_its_workers_still_count(pair: World) -> None:
    pair.submit("train", "team-a")
    pair.settle()
    pair.state.apply(NodeRemoved("node-1"))
    pair.session("notebook", "team-b")
    decided = pair.step()
    assert decided.empty
    pair.remove("train")
    pair.release()
    assert "node-1" not in pair.state.ledger.hosts


def test_a_job_of_an_unknown_project_waits_and_starts_when_it_exists(pair: World) -> None:
    pair.submit("train", "team-x")
    assert "team-x does not exist" in pair.step().waiting["train"].message
    pair.project("team-x", 1)
    assert len(pair.step().bind) == 1


def test_a_removed_project_starts_nothing(pair: World) -> None:
    pair.submit("train", "team-a")
    pair.state.apply(QuotaRemoved("team-a"))
    assert pair.step().empty


def test_over_quota_goes_by_priority_and_then_by_weight(farm: World) -> None:
    farm.project("a", 0, None, over_quota_weight=3.0)
    farm.project("b", 0, None, over_quota_weight=1.0)
    for i in range(40):
        farm.submit(f"b-{i:02}", "b", 1)
    farm.settle()
    for i in range(40):
        farm.submit(f"a-{i:02}", "a", 1)
    farm.settle()
    assert (farm.held("a"), farm.held("b")) == (30, 10)
    farm.project("b", 0, None, priority=200)
    farm.settle()
    assert (farm.held("a"), farm.held("b")) == (0, 40)


def test_planning_changes_nothing_and_says_the_same_again(farm: World) -> None:
    farm.submit("one", "a", 30, 5, 40)
    farm.settle()
    farm.submit("two", "b", 8)
    assert farm.plan() == farm.plan()
