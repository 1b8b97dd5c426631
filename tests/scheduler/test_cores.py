"""A job that is not preemptible has a core, its minimum within the guarantee; what it has above that is borrowed."""

from __future__ import annotations

import msgspec
import pytest

from kfp_gpuquota.scheduler import (
    JobSubmitted,
    JobUpdated,
    LimitEnforced,
    NodeChanged,
    QuotaChanged,
    State,
    WorkerStarted,
)
from kfp_gpuquota.scheduler.state.groups import loose
from kfp_gpuquota.scheduler.state.model import Status, Task
from tests.scheduler.world import World


def cluster(gpus: int, **guaranteed: int) -> World:
    world = World()
    world.node("node", gpus)
    for name, quota in guaranteed.items():
        world.project(name, quota)
    return world


def held(world: World) -> dict[str, int]:
    """Return the GPUs of the jobs that have some."""
    return {job: size for job in world.specs if (size := world.size(job))}


def test_it_borrows_what_is_idle_and_gives_it_back_within_a_round() -> None:
    world = cluster(8, team=2, other=6)
    world.submit("steady", "team", 2, 2, 8, preemptible=False)
    world.settle()
    assert held(world) == {"steady": 8}
    world.submit("theirs", "other", 6)
    world.settle()
    assert held(world) == {"steady": 2, "theirs": 6}


@pytest.mark.parametrize("gpus", [2, 5, 8], ids=["only the core", "partly requested", "all requested"])
def test_what_it_requests_above_its_minimum_may_exceed_the_guarantee(gpus: int) -> None:
    world = cluster(8, team=2, other=6)
    world.submit("steady", "team", gpus, 2, 8, preemptible=False)
    world.settle()
    assert held(world) == {"steady": 8}
    world.submit("theirs", "other", 6)
    world.settle()
    assert held(world) == {"steady": 2, "theirs": 6}


def test_no_priority_takes_its_core() -> None:
    world = cluster(4, team=4)
    world.submit("steady", "team", 4, 2, 4, preemptible=False, priority=10)
    world.settle()
    world.submit("urgent", "team", 4, priority=90)
    world.settle()
    assert held(world) == {"steady": 4}, "what it has above its core does not suffice, so it loses nothing"
    world.submit("small", "team", 2, priority=90)
    world.settle()
    assert held(world) == {"steady": 2, "small": 2}


def test_its_core_needs_the_guarantee_to_start() -> None:
    world = cluster(8, team=2, other=6)
    world.submit("steady", "team", 4, 3, 8, preemptible=False)
    world.settle()
    assert held(world) == {}
    reason = world.plan().waiting["steady"]
    assert "guaranteed" in reason.message
    world.project("team", 3)
    world.settle()
    assert held(world) == {"steady": 8}


def test_cores_of_several_jobs_share_the_guarantee() -> None:
    """A second one starts although the first one holds more than all of the guarantee."""
    world = cluster(8, team=4, other=4)
    world.submit("first", "team", 2, 2, 8, preemptible=False)
    world.settle()
    world.session("notebook", "team", 2)
    world.settle()
    assert held(world) == {"first": 6, "notebook": 2}
    world.submit("theirs", "other", 4)
    world.settle()
    assert held(world) == {"first": 2, "notebook": 2, "theirs": 4}


@pytest.mark.parametrize("topology", [None, "rack"])
def test_an_enforced_limit_costs_only_what_is_above_the_core(topology: str | None) -> None:
    """With a topology all of its workers were stopped."""
    world = cluster(0, team=2)
    world.node("racked", 8, labels={"rack": "a"})
    world.submit("steady", "team", 6, 2, 8, preemptible=False, required_topology=topology)
    world.settle()
    assert held(world) == {"steady": 8}
    world.project("team", 0, 1)
    world.projects.clear()
    world.state.apply(LimitEnforced("team"))
    world.settle()
    assert held(world) == {"steady": 2}


@pytest.mark.parametrize("restarted", [False, True])
def test_what_it_has_borrowed_does_not_become_its_core_by_a_larger_minimum(*, restarted: bool) -> None:
    """It has none then, until it runs again: it cannot shrink below its gang, which nobody's guarantee covers."""
    world = cluster(8, team=2, other=6)
    world.submit("steady", "team", 2, 2, 8, preemptible=False)
    world.settle()
    spec = msgspec.structs.replace(world.specs["steady"], gpus=8, min_gpus=8, gpus_per_worker=1)
    world.specs["steady"] = spec
    if restarted:  # the order of `engine.scheduling.run_recalled`
        world.state = restored(world)
        world.state.apply(JobUpdated("steady", spec, world.now))
    else:
        world.state.apply(JobUpdated("steady", spec))
    world.check_indexes()
    assert held(world) == {"steady": 8}, "while nobody needs what is borrowed"
    world.submit("theirs", "other", 6)
    world.settle()
    assert held(world) == {"theirs": 6}
    world.remove("theirs")
    world.settle()
    assert held(world) == {}
    assert "guaranteed" in world.plan().waiting["steady"].message


def test_a_larger_minimum_within_the_guarantee_is_a_larger_core() -> None:
    world = cluster(8, team=4, other=4)
    world.submit("steady", "team", 4, 2, 8, preemptible=False)
    world.settle()
    spec = msgspec.structs.replace(world.specs["steady"], min_gpus=4)
    world.specs["steady"] = spec
    world.state.apply(JobUpdated("steady", spec))
    world.check_indexes()
    world.submit("theirs", "other", 4)
    world.submit("urgent", "team", 4, priority=90)
    world.settle()
    assert held(world) == {"steady": 4, "theirs": 4}


def restored(world: World) -> State:
    """Return the state that a restarted scheduler reads."""
    state = State()
    for node in world.machines.values():
        state.apply(NodeChanged(node))
    for project in world.projects.values():
        state.apply(QuotaChanged(project))
    for name, spec in world.specs.items():
        state.apply(JobSubmitted(name, spec, 0.0))
    for worker, one in world.workers.items():
        state.apply(WorkerStarted(worker, one.job, one.node, one.devices, 0.0))
    return state


@pytest.mark.parametrize("topology", [None, "rack"])
def test_workers_that_do_not_run_yet_are_not_its_core(topology: str | None) -> None:
    """Two run and two are nominated: if those that run were taken, it would train below its minimum."""
    world = cluster(0, team=2)
    world.node("racked", 8, labels={"rack": "a"})
    world.submit("steady", "team", 2, 2, 4, preemptible=False, required_topology=topology)
    (bound,) = world.plan().bind
    for placement in bound.placements[:2]:
        world.start("steady", placement)
    job, host = world.state.jobs["steady"], world.state.ledger.hosts["racked"]
    running = list(job.tasks.values())
    for index in (2, 3):
        more = Task(job, job.request, index)
        job.pending.append(more)
        world.state.ledger.set(more, Status.NOMINATED, host, (index + 2,))
    assert (job.active, loose(job, running)) == (4, [])
