"""Workers of a job within one rack or zone, spread over nodes, and gangs made of parts."""

from __future__ import annotations

from typing import Any

import pytest

from kfp_gpuquota.api import ReasonCode
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.scheduler.state import groups
from kfp_gpuquota.scheduler.state.model import GPU, Amount, Group, Host, Job, Queue, Request, Status, Task
from kfp_gpuquota.scheduler.state.state import State
from tests.scheduler.test_resources import Cluster
from tests.scheduler.world import World

RACK, ZONE = "example.com/rack", "example.com/zone"


def racks(*gpus: tuple[str, str, int]) -> Cluster:
    """(zone, rack, GPUs) of each node: node-0, node-1, ..."""
    cluster = Cluster()
    cluster.project("a", 100)
    for i, (zone, rack, count) in enumerate(gpus):
        cluster.node(f"node-{i}", count, labels={ZONE: zone, RACK: rack})
    return cluster


def nodes(cluster: Cluster, job: str) -> list[int]:
    return sorted(int(name.removeprefix("node-")) for name, _ in cluster.where(job))


TABLE: list[tuple[list[tuple[str, str, int]], dict[str, Any], list[int]]] = [
    ([("z", "a", 1), ("z", "b", 2), ("z", "b", 1)], {"required_topology": RACK}, [1, 1, 2]),
    ([("z", "a", 1), ("z", "b", 2), ("z", "c", 2)], {"required_topology": RACK}, []),
    ([("z", "a", 4), ("z", "b", 3)], {"required_topology": RACK}, [1, 1, 1]),
    ([("z", "a", 2), ("z", "b", 2)], {"preferred_topology": RACK}, [0, 1, 1]),
    ([("y", "a", 2), ("y", "b", 1), ("z", "c", 2), ("z", "d", 2)], {"required_topology": ZONE}, [0, 0, 1]),
    (
        [("y", "a", 2), ("y", "b", 2), ("z", "c", 3), ("z", "d", 1)],
        {"required_topology": ZONE, "preferred_topology": RACK},
        [2, 2, 2],
    ),
    ([("z", "a", 3), ("z", "b", 2), ("z", "c", 2)], {"spread": True}, [0, 1, 2]),
    ([("z", "a", 3), ("z", "b", 2), ("z", "c", 2)], {}, [0, 0, 0]),
]


@pytest.mark.parametrize(("shape", "fields", "expected"), TABLE)
def test_where_a_gang_of_three_goes(
    shape: list[tuple[str, str, int]], fields: dict[str, Any], expected: list[int]
) -> None:
    cluster = racks(*shape)
    cluster.submit("gang", gpus=3, gpus_per_worker=1, **fields)
    cluster.run()
    assert nodes(cluster, "gang") == expected


@pytest.mark.parametrize(
    ("taken", "workers", "required", "code", "why"),
    [
        (0, 3, RACK, ReasonCode.TOO_LARGE, "no example.com/rack has room for more than 2 of its 3 workers"),
        (1, 2, RACK, ReasonCode.FRAGMENTED, "no example.com/rack has room for more than 1 of 2 workers"),
        (0, 2, "example.com/row", ReasonCode.NODE_AFFINITY, "no node that is ready has the label example.com/row"),
    ],
)
def test_it_is_said_why_no_rack_holds_all(taken: int, workers: int, required: str, code: ReasonCode, why: str) -> None:
    cluster = racks(("z", "a", 2), ("z", "b", 2))
    for number in range(2 * taken):
        cluster.submit(f"other-{number}", node=f"node-{number}")
    cluster.run()
    cluster.submit("gang", gpus=workers, gpus_per_worker=1, required_topology=required)
    found, message = cluster.why("gang")
    assert (found, message.partition("; ")[2].startswith(why)) == (code, True), message


def test_an_elastic_job_grows_within_its_rack_only() -> None:
    cluster = racks(("z", "a", 2), ("z", "b", 4))
    cluster.submit("other", gpus=4, node="node-1")
    cluster.run()
    cluster.submit("elastic", gpus=1, min_gpus=1, max_gpus=6, required_topology=RACK, cool_down_s=0.0)
    for _ in range(4):
        cluster.run()
    cluster.node("node-2", 4, labels={ZONE: "z", RACK: "b"})
    for _ in range(4):
        cluster.run()
    assert nodes(cluster, "elastic") == [0, 0]


