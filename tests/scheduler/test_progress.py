"""A training's reports determine which job shrinks, which grows, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.scheduler import ProgressReported, WorkerStarted
from tests.scheduler.test_victims import victims, world_of

if TYPE_CHECKING:
    from tests.scheduler.world import World


def report(world: World, job: str, step: int = 0, **output: float) -> None:
    world.state.apply(ProgressReported(job, step, world.now, **output))  # type: ignore[arg-type]


def pair_of_borrowers() -> World:
    """Two jobs of the same priority, `old` 100 s older and longer running, and an owner without jobs."""
    world = world_of(2, greedy=0, owner=2)
    world.submit("old", "greedy", 1)
    world.settle()
    world.now += 100
    world.submit("young", "greedy", 1)
    world.settle()
    world.now += 100
    return world


@pytest.mark.parametrize(
    ("why", "saved", "lost"),
    [
        ("neither reports: what has run for less", {}, "young"),
        ("the older one has just saved", {"old": 1}, "old"),
        ("both saved, the older one later", {"old": 5, "young": 50}, "old"),
        ("both saved, the younger one later", {"old": 50, "young": 5}, "young"),
        ("a checkpoint of before this run does not count", {"old": 500}, "young"),
    ],
)
def test_the_job_that_loses_the_least_work_goes(why: str, saved: dict[str, float], lost: str) -> None:
    world = pair_of_borrowers()
    for job, ago in saved.items():
        report(world, job, checkpoint_at=world.now - ago)
    world.submit("needy", "owner", 1)
    assert victims(world) == {lost: 1}, why


def test_priority_goes_before_what_is_lost() -> None:
    world = world_of(2, greedy=0, owner=2)
    world.submit("low", "greedy", 1, priority=10)
    world.submit("high", "greedy", 1)
    world.settle()
    report(world, "high", checkpoint_at=world.now)
    world.submit("needy", "owner", 1)
    assert victims(world) == {"low": 1}


def test_a_worker_above_the_gang_takes_no_work_with_it_so_the_youngest_job_gives_it() -> None:
    world = world_of(4, greedy=0, owner=4)
    world.submit("old", "greedy", 2, 1, 2)
    world.submit("young", "greedy", 2, 1, 2)
    world.settle()
    report(world, "old", checkpoint_at=world.now)
    world.submit("needy", "owner", 1)
    assert victims(world) == {"young": 1}


def growing(cool_down_s: float = 0.0) -> World:
    """Two elastic jobs with their one GPU each, on a node with two more that a session holds."""
    world = world_of(4, team=4)
    world.session("session", "team", 2)
    world.settle()
    world.submit("a", "team", 1, 1, 4, cool_down_s=cool_down_s)
    world.submit("b", "team", 1, 1, 4, cool_down_s=cool_down_s)
    world.settle()
    assert (world.size("a"), world.size("b")) == (1, 1)
    return world


def test_without_measurements_idle_gpus_are_lent_in_turns() -> None:
    world = growing()
    world.remove("session")
    world.settle()
    assert (world.size("a"), world.size("b")) == (2, 2)


def test_an_idle_gpu_goes_where_it_helps_most() -> None:
    world = growing()
    report(world, "a", throughput=100.0, workers=1)
    report(world, "a", throughput=130.0, workers=2)
    report(world, "b", throughput=10.0, workers=1)
    report(world, "b", throughput=19.0, workers=2)
    world.remove("session")
    world.settle()
    assert (world.size("a"), world.size("b")) == (1, 3)


@pytest.mark.parametrize(
    ("at_two", "pause_s", "grows"), [(120.0, 2.0, True), (100.1, 2.0, False), (90.0, 2.0, False), (90.0, 0.02, True)]
)
def test_a_job_that_changes_at_a_cost_grows_only_if_that_pays(at_two: float, pause_s: float, grows: bool) -> None:
    """One that changes in place gets what nobody gains by."""
    world = growing()
    report(world, "a", throughput=100.0, workers=1, pause_s=pause_s)
    report(world, "a", throughput=at_two, workers=2, pause_s=pause_s)
    world.remove("session")
    world.settle()
    assert (world.size("a"), world.size("b")) == (1, 3)
    world.node("more", 2)
    world.settle()
    assert (world.size("a") > 1, world.size("b")) == (grows, 4)


def test_steps_per_second_stand_for_a_throughput_that_is_not_told() -> None:
    world = growing()
    for job, at_two in (("a", 11), ("b", 20)):
        for workers, steps in ((1, 10), (2, at_two)):
            report(world, job, step=0, workers=workers)
            world.now += 10
            report(world, job, step=steps, workers=workers)
    world.remove("session")
    world.settle()
    assert (world.size("a"), world.size("b")) == (1, 3)


def test_a_throughput_that_is_told_replaces_what_was_counted() -> None:
    world = growing()
    report(world, "a", step=0)
    world.now += 1
    report(world, "a", step=50)
    assert world.state.jobs["a"].throughput == {1: 50.0}
    report(world, "a", step=51, throughput=3200.0)
    world.now += 1
    report(world, "a", step=60)
    assert world.state.jobs["a"].throughput == {1: 3200.0}


def lend_and_take_back(world: World) -> float:
    """A session takes a GPU of the training and ends; returns when the training had last grown."""
    grown_at = world.state.jobs["train"].grown_at
    world.session("notebook", "b")
    world.step()
    world.release()
    world.step()
    assert (world.size("train"), world.size("notebook")) == (1, 1)
    world.remove("notebook")
    world.release()
    return grown_at


def test_a_job_that_gave_a_gpu_back_for_a_while_has_it_again_as_soon_as_it_is_idle() -> None:
    world = world_of(2, a=1, b=1)
    world.submit("train", "a", 1, 1, 2, cool_down_s=30)
    world.settle()
    lend_and_take_back(world)
    assert [r.to_workers for r in world.step().resize] == [2]


def test_a_job_that_is_shrunk_again_and_again_grows_once_in_its_cool_down_and_the_plan_says_when() -> None:
    world = world_of(2, a=1, b=1)
    world.submit("train", "a", 1, 1, 2, cool_down_s=30)
    world.settle()
    lend_and_take_back(world)
    world.step()
    grown_at = lend_and_take_back(world)
    decided = world.step()
    assert (decided.empty, decided.again_at) == (True, grown_at + 30)
    world.now = grown_at + 29
    assert [r.to_workers for r in world.step().resize] == [2]


def test_the_same_holds_for_growth_up_to_the_request() -> None:
    world = world_of(2, a=1, b=1)
    world.submit("train", "a", 2, 1, 2, cool_down_s=30)
    world.settle()
    lend_and_take_back(world)
    assert [r.to_workers for r in world.step().resize] == [2]
    grown_at = lend_and_take_back(world)
    assert world.step().again_at == grown_at + 30


def test_a_job_that_just_grew_is_not_lent_more_but_gives_back_at_once() -> None:
    world = world_of(3, a=1, b=2)
    world.session("one", "b")
    world.session("two", "b")
    world.settle()
    world.submit("train", "a", 1, 1, 3, cool_down_s=30)
    world.settle()
    world.remove("one")
    world.release()
    world.step()
    grown_at = world.now
    assert world.size("train") == 2
    world.remove("two")
    world.release()
    decided = world.step()
    assert (decided.empty, decided.again_at) == (True, grown_at + 30)
    world.session("three", "b", 2)
    assert victims(world) == {"train": 1}


def test_growth_up_to_the_request_goes_on_while_places_are_freed_for_it_one_by_one() -> None:
    world = world_of(4, greedy=0, owner=4)
    for i in range(3):
        world.submit(f"g{i}", "greedy", 1)
    world.settle()
    world.submit("train", "owner", 4, 1, 4, cool_down_s=1000)
    world.step()
    for worker in [w for w, r in world.workers.items() if r.leaving]:
        world.exit(worker)
        world.step()
    assert world.size("train") == 4


def test_what_crashed_is_replaced_without_a_cool_down() -> None:
    world = world_of(2, a=2)
    world.submit("train", "a", 2, 1, 2, cool_down_s=1000)
    world.settle()
    world.crash(world.of("train")[0])
    world.step()
    assert world.size("train") == 2


def test_a_plan_waits_for_a_stale_gang() -> None:
    world = world_of(2, a=2)
    world.submit("gang", "a", 2, gpus_per_worker=1)
    world.settle()
    world.node("n0", 2, ready=False)
    world.crash(world.of("gang")[0])
    crashed_at = world.now
    decided = world.step()
    assert decided.again_at == crashed_at + 60
    world.now = decided.again_at - 1
    assert [e.job for e in world.step().evict] == ["gang"]


def test_the_start_of_a_run_does_not_depend_on_the_order_in_which_workers_are_told() -> None:
    seen = []
    for order in ((5.0, 7.0, 6.0), (7.0, 6.0, 5.0)):
        world = world_of(4, a=4)
        world.submit("job", "a", 4, 1, 4)
        for at in order:
            world.state.apply(WorkerStarted(f"w{at}", "job", "n0", (int(at) - 5,), at))
        job = world.state.jobs["job"]
        seen.append((job.started_at, job.grown_at))
    assert seen == [(5.0, 7.0), (5.0, 7.0)]
