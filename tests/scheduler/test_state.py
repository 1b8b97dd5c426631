"""Events that cannot be are refused, and leave the state as it was."""

from __future__ import annotations

import pytest

from kfp_gpuquota.errors import AlreadyExistsError, InvalidFieldError, NotFoundError
from kfp_gpuquota.scheduler import (
    JobRemoved,
    JobSubmitted,
    NodeRemoved,
    NodesBarred,
    QuotaRemoved,
    WorkerGone,
    WorkerLeaving,
    WorkerMoved,
    WorkerStarted,
)
from tests.scheduler.world import World


@pytest.fixture
def world() -> World:
    world = World()
    world.node("n0", 2)
    world.project("a", 1)
    world.project("b", 1)
    world.submit("j", "a", 1, 1, 2)
    world.settle()
    return world


def test_what_was_never_announced_is_refused(world: World) -> None:
    before = world.plan()
    for event in (JobRemoved("x"), WorkerGone("x"), WorkerStarted("w", "x", "n0", (0,), 1.0)):
        with pytest.raises(NotFoundError, match=r"has no (job|worker) 'x'"):
            world.state.apply(event)
    assert world.plan() == before


def test_a_job_is_submitted_once(world: World) -> None:
    with pytest.raises(AlreadyExistsError):
        world.state.apply(JobSubmitted("j", world.specs["j"], 9.0))


def test_a_worker_that_is_bound_elsewhere_holds_devices_there_and_those_of_its_node_are_free(world: World) -> None:
    worker, *_ = world.of("j")
    world.node("n1", 2)
    hosts, before = world.state.ledger.hosts, world.state.ledger.hosts["n0"].future_whole
    world.state.apply(WorkerMoved(worker, "nowhere", (0,)))
    assert hosts["nowhere"].tasks, "a node that was not reported gives no devices: they only count against the quota"
    assert hosts["n0"].future_whole == before + 1
    world.state.apply(WorkerLeaving(worker))
    world.state.apply(WorkerMoved(worker, "n1", (1,)))
    assert "nowhere" not in hosts
    task = world.state.workers[worker]
    assert (task.node and task.node.name, task.devices, task.status.name) == ("n1", (1,), "LEAVING")


def test_a_job_is_kept_off_nodes_that_are_barred_until_they_are_so_no_more(world: World) -> None:
    world.node("n1", 2)
    world.project("a", 4)
    world.submit("k", "a", 3, 1, 3, gpus_per_worker=1)
    world.state.apply(NodesBarred("k", ("n0", "n1")))
    assert "refused by n0, n1" in world.plan().waiting["k"].message
    world.state.apply(NodesBarred("k", ("n0",)))
    world.settle()
    assert {world.workers[worker].node for worker in world.of("k")} == {"n1"}
    world.state.apply(NodesBarred("k", ("n1",)))
    assert world.size("k") == 2, "what runs there stays"
    world.state.apply(NodesBarred("k", ()))
    world.remove("j")
    world.settle()
    assert {world.workers[worker].node for worker in world.of("k")} == {"n0", "n1"}
    world.check_indexes()


def test_departments_cannot_contain_each_other(world: World) -> None:
    world.project("a", 1, parent="b")
    with pytest.raises(InvalidFieldError, match="below"):
        world.project("b", 1, parent="a")


def test_a_department_takes_over_what_its_projects_hold(world: World) -> None:
    world.project("department", 2, 2)
    world.project("a", 1, parent="department")
    world.project("b", 1, parent="department")
    world.session("s", "b")
    world.settle()
    assert (world.size("j"), world.size("s")) == (1, 1)
    world.check_indexes()


def test_removing_what_is_not_there_changes_nothing(world: World) -> None:
    before = world.plan()
    world.state.apply(NodeRemoved("x"))
    world.state.apply(QuotaRemoved("x"))
    assert world.plan() == before


def test_a_worker_on_a_node_that_nobody_announced_is_still_counted(world: World) -> None:
    world.submit("k", "b", 1)
    world.state.apply(WorkerStarted("w", "k", "ghost", (0,), 1.0))
    assert world.state.ledger.queues["b"].held[0] > 0
    world.state.apply(WorkerGone("w"))
    assert "ghost" not in world.state.ledger.hosts


def test_what_a_job_requests_does_not_depend_on_the_order_in_which_its_workers_left() -> None:
    """Three of six workers are loaned ones that leave, and a fourth is reclaimed before or after they have exited."""
    requested = []
    for order in (["lent", "lent", "own"], ["own", "lent", "lent"]):
        world = World()
        world.node("n0", 6)
        world.project("a", 4)
        world.submit("job", "a", 4, 2, 6)
        world.settle()
        workers = list(world.state.jobs["job"].tasks)
        for worker in workers[3:]:
            world.state.apply(WorkerLeaving(worker, 1.0))
        exited = iter(workers[3:])
        for which in order:
            event = WorkerLeaving(workers[2], 1.0) if which == "own" else WorkerGone(next(exited), 1.0)
            world.state.apply(event)
        requested.append(len(world.state.jobs["job"].pending))
    assert requested == [0, 0], "the four that hold or release GPUs are as many as it wants"
