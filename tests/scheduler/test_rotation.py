"""A plan that considers a part of the shapes: no team waits for another one's shapes, and no shape waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gpuquota.cluster.kubernetes.planner.bounded import BoundedPlanner
from kfp_gpuquota.scheduler import NodeChanged, plan
from kfp_gpuquota.scheduler.fairness.rotation import Chosen, Rotation
from tests.scheduler.world import World

SIZE = 8


def zoned(world: World, team: str, count: int, *, first: int = 0, zone: str = "z") -> None:
    """Submit jobs of as many shapes, for zones that have no node."""
    for number in range(first, first + count):
        world.submit(f"{team}-{number}", team, node_selector={"zone": f"{zone}{number}"})


@pytest.fixture
def world() -> World:
    world = World()
    world.node("n0", 8, labels={"zone": "here"})
    for team in "abc":
        world.project(team, 4)
    return world


def considered(world: World, rotation: Rotation, size: int = SIZE) -> Chosen:
    chosen = rotation.choose(world.state.ledger, size)
    rotation.considered(chosen, plan(world.state, world.now, shapes=chosen).waiting)
    return chosen


def test_every_team_is_in_every_plan_whatever_another_one_submits(world: World) -> None:
    zoned(world, "a", 200)
    world.submit("own", "b", node_selector={"zone": "here"})
    rotation = Rotation(fewest=2)
    for _ in range(5):
        chosen = rotation.choose(world.state.ledger, SIZE)
        assert {queue.name: len(shapes) for queue, shapes in chosen.items()} == {"a": SIZE - 1}
        assert [bind.job for bind in plan(world.state, world.now, shapes=chosen).bind] == ["own"]


def test_equal_parts_and_what_a_team_does_not_use_is_for_the_others(world: World) -> None:
    zoned(world, "a", 50)
    zoned(world, "b", 50)
    zoned(world, "c", 1)
    chosen = Rotation(fewest=2).choose(world.state.ledger, 9)
    assert {queue.name: len(shapes) for queue, shapes in chosen.items()} == {"a": 4, "b": 4}
    fewest = Rotation(fewest=2).choose(world.state.ledger, 1)
    assert {len(shapes) for shapes in fewest.values()} == {2}


def test_each_shape_is_considered_within_one_round_and_the_first_ones_in_every_plan(world: World) -> None:
    for number in range(40):  # possible, but the node is full
        world.submit(f"a-{number}", "a", 8, cpu=1.0 + number)
    world.node("n0", 8, cpu=64.0)
    rotation, seen = Rotation(fewest=2), set()
    for _ in range(2 * 40 // SIZE):
        (shapes,) = considered(world, rotation).values()
        first = min(world.state.ledger.queues["a"].waiting.values())[0][1].uid
        assert first == "a-0"
        assert any(shape.requests[0].cpu == 1000 for shape in shapes)
        seen.update(shapes)
    assert len(seen) == 40
    assert rotation.unvisited == 0


def test_what_no_node_can_hold_is_considered_again_only_after_a_node_has_changed(world: World) -> None:
    zoned(world, "a", 20)
    rotation = Rotation(fewest=2)
    queue = world.state.ledger.queues["a"]
    while len(queue.waiting) > 2:
        assert considered(world, rotation, 2)
    assert len(queue.shelved) >= 18
    world.state.apply(NodeChanged(world.machines["n0"]))  # as it was
    rotation.choose(world.state.ledger, SIZE)
    assert len(queue.shelved) >= 18
    world.node("n1", 1, labels={"zone": "z7"})
    starts = [bind.job for _ in range(6) for bind in plan(world.state, 0.0, shapes=considered(world, rotation)).bind]
    assert "a-7" in starts


jobs = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.integers(1, 12)), max_size=30)


@settings(max_examples=150)
@given(jobs=jobs, size=st.integers(1, 6))
def test_when_nothing_is_due_a_plan_of_all_shapes_starts_nothing_more(
    jobs: list[tuple[str, int, int]], size: int
) -> None:
    world = World()
    for node in ("n0", "n1"):
        world.node(node, 4, cpu=16.0)
    for team in "abc":
        world.project(team, 2)
    for number, (team, gpus, cpu) in enumerate(jobs):
        world.submit(f"j{number}", team, gpus, cpu=float(cpu))
    planner = BoundedPlanner(world.state, lambda: 0.0)
    planner._size, planner._rotation = size, Rotation(fewest=2)
    planner._adapt = lambda *_, **__: None  # type: ignore[method-assign]
    waiting: dict[str, object] = {}
    for _ in range(200):
        planned = planner.plan(world.now)
        waiting.update(planned.changed)
        for uid in planned.gone:
            del waiting[uid]
        if not planned.plan.empty:
            world.carry_out(planned.plan)
            world.release()
            planner._rotation.changed()
            planner._perhaps_gone.update(world.specs)
        elif not planned.more:
            break
    else:
        raise AssertionError("another plan is due without end")
    whole = plan(world.state, world.now)
    assert whole.empty
    assert waiting.keys() == whole.waiting.keys()
