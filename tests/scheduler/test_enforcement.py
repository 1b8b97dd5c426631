"""A limit that was lowered below what a project holds is enforced on request, with as little loss as possible."""

from __future__ import annotations

from kfp_gpuquota.scheduler import LimitEnforced
from tests.scheduler.world import World


def world_with(guaranteed: float = 0, limit: float | None = None) -> World:
    world = World()
    world.node("n0", 8)
    world.project("a", guaranteed, limit)
    return world


def test_a_lowered_limit_stops_nothing_until_it_is_enforced_then_the_youngest_of_the_lowest_priority() -> None:
    world = world_with()
    for name, priority in (("important", 90), ("old", 50), ("young", 50)):
        world.submit(name, "a", 2, priority=priority)
    world.settle()
    world.project("a", 0, limit=4)
    world.projects.clear()  # it is above its limit for a while
    assert world.plan().empty
    world.state.apply(LimitEnforced("a"))
    (evict,) = world.plan().evict
    assert evict.job == "young"
    assert "limit of project a was lowered" in evict.reason.message
    world.settle()
    assert (world.size("important"), world.size("old"), world.size("young")) == (2, 2, 0)
    world.state.apply(LimitEnforced("a", enforced=False))
    assert not world.plan().evict


def test_workers_above_the_request_and_the_gang_go_before_jobs() -> None:
    world = world_with()
    world.submit("elastic", "a", 2, 1, 6)
    world.submit("other", "a", 1)
    world.settle()
    assert world.size("elastic") == 6
    world.project("a", 0, limit=2)
    world.projects.clear()
    world.state.apply(LimitEnforced("a"))
    world.settle()
    assert (world.size("elastic"), world.size("other")) == (1, 1)


def test_sessions_are_not_stopped() -> None:
    world = world_with(guaranteed=4)
    world.session("notebook", "a", 3)
    world.submit("train", "a", 1)
    world.settle()
    world.project("a", 0, limit=1)
    world.projects.clear()
    world.state.apply(LimitEnforced("a"))
    world.settle()
    assert (world.size("notebook"), world.size("train")) == (3, 0)
