"""what_if answers before anything is done."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kfp_gpuquota.api import JobSpec, Kind, Project
from kfp_gpuquota.errors import NotFoundError
from kfp_gpuquota.scheduler import JobRemoved, JobSubmitted, NodeRemoved, QuotaChanged, what_if
from kfp_gpuquota.scheduler.state.copying import copied
from tests.scheduler.test_victims import world_of
from tests.scheduler.world import World


@pytest.fixture
def world() -> World:
    """Two GPUs: `train` of a holds both, one of them lent; a session of b, which has nothing, waits."""
    world = world_of(2, a=1, b=0)
    world.submit("train", "a", 1, 1, 2)
    world.settle()
    world.session("notebook", "b")
    return world


def test_a_larger_quota_lets_the_session_start_and_shrinks_the_training(world: World) -> None:
    answer = what_if(world.state, QuotaChanged(Project(name="b", guaranteed=1)), world.now)
    assert (answer.starts, answer.shrinks, answer.stops) == (("notebook",), ("train",), ())
    assert answer.before == world.plan()


def test_a_job_that_would_be_submitted_may_stop_another() -> None:
    world = world_of(2, a=0, b=2)
    world.submit("train", "a", 2)
    world.settle()
    spec = JobSpec(name="large", project="b", command=("true",), gpus=2)
    answer = what_if(world.state, JobSubmitted("large", spec, world.now), world.now)
    assert (answer.starts, answer.stops) == (("large",), ("train",))
    assert "large" not in world.state.jobs


def test_a_job_that_would_end_makes_room() -> None:
    world = world_of(1, a=1)
    world.submit("first", "a", 1)
    world.settle()
    world.submit("second", "a", 1)
    answer = what_if(world.state, JobRemoved("first"), world.now)
    assert answer.starts == ("second",)


def test_several_events_are_one_change(world: World) -> None:
    session = JobSpec(name="urgent", project="b", command=("true",), kind=Kind.BUILD, priority=200)
    change = [QuotaChanged(Project(name="b", guaranteed=1)), JobSubmitted("urgent", session, world.now)]
    assert what_if(world.state, change, world.now).starts == ("urgent",)


def test_a_job_that_would_not_start_any_more_is_named() -> None:
    world = world_of(1, a=1)
    world.submit("job", "a", 1)
    assert what_if(world.state, NodeRemoved("n0"), world.now).no_longer_starts == ("job",)


def test_a_change_that_cannot_be_is_refused_and_nothing_is_changed(world: World) -> None:
    before = world.plan()
    with pytest.raises(NotFoundError):
        what_if(world.state, JobRemoved("nobody"), world.now)
    assert world.plan() == before


def test_nothing_that_happens_to_a_copy_reaches_the_original(world: World) -> None:
    before = world.plan()
    workers = {name: replace(running) for name, running in world.workers.items()}
    copy = World(copied(world.state), world.now, dict(world.specs), dict(world.nodes), dict(world.machines))
    copy.workers, copy.serial = workers, world.serial
    copy.project("b", 1)
    copy.remove("train")
    copy.node("n1", 4)
    copy.settle()
    assert copy.size("notebook") == 1
    assert world.plan() == before
    world.check_indexes()
