"""Tables of victims and beneficiaries on one or two small nodes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kfp_gpuquota.api import Device, Node, ReasonCode
from kfp_gpuquota.scheduler import NodeChanged, WorkerGone
from kfp_gpuquota.scheduler.fairness import quota
from kfp_gpuquota.scheduler.fairness.fairshare import assign_shares
from kfp_gpuquota.scheduler.placement.units import Attempt, Mode, Whole, cheapest_whole, needed_on, units_on
from kfp_gpuquota.scheduler.state.groups import next_tasks
from tests.scheduler.world import World


def victims(world: World) -> dict[str, int]:
    """GPUs lost by each job in the next plan."""
    before = {job: world.size(job) for job in world.specs}
    world.step()
    return {job: n - world.size(job) for job, n in before.items() if world.size(job) < n}


def world_of(*nodes: int, **guaranteed: int) -> World:
    world = World()
    for i, size in enumerate(nodes):
        world.node(f"n{i}", size)
    for name, count in guaranteed.items():
        world.project(name, count)
    return world


@pytest.mark.parametrize(
    ("why", "running", "needed", "lost"),
    [
        ("the youngest", [("old", 2, 2, 2), ("young", 2, 2, 2)], 2, {"young": 2}),
        ("lent before elastic", [("elastic", 2, 1, 2), ("lent", 1, 1, 2)], 1, {"lent": 1}),
        ("elastic before whole jobs", [("elastic", 3, 1, 3), ("young", 1, 1, 1)], 1, {"elastic": 1}),
        ("no more than needed", [("elastic", 4, 1, 4)], 2, {"elastic": 2}),
        ("a whole gang where one worker is not enough", [("gang", 4, 4, 4)], 1, {"gang": 4}),
        (
            "one large job rather than a young one that is not enough",
            [("large", 3, 3, 3), ("s", 1, 1, 1)],
            3,
            {"large": 3},
        ),
    ],
)
def test_who_goes(why: str, running: list[tuple[str, int, int, int]], needed: int, lost: dict[str, int]) -> None:
    world = world_of(4, greedy=0, owner=4)
    for name, gpus, low, high in running:
        world.submit(name, "greedy", gpus, low, high, gpus_per_worker=1)
    world.settle()
    world.submit("needy", "owner", needed)
    assert victims(world) == lost, why


def test_a_device_that_the_node_has_lost_makes_no_room() -> None:
    """The worker that still holds it was the cheapest victim, and the plan failed when its device was not there."""
    world = world_of(3, greedy=0, owner=2)
    for name in ("a", "b", "c"):
        world.submit(name, "greedy", 1)
    world.settle()
    assert [world.workers[worker].devices for worker in world.of("c")] == [(2,)]
    world.state.apply(NodeChanged(Node(name="n0", devices=(Device(index=0), Device(index=1)))))
    world.submit("needy", "owner", 1)
    assert [evicted.job for evicted in world.plan().evict] == ["b"]


def test_a_lower_priority_goes_before_a_younger_job() -> None:
    world = world_of(2, greedy=0, owner=2)
    world.submit("low", "greedy", 1, priority=10)
    world.submit("young", "greedy", 1)
    world.settle()
    world.submit("needy", "owner", 1)
    assert victims(world) == {"low": 1}


def test_the_project_furthest_above_its_share_loses() -> None:
    world = world_of(8, much=1, little=1, owner=2)
    for i in range(5):
        world.submit(f"much-{i}", "much", 1)
    for i in range(3):
        world.submit(f"little-{i}", "little", 1)
    world.settle()
    world.submit("needy", "owner", 1)
    assert victims(world) == {"much-4": 1}


def test_a_worker_that_is_not_the_newest_goes_where_the_node_requires_it() -> None:
    world = world_of(1, 2, a=3, b=1)
    world.submit("elastic", "a", 1, 1, 1, gpus_per_worker=1, node="n0")
    world.settle()
    world.remove("elastic")
    world.settle()
    world.submit("spread", "a", 3, 1, 3)
    world.settle()
    assert world.nodes_of("spread") == {"n0", "n1"}
    world.project("a", 1)
    world.submit("here", "b", 1, node="n0")
    world.settle()
    assert world.nodes_of("here") == {"n0"}
    assert world.size("spread") == 2


def test_nobody_goes_when_that_would_not_be_enough() -> None:
    world = world_of(4, greedy=0, fixed=3, owner=4)
    world.submit("train", "greedy", 1)
    world.session("s", "fixed", 3)
    world.settle()
    world.submit("needy", "owner", 2)
    assert victims(world) == {}


def test_what_fits_elsewhere_is_moved_and_not_stopped() -> None:
    world = world_of(2, 1, a=1, b=2)
    world.submit("blocker", "a", 1, node="n1")
    world.submit("small", "a", 1)
    world.settle()
    assert world.nodes_of("small") == {"n0"}
    world.remove("blocker")
    world.settle()
    world.submit("pair", "b", 2)
    decided = world.step()
    assert [m.job for m in decided.move] == ["small"]
    assert not decided.evict
    world.settle()
    assert (world.size("pair"), world.nodes_of("small")) == (2, {"n1"})


def test_a_gang_that_stays_below_its_minimum_is_stopped_whole_after_a_while() -> None:
    world = world_of(2, a=2, b=0)
    world.submit("gang", "a", 2, gpus_per_worker=1)
    world.settle()
    lost = next(w for w, r in world.workers.items() if r.devices == (1,))
    del world.workers[lost]
    world.state.apply(WorkerGone(lost, at=world.now))
    world.node("n0", 1)
    world.nodes["n0"] = 2
    assert not world.plan().evict
    world.now += 61
    (evict,) = world.plan().evict
    assert evict.job == "gang"
    assert evict.reason.code is ReasonCode.STALE_GANG


def test_a_place_that_was_reclaimed_does_not_fall_back_to_its_victim() -> None:
    world = world_of(4, a=0, b=0)
    world.submit("large", "a", 3)
    world.settle()
    world.submit("grows", "b", 2, 1, 2, gpus_per_worker=1)
    world.submit("gang", "b", 2, gpus_per_worker=1)
    world.settle()
    assert world.size("grows") == 2


def test_a_job_within_quota_is_not_held_back_by_an_older_one_that_is_not() -> None:
    world = world_of(4, a=2, b=2)
    world.submit("pair", "a", 2)
    world.submit("third", "a", 1)
    world.submit("first", "b", 1)
    world.settle()
    world.submit("beyond", "b", 3)
    world.submit("within", "b", 1)
    world.settle()
    assert (world.size("within"), world.size("third"), world.size("pair")) == (1, 0, 2)


def test_nobody_is_stopped_for_a_gang_whose_place_another_job_would_take() -> None:
    world = world_of(2, 4, 7, 8, a=0, b=0, c=0)
    for name, project, gpus, workers in [("c1", "c", 4, 2), ("b1", "b", 2, 3), ("a1", "a", 1, 3), ("a2", "a", 2, 3)]:
        world.submit(name, project, gpus * workers, gpus_per_worker=gpus)
    world.step()
    world.remove("a2")
    for name, project, gpus, workers in [("a3", "a", 1, 3), ("a4", "a", 1, 1), ("b2", "b", 2, 2), ("a5", "a", 1, 1)]:
        world.submit(name, project, gpus * workers, gpus_per_worker=gpus)
    world.settle()
    world.project("b", 0, over_quota_weight=0.0)
    world.settle()


@pytest.mark.parametrize("seed", range(30))
def test_the_victims_of_a_host_are_added_up_as_one_by_one(seed: int) -> None:
    """`cheapest_whole`, which many equal reclaims use, against the search that tries each set of units."""
    random = Random(seed)
    world = world_of(8, greedy=random.choice([0, 3]), owner=8)
    for i in range(8):
        world.submit(f"j{i}", "greedy", random.choice([1, 1, 2, 3]), priority=random.choice([40, 50, 60]))
    world.settle()
    ledger = world.state.ledger
    for pool in ledger.pools:
        assign_shares(ledger.roots(pool), ledger.capacity(pool))
    job = world.state.jobs[world.submit("needy", "owner", random.randint(1, 8))]
    tasks, host = next_tasks(job), ledger.hosts["n0"]
    attempt = Attempt(ledger, job, tasks, Mode.RECLAIM, quota.total(ledger, tasks))
    units = units_on(attempt, host)
    whole = Whole.of(attempt, host, units)
    assert whole is not None
    assert cheapest_whole(attempt, host, tasks[0], whole) == needed_on(attempt, host, tasks[0], units)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize(("nodes", "workers"), [((3,), 1), ((6,), 2), ((3, 3), 2)])
def test_workers_that_do_not_run_yet_give_way_before_those_that_run(
    nodes: tuple[int, ...], workers: int, *, limited: bool
) -> None:
    """A running one was stopped, and another one started at once where the job had a promise.

    On two nodes half a segment that ran, and half of one that was promised, were taken for one segment. If `limited`,
    only the limit of the department that both projects are in keeps the other job waiting.
    """
    segment: dict[str, Any] = {"segment": workers, "segment_topology": "rack"} if workers > 1 else {}
    world = World()
    for number, gpus in enumerate(nodes):
        world.node(f"n{number}", gpus + workers * limited, labels={"rack": "a"})
    world.project("department", 3 * workers, 3 * workers if limited else None)
    world.project("greedy", parent="department")
    world.project("owner", workers, parent="department")
    world.submit("elastic", "greedy", 3 * workers, workers, 3 * workers, **segment)
    world.settle()
    world.submit("first", "owner", workers, gpus_per_worker=1)
    world.settle()
    world.remove("first")
    for worker in world.of("first"):
        world.leave(worker)
    world.step()
    assert world.state.promises.keys() == {"elastic"}
    world.submit("second", "owner", workers, gpus_per_worker=1)
    world.step()
    assert world.state.promises.keys() == {"second"}
    assert world.size("elastic") == 2 * workers
