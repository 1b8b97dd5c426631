"""Strict order and shortest first, against naive statements of the rules; the minimum run time of a project."""

from __future__ import annotations

from math import ceil, inf, log2
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gpuquota.api import Order
from kfp_gpuquota.scheduler import Plan, RunTimeExpected, State, plan
from kfp_gpuquota.scheduler.dump import load_state, take_dump
from kfp_gpuquota.scheduler.state.copying import copied
from kfp_gpuquota.scheduler.state.order import MOST_OVERTAKEN_S
from tests.scheduler.test_victims import world_of
from tests.scheduler.world import World

HOUR_S = 3600.0


class Asked(NamedTuple):
    """A job: its GPUs and priority, how long it is expected to run, how long it has waited."""

    gpus: int
    priority: int
    expected_s: float = inf
    waited_s: float = 0.0


ASKED = st.builds(
    Asked,
    st.integers(1, 6),
    st.sampled_from([50, 50, 50, 60]),
    st.sampled_from([1.0, 300.0, 400.0, 5000.0, 40_000.0, inf]),
    st.sampled_from([0.0, 100.0, 2000.0, 9000.0, 50_000.0]),
)


def ordered(order: Order, gpus: int, guaranteed: int, reserve_after_s: float = 1800.0) -> World:
    """One node, one project."""
    world = World(State(reserve_after_s=reserve_after_s))
    world.now = 100_000.0
    world.node("n", gpus)
    world.project("team", guaranteed, order=order)
    return world


def asks(world: World, jobs: list[Asked]) -> dict[str, Asked]:
    now = world.now
    named = {f"j{number:02}": one for number, one in enumerate(jobs)}
    for name, one in sorted(named.items(), key=lambda item: (-item[1].waited_s, item[0])):
        world.now = now - one.waited_s
        world.submit(name, "team", one.gpus, priority=one.priority)
        if one.expected_s < inf:
            world.state.apply(RunTimeExpected(name, one.expected_s))
    world.now = now + 1
    return named


def started(decided: Plan) -> list[str]:
    return sorted(bind.job for bind in decided.bind)


def length(one: Asked) -> float:
    return max(64.0, 2.0 ** ceil(log2(one.expected_s))) if one.expected_s < inf else inf


@given(st.lists(ASKED, max_size=8), st.integers(1, 6), st.integers(0, 6))
@settings(deadline=None)
def test_in_strict_order_no_job_passes_the_first_one(jobs: list[Asked], gpus: int, guaranteed: int) -> None:
    """By priority and age, until one does not fit; one that never can, being larger than the node, is left out."""
    world, idle, starts = ordered(Order.STRICT, gpus, guaranteed), gpus, list[str]()
    waiting = asks(world, jobs)
    for name in sorted(waiting, key=lambda name: (-waiting[name].priority, -waiting[name].waited_s, name)):
        if waiting[name].gpus > gpus:
            continue
        if waiting[name].gpus > idle:
            break
        idle -= waiting[name].gpus
        starts.append(name)
    assert started(plan(world.state, world.now)) == sorted(starts)


BOUNDS = st.tuples(st.just(0), st.sampled_from([0.0, 1800.0])) | st.tuples(st.integers(1, 6), st.just(86_400.0))


@given(st.lists(ASKED, max_size=7), st.integers(1, 6), BOUNDS)
@settings(deadline=None)
def test_the_shortest_job_starts_first_until_another_has_waited_for_its_bound(
    jobs: list[Asked], gpus: int, bounds: tuple[int, float]
) -> None:
    """Without reservations, which come before: nobody is guaranteed anything, or none is due."""
    guaranteed, reserve_after_s = bounds
    world, idle, starts = ordered(Order.SHORTEST, gpus, guaranteed, reserve_after_s), gpus, list[str]()
    waiting = asks(world, jobs)
    left = dict(waiting)
    while left:

        def place(name: str, held: int = gpus - idle) -> tuple[int, bool, float, float, str]:
            one = waiting[name]
            bound_s = min(MOST_OVERTAKEN_S, max(reserve_after_s, length(one)))
            rank = 0.0 if one.waited_s >= bound_s else length(one)
            return -one.priority, held + one.gpus > guaranteed, rank, -one.waited_s, name

        name = min(left, key=place)
        if left.pop(name).gpus <= idle:
            idle -= waiting[name].gpus
            starts.append(name)
    assert started(plan(world.state, world.now, ("allocate",))) == sorted(starts)


