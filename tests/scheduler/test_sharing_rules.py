"""How many workers share a device, how much of its memory is the driver's, and whether jobs are moved."""

from __future__ import annotations

import pytest

from kfp_gpuquota.api import Device, Node
from kfp_gpuquota.api.node import SharingRules
from kfp_gpuquota.scheduler import NodeChanged, WorkerStarted
from tests.scheduler.world import World


def test_no_more_workers_share_a_device_than_may() -> None:
    world = World()
    world.node("n0", 2, max_sharers=3)
    world.project("a", 2)
    for number in range(7):
        world.submit(f"s{number}", "a", gpu_fraction=0.1)
    plans = world.settle()
    running = [job for job in world.specs if world.size(job)]
    assert len(running) == 6
    (reason,) = plans[-1].waiting.values()
    assert "3 workers share each GPU that has that much idle, and no more may" in reason.message
    assert reason.message.endswith("so it starts when one of them on n0 exits")
    world.remove("s0")
    world.settle()
    assert world.size("s6") == 1


def test_an_owner_reclaims_a_share_of_a_device_that_is_full_of_sharers() -> None:
    world = World()
    world.node("n0", 1, max_sharers=2)
    world.project("owner", 1)
    world.project("borrower", 0)
    for number in range(2):
        world.submit(f"lent{number}", "borrower", gpu_fraction=0.1)
    world.settle()
    world.submit("own", "owner", gpu_fraction=0.1)
    world.settle()
    assert world.size("own") == 1
    assert sum(world.size(f"lent{number}") for number in range(2)) == 1


def test_requests_for_memory_leave_the_drivers_part() -> None:
    world = World()
    node = Node(name="n0", devices=(Device(index=0, memory_mib=15_360),))
    world.project("a", 1)
    world.nodes["n0"] = 1
    world.state.apply(NodeChanged(SharingRules().on(node)))
    for number in range(4):
        world.submit(f"m{number}", "a", gpu_memory_mib=3840)
    bound = {bind.job for bind in world.plan().bind}
    assert len(bound) == 3, "4 x 3,840 MiB are the whole device"
    assert SharingRules().on(node).gpu_memory_mib == 15_052


def test_a_new_reserve_counts_what_runs_again() -> None:
    world = World()
    node = Node(name="n0", devices=(Device(index=0, memory_mib=10_000),))
    world.project("a", 1)
    world.nodes["n0"] = 1
    world.state.apply(NodeChanged(node))
    world.submit("m", "a", gpu_memory_mib=5000)
    world.state.apply(WorkerStarted("w", "m", "n0", (0,), 1.0))
    world.state.apply(NodeChanged(SharingRules(memory_reserve=0.5).on(node)))
    host = world.state.ledger.hosts["n0"]
    assert host.taken[0] == [1_000_000, 0, 0]
    (queue,) = world.state.queues_of("a")
    assert queue.held[0] == 1_000_000


@pytest.mark.parametrize("moves", [True, False])
def test_no_job_is_moved_where_moves_are_off(moves: bool) -> None:
    world = World()
    world.state.ledger.moves = moves
    world.node("n0", 2)
    world.node("n1", 2)
    world.project("a", 4)
    for number in range(4):
        world.submit(f"small{number}", "a")
    world.settle()
    first, *_ = [job for job in world.specs if world.nodes_of(job) == {"n0"}]
    second, *_ = [job for job in world.specs if world.nodes_of(job) == {"n1"}]
    world.remove(first)
    world.remove(second)
    world.submit("big", "a", 2)
    world.settle()
    assert world.size("big") == (2 if moves else 0)


def test_a_move_costs_no_more_than_four_hours_of_work_for_each_gpu_gained() -> None:
    for hours, moved in ((7.0, True), (9.0, False)):
        world = World()
        world.node("n0", 2)
        world.node("n1", 2)
        world.project("a", 4)
        for number in range(4):
            world.submit(f"small{number}", "a")
        world.settle()
        for node in ("n0", "n1"):
            world.remove(next(job for job in world.specs if world.nodes_of(job) == {node}))
        world.settle()
        world.now += hours * 3600
        world.submit("big", "a", 2)
        world.now += 1
        moves = world.plan().move
        assert bool(moves) is moved
        if moves:
            assert "big needs 2 GPUs; it repeats at most 25" in moves[0].reason.message
