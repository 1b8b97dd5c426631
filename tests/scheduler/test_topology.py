"""Workers of a job within one rack or zone, spread over nodes, and gangs made of parts."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gpuquota.api import JobSpec, Kind, ReasonCode
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.scheduler.state import groups
from kfp_gpuquota.scheduler.state.model import GPU, Amount, Group, Host, Job, Queue, Request, Status, Task
from kfp_gpuquota.scheduler.state.state import State
from tests.effort import effort
from tests.scheduler.test_resources import Cluster
from tests.scheduler.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

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


# Segments


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[tuple[str, str, int]], list[int]]:
    """(zone, rack, GPUs) of each node, where a rack is in one zone, and the nodes of jobs with one GPU that run."""
    shape = [
        (f"z{rack // 2}", f"r{rack}", draw(st.integers(1, 4)))
        for rack in draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    ]
    return shape, draw(st.lists(st.integers(0, len(shape) - 1), max_size=5))


@settings(max_examples=effort(150, 3000), deadline=None)
@given(
    clusters(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.sampled_from([(), (ZONE,)]), st.booleans()
)
def test_segments_are_placed_if_and_only_if_an_exhaustive_search_finds_a_place(
    drawn: tuple[list[tuple[str, str, int]], list[int]],
    segment: int,
    number: int,
    size: int,
    required: tuple[str, ...],
    prefers: bool,
) -> None:
    shape, taken = drawn
    cluster = racks(*shape)
    for i, node in enumerate(taken):
        cluster.submit(f"busy-{i}", node=f"node-{node}")
    cluster.run()
    free = [count for _, _, count in shape]
    for i in range(len(taken)):
        for node in nodes(cluster, f"busy-{i}"):
            free[node] -= 1
    fields = {"required_topology": required[0]} if required else {}
    fields |= {"preferred_topology": ZONE} if prefers else {}
    cluster.submit(
        "job", gpus=segment * number * size, gpus_per_worker=size, segment=segment, segment_topology=RACK, **fields
    )
    waiting = cluster.run().waiting
    found = Counter(nodes(cluster, "job"))
    valid = list(_valid(shape, [one // size for one in free], segment, segment * number, one_zone=bool(required)))
    assert bool(found) == bool(valid)
    if found:
        assert tuple(found[node] for node in range(len(shape))) in valid
    else:
        assert waiting["job"].code in {ReasonCode.TOO_LARGE, ReasonCode.FRAGMENTED, ReasonCode.NO_FREE_GPUS}


def _valid(
    shape: list[tuple[str, str, int]], room: list[int], segment: int, workers: int, *, one_zone: bool
) -> Iterator[tuple[int, ...]]:
    """Every number of workers on each node that is allowed."""
    for counts in product(*(range(one + 1) for one in room)):
        racks_of, zones = Counter[str](), set()
        for (zone, rack, _), count in zip(shape, counts, strict=True):
            racks_of[rack] += count
            zones |= {zone} if count else set()
        whole = not any(count % segment for count in racks_of.values())
        if sum(counts) == workers and whole and (len(zones) == 1 or not one_zone):
            yield counts


@pytest.mark.parametrize(
    ("busy", "workers", "message"),
    [
        (
            (1, 1, 2),
            4,
            "needs 4 GPUs in 2 segments of 2 workers, each within one example.com/rack; example.com/rack has room for "
            "1 segment of 2 workers now, and nothing that runs may be taken for it, so it starts when one of them has "
            "2 GPUs idle for another one",
        ),
        (
            (1, 1, 3),
            2,
            "needs 2 GPUs in 1 segment of 2 workers, each within one example.com/rack; no example.com/rack has 2 GPUs "
            "idle for one, and nothing that runs may be taken for it, so it starts when one of them has 2 GPUs idle "
            "for another one",
        ),
        (
            (0, 0, 0),
            10,
            "needs 10 GPUs in 5 segments of 2 workers, each within one example.com/rack; the nodes have room for "
            "4 segments of 2 workers, each within one example.com/rack",
        ),
    ],
)
def test_it_is_said_why_segments_wait(busy: tuple[int, ...], workers: int, message: str) -> None:
    cluster = racks(("z", "a", 2), ("z", "b", 2), ("z", "c", 4))
    for node, count in enumerate(busy):
        for number in range(count):
            cluster.submit(f"busy-{node}-{number}", node=f"node-{node}", kind=Kind.BUILD)
    cluster.run()
    cluster.submit("job", gpus=workers, gpus_per_worker=1, segment=2, segment_topology=RACK)
    assert cluster.why("job")[1] == message


def segmented(world: World, name: str, project: str, *sizes: int, **more: Any) -> None:
    low, size, high = sizes
    world.submit(name, project, size, low, high, segment=2, segment_topology="rack", cool_down_s=0.0, **more)


def by_rack(world: World, job: str) -> Counter[str]:
    mine = [r for r in world.workers.values() if r.job == job and not r.leaving]
    return Counter(world.machines[r.node].labels["rack"] for r in mine)


def world_of(*gpus: int) -> World:
    """A node with so many GPUs in each rack."""
    world = World()
    for rack, count in zip("abcd", gpus, strict=False):
        world.node(f"n{rack}", count, labels={"rack": rack})
    return world


@pytest.mark.parametrize("size", [2, 6])
def test_an_elastic_job_grows_and_gives_way_by_whole_segments(size: int) -> None:
    """Above its minimum, as much of it as is requested or lent."""
    world = world_of(3, 3, 2)
    world.project("greedy", 0)
    world.project("owner", 4)
    segmented(world, "elastic", "greedy", 2, size, 8)
    world.settle()
    assert by_rack(world, "elastic") == {"a": 2, "b": 2, "c": 2}
    for number, left in enumerate((6, 6, 4, 4)):
        world.submit(f"o{number}", "owner")
        world.settle()
        assert sum(by_rack(world, "elastic").values()) == left
    assert world.size("o3") == 1


def test_a_lost_worker_is_replaced_in_the_domain_of_its_segment() -> None:
    world = world_of(4, 4)
    world.project("team", 8)
    segmented(world, "elastic", "team", 2, 4, 6)
    world.settle()
    before = by_rack(world, "elastic")
    assert sum(before.values()) == 6
    for worker in world.of("elastic")[::2]:
        world.crash(worker)
    world.settle()
    assert by_rack(world, "elastic") == before


def test_a_job_in_a_full_rack_keeps_none_in_another_one_from_growing() -> None:
    world = world_of(1, 1)
    world.project("team", 8)
    for name in ("first", "second"):
        world.submit(name, "team", 2, 1, 2, required_topology="rack", cool_down_s=0.0)
    world.settle()
    world.node("more", 1, labels={"rack": next(iter(by_rack(world, "second")))})
    world.settle()
    assert (world.size("first"), world.size("second")) == (1, 2)


def test_segments_are_reclaimed_in_one_domain_each() -> None:
    world = world_of(2, 2, 3, 3)
    world.project("greedy", 0)
    world.project("owner", 6)
    for number in range(10):
        world.submit(f"g{number}", "greedy")
    world.settle()
    world.submit("gang", "owner", 6, gpus_per_worker=1, segment=3, segment_topology="rack")
    world.settle()
    assert by_rack(world, "gang") == {"c": 3, "d": 3}
    assert sum(world.size(f"g{number}") for number in range(10)) == 4


def test_a_core_keeps_whole_segments() -> None:
    world = world_of(4, 4)
    world.project("greedy", 4)
    world.project("owner", 4)
    segmented(world, "steady", "greedy", 4, 8, 8, preemptible=False)
    world.settle()
    assert world.size("steady") == 8
    for number in range(4):
        world.submit(f"o{number}", "owner")
        world.settle()
    assert sum(by_rack(world, "steady").values()) == 4
    world.check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"segment": 2}, "segment is 2, but it needs the node label that the workers of a segment share; "),
        ({"segment_topology": RACK}, "segment_topology is 'example.com/rack', but it needs the number of workers in"),
        ({"segment": 3, "segment_topology": RACK}, "segment is 3, but it does not divide the 4 workers of 4 GPUs; "),
        (
            {"segment": 4, "segment_topology": RACK, "gpus_per_worker": 2},
            "segment is 4, but it does not divide the 2 workers of 4 GPUs; ",
        ),
        (
            {"segment": 2, "segment_topology": RACK, "gpus_per_worker": None},
            "segment is 2, but it does not divide the 1 worker of 4 GPUs; ",
        ),
        (
            {"segment": 2, "segment_topology": RACK, "min_gpus": 1},
            "segment is 2, but it does not divide the 1 worker of 1 GPU; ",
        ),
        ({"segment": 0, "segment_topology": RACK}, "segment is 0, "),
        ({"segment": 2, "segment_topology": "a b"}, "segment_topology is 'a b', but a label's key is"),
    ],
)
def test_sizes_are_whole_segments(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidFieldError, match=re.escape(message)):
        JobSpec(name="x", project="a", command=("true",), **{"gpus": 4, "gpus_per_worker": 1, **fields})


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