@given(st.lists(ASKED, max_size=8), st.integers(1, 6), st.sampled_from(list(Order)))
@settings(deadline=None)
def test_a_copy_and_a_dump_decide_alike_in_every_order(jobs: list[Asked], gpus: int, order: Order) -> None:
    world = ordered(order, gpus, gpus)
    asks(world, jobs)
    decided = world.plan()
    assert plan(copied(world.state), world.now) == decided
    assert plan(load_state(take_dump(world.state, world.now, "0")), world.now) == decided


def test_what_waits_behind_the_first_job_of_a_strict_project_names_it() -> None:
    world = ordered(Order.STRICT, 4, 2)
    asks(world, [Asked(3, 50)])
    world.settle()
    world.submit("large", "team", 2)
    world.submit("small", "team", 1)
    decided = world.step()
    assert started(decided) == []
    assert decided.waiting["small"].message == (
        "needs 1 GPU; as many are idle, but it starts after large, which is first in project team, whose order is "
        "strict"
    )
    assert "strict" not in decided.waiting["large"].message
    world.submit("runs", "team", 1, priority=90)
    world.settle()
    assert world.plan().waiting["small"].message == (
        "needs 1 GPU; 0 are idle, and project team holds 4 of its fair share of 4, so it starts when 1 more is released"
        "; and not before large, which is first in project team, whose order is strict"
    )


def test_a_strict_project_starts_what_has_ended_before_the_first_job_can_start() -> None:
    world = ordered(Order.STRICT, 4, 4)
    world.submit("runs", "team", 3, max_runtime_s=1000.0)
    world.settle()
    world.submit("large", "team", 4)
    world.submit("long", "team", 1, max_runtime_s=2000.0)
    world.submit("short", "team", 1, max_runtime_s=500.0)
    assert started(world.step()) == ["short"]


def test_other_projects_use_what_the_first_job_of_a_strict_project_leaves_idle() -> None:
    world = world_of(4, team=0, other=0)
    world.project("team", 0, order=Order.STRICT)
    world.submit("runs", "team", 3)
    world.settle()
    world.submit("large", "team", 4)
    world.submit("small", "team", 1)
    world.submit("theirs", "other", 1)
    assert started(world.step()) == ["theirs"]


def test_a_deferred_or_impossible_first_job_blocks_nobody() -> None:
    world = ordered(Order.STRICT, 4, 4)
    world.submit("huge", "team", 8)
    world.submit("nowhere", "team", 1, node_selector={"rack": "none"})
    world.project("team", 4, 6, order=Order.STRICT)
    world.session("session", "team", 5)
    world.submit("small", "team", 1)
    assert started(world.step()) == ["small"]


def test_segments_that_no_node_label_could_hold_block_nobody() -> None:
    world = World()
    for number in range(3):
        world.node(f"n{number}", 1, labels={"rack": f"r{number}"})
    world.project("team", 3, order=Order.STRICT)
    world.submit("apart", "team", 2, gpus_per_worker=1, segment=2, segment_topology="rack")
    world.submit("small", "team", 1)
    assert started(world.step()) == ["small"]


def test_a_job_that_is_impossible_in_one_project_blocks_another_one() -> None:
    world = world_of(4, one=0, two=0, other=0)
    world.submit("runs", "other", 3)
    world.settle()
    world.project("one", 0, 1, order=Order.STRICT)
    world.project("two", 0, 4, order=Order.STRICT)
    for name in ("one", "two"):
        world.submit(f"large-{name}", name, 2)
    world.submit("small", "two", 1)
    decided = world.step()
    assert started(decided) == []
    assert decided.waiting["small"].details["behind"] == "large-two"