def test_victims_are_all_taken_in_one_rack() -> None:
    cluster = Cluster()
    for name, rack in (("node-0", "a"), ("node-1", "b"), ("node-2", "b")):
        cluster.node(name, 2, labels={RACK: rack})
    cluster.project("a", 0)
    cluster.project("b", 4)
    for i in range(6):
        cluster.submit(f"borrower-{i}")
        cluster.run()
    cluster.submit("owner", "b", gpus=3, gpus_per_worker=1, required_topology=RACK)
    evicted = [e.job for e in cluster.run().evict]
    cluster.run()
    assert len(evicted) == 3
    assert set(nodes(cluster, "owner")) == {1, 2}


def test_a_worker_that_must_stay_near_the_others_is_not_moved_away_from_them() -> None:
    cluster = racks(("z", "a", 4), ("z", "b", 4))
    cluster.submit("pair", gpus=2, gpus_per_worker=1, required_topology=RACK)
    cluster.submit("other", gpus=1, node="node-1")
    cluster.run()
    cluster.submit("big", gpus=4)
    decided = cluster.run()
    assert "pair" not in [m.job for m in decided.move]


def test_a_topology_is_a_labels_key() -> None:
    cluster = Cluster()
    with pytest.raises(InvalidFieldError, match="required_topology is 'a b', but a label's key is"):
        cluster.submit("x", required_topology="a b")


# Gangs made of parts


def made_of(*sets: tuple[str, int], fewest: int | None = None) -> Job:
    """A job with two tasks in each set; (name, its minimum)."""
    parts = tuple(Group(name, gang=gang) for name, gang in sets)
    request = Request()
    job = Job("job", "job", Queue("q"), sum(gang for _, gang in sets), 2 * len(sets), 2 * len(sets), request)
    job.groups = Group("all", children=parts, fewest=fewest)
    job.pending = [Task(job, request, i, group=name) for i, (name, _) in enumerate(s for s in sets for _ in range(2))]
    return job


def start(job: Job, *names: str) -> None:
    for name in names:
        task = next(t for t in job.pending if t.group == name and t.status is Status.PENDING)
        task.status, job.active = Status.BOUND, job.active + 1


@pytest.mark.parametrize(
    ("sets", "fewest", "running", "below", "asks_for"),
    [
        ([("a", 1), ("b", 1)], None, [], True, ["a", "b"]),
        ([("a", 2), ("b", 1)], None, ["a"], True, ["a", "b"]),
        ([("a", 1), ("b", 1)], None, ["a", "b"], False, ["a"]),
        ([("a", 1), ("b", 1)], None, ["a", "b", "a"], False, ["b"]),
        ([("a", 1), ("b", 1)], None, ["a", "a"], True, ["b"]),
        ([("a", 2), ("b", 2)], 1, [], True, ["a", "a"]),
        ([("a", 2), ("b", 2)], 1, ["a", "a"], False, ["b", "b"]),
        ([("a", 1), ("b", 1)], None, ["a", "a", "b", "b"], False, []),
    ],
)
def test_what_a_gang_of_parts_asks_for_next(
    sets: list[tuple[str, int]], fewest: int | None, running: list[str], below: bool, asks_for: list[str]
) -> None:
    job = made_of(*sets, fewest=fewest)
    start(job, *running)
    assert groups.below(job) is below
    assert [task.group for task in groups.next_tasks(job)] == asks_for


def test_only_what_is_above_the_minimum_of_its_set_may_go_alone() -> None:
    job = made_of(("a", 1), ("b", 1))
    start(job, "a", "a", "b")
    running = [task for task in job.pending if task.status is Status.BOUND]
    assert [task.group for task in groups.loose(job, running)] == ["a"]


def test_a_gang_of_parts_starts_whole_or_not_at_all() -> None:
    for gpus, expected in ((2, []), (3, ["a", "a", "b"])):
        state = State()
        state.ledger.put_host(Host("node", tuple(range(gpus))))
        job = made_of(("a", 2), ("b", 1))
        state.add_queue(job.queue)
        job.queue.deserved = Amount(10 * GPU, 0, 0)
        state.add_job(job)
        from kfp_gpuquota.scheduler.actions.cycle import Cycle  # noqa: PLC0415

        Cycle(state.ledger).run(("allocate",))
        assert [task.group for task in job.pending if task.status is Status.BOUND] == expected


def test_a_promise_does_not_depend_on_where_an_earlier_plan_has_looked() -> None:
    world = World()
    for number, rack in enumerate("ab"):
        world.node(f"n{number}", 2, labels={"rack": rack})
    world.project("greedy", 0)
    world.project("owner", 4)
    for number in range(4):
        world.submit(f"g{number}", "greedy", 1)
    world.settle()
    world.submit("near", "owner", 2, gpus_per_worker=1, required_topology="rack")
    world.step()
    before = world.plan()
    assert "near" in before.promises
    for task in world.state.jobs["near"].pending:
        task.within = frozenset()
    assert world.plan() == before