def test_the_next_plan_is_when_a_long_job_comes_before_shorter_ones() -> None:
    world = ordered(Order.SHORTEST, 4, 4)
    world.submit("runs", "team", 1)
    world.settle()
    for name, expected_s, later_s in (("long", 2000.0, 1000.0), ("short", 60.0, 0.0)):
        world.submit(name, "team", 4)
        world.state.apply(RunTimeExpected(name, expected_s))
        world.now += later_s
    assert world.plan().again_at == world.state.jobs["long"].submitted_at + 2048


def test_an_order_that_is_changed_holds_for_jobs_that_wait() -> None:
    world = ordered(Order.FAIR, 4, 4)
    asks(world, [Asked(3, 50)])
    world.settle()
    world.submit("large", "team", 2)
    world.submit("small", "team", 1)
    world.project("team", 4, order=Order.STRICT)
    assert started(world.plan()) == []
    world.project("team", 4, order=Order.SHORTEST)
    assert started(world.plan()) == ["small"]


def test_a_long_job_is_overtaken_for_a_bounded_time_by_a_stream_of_short_ones() -> None:
    """One job of an hour and endless ones of a minute on one GPU: it starts once it has waited for about an hour."""
    world = ordered(Order.SHORTEST, 1, 1)
    world.submit("long", "team", 1)
    world.state.apply(RunTimeExpected("long", HOUR_S))
    submitted_at, number = world.now, 0
    while not world.size("long"):
        assert world.now <= submitted_at + 4096 + 120
        for job in [job for job in world.specs if world.size(job)]:
            world.remove(job)
        world.release()
        world.submit(f"short{number:03}", "team", 1)
        world.state.apply(RunTimeExpected(f"short{number:03}", 60.0))
        world.step()
        world.now += 60
        number += 1
    assert world.now >= submitted_at + 4096


def test_the_reason_says_that_a_shorter_job_is_first() -> None:
    world = ordered(Order.SHORTEST, 1, 0)
    asks(world, [Asked(1, 50)])
    world.settle()
    for name, expected_s in (("long", HOUR_S), ("short", 60.0)):
        world.submit(name, "team", 1)
        world.state.apply(RunTimeExpected(name, expected_s))
    waiting = world.plan().waiting
    assert waiting["long"].message.endswith("; short, which is expected to end sooner, comes first")
    assert "comes first" not in waiting["short"].message
    world.now += 2 * HOUR_S
    world.submit("new", "team", 1)
    world.state.apply(RunTimeExpected("new", 200.0))
    waiting = world.plan().waiting
    assert waiting["new"].message.endswith("; long, which has waited for long behind shorter ones, comes first")


def test_a_projects_minimum_run_time_is_that_of_each_of_its_jobs_also_of_those_that_run() -> None:
    world = world_of(2, greedy=0, owner=2)
    world.submit("own", "greedy", 1, min_run_time_s=600)
    world.submit("train", "greedy", 1)
    world.settle()
    started_at = world.now
    world.project("greedy", 0, min_runtime_s=300.0)
    world.submit("needy", "owner", 2)
    decided = world.step()
    assert decided.empty
    assert decided.again_at == pytest.approx(started_at + 300, abs=3)
    world.project("greedy", 0)
    world.remove("own")
    world.release()
    assert [one.job for one in world.step().evict] == ["train"]


@pytest.mark.parametrize(("after_s", "kept"), [(None, False), (10.0, True)])
def test_a_project_has_its_own_time_until_what_a_job_needs_is_kept(after_s: float | None, kept: bool) -> None:
    world = ordered(Order.FAIR, 4, 4)
    world.project("team", 4, reserve_after_s=after_s)
    asks(world, [Asked(2, 50)])
    world.settle()
    world.submit("large", "team", 4)
    world.now += 20
    world.submit("small", "team", 1)
    assert started(world.step()) == ([] if kept else ["small"])
