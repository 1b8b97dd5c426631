"""A state's dump, read elsewhere, gives the same plan and explanations (`test_invariants` has random histories)."""

from __future__ import annotations

import msgspec
import pytest

from kfp_gpuquota.api import JobSpec, PoolQuota, Reason, ReasonCode
from kfp_gpuquota.api.defragmentation import Defragmentation
from kfp_gpuquota.errors import UsageError
from kfp_gpuquota.scheduler import Defragmented, JobDeferred, JobSubmitted, NodesBarred, Plan, State, UsageRecalled
from kfp_gpuquota.scheduler.dump import FORMAT, Replay, decode_dump, load_state, replay, take_dump
from tests.scheduler.world import World

SECRET = "hunter2-in-the-environment"


def busy() -> World:
    """A cluster with all that a state can have: pools, departments, shares, parts, deferred and barred jobs."""
    rule = Defragmentation(window="Mon-Fri 22:00-06:00", time_zone="Europe/Berlin")
    world = World(State(usage_half_life_s=3600.0, defragmentation=rule))
    world.state.apply(Defragmented(5.0, 60.0))
    world.state.ledger.reclaim_shelter_s = 900.0
    world.node("n1", 4, cpu=16.0, labels={"rack": "a"})
    world.node("n2", 4, labels={"rack": "b"})
    world.node("h1", 2, pool="h100")
    world.project("department", 6, 9)
    world.project("a", 4, parent="department", pools={"h100": PoolQuota(guaranteed=1)})
    world.project("b", 2, parent="department")
    world.state.apply(UsageRecalled("b", 500.0, 0.0))
    world.submit("elastic", "a", 4, 1, 6, gpus_per_worker=1, environment={"PASSWORD": SECRET})
    world.step()
    world.submit("gang", "b", 2, gpus_per_worker=1, required_topology="rack", min_run_time_s=60.0)
    world.submit("pooled", "a", 3, node_pool="h100", gpus_per_worker=1)
    world.submit("deferred", "b", 1)
    reason = Reason(code=ReasonCode.PODS_NOT_READY, message="its pods did not start")
    world.state.apply(JobDeferred("deferred", world.now + 60, reason))
    world.submit("barred", "b", 1)
    world.state.apply(NodesBarred("barred", ("n1", "n2")))
    part = JobSpec(name="parts", project="b", command=("true",), gpus=1)
    two = msgspec.structs.replace(part, gpus=2, gpus_per_worker=1)
    world.state.apply(JobSubmitted("parts", part, world.now, movable=False, parts={"head": part, "worker": two}))
    return world


def replayed(world: World, at: float) -> Replay:
    return replay(decode_dump(msgspec.json.encode(take_dump(world.state, at, "0"))))


def test_a_replay_makes_the_plan_of_the_original_with_its_reasons_and_its_next_time() -> None:
    world = busy()
    for _ in range(3):
        world.now += 1
        expected = world.plan()
        assert not expected.empty or expected.waiting
        found = replayed(world, world.now)
        assert (found.same, found.plan) == (True, expected)
        world.carry_out(Plan(resize=expected.resize, evict=expected.evict))
        world.release()


def test_a_replayed_state_is_dumped_as_it_was_read() -> None:
    world = busy()
    dump = take_dump(world.state, world.now, "0")
    assert take_dump(load_state(dump), world.now, "0") == dump


def test_a_plan_that_another_version_made_is_reported_as_different() -> None:
    dump = take_dump(busy().state, 10.0, "0")
    found = replay(msgspec.structs.replace(dump, plan=Plan()))
    assert not found.same
    assert found.plan == dump.plan


def test_no_environment_and_no_command_is_in_a_dump() -> None:
    content = msgspec.json.encode(take_dump(busy().state, 10.0, "0"))
    assert b"elastic" in content
    assert SECRET.encode() not in content
    assert b"PASSWORD" not in content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not JSON", "not what `gpuquota debug state` writes"),
        (b'{"kind": "List", "items": []}', "missing required field `format`"),
        (msgspec.json.encode({"format": FORMAT + 1, "version": "9.9"}), "of version 9.9"),
    ],
)
def test_another_file_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        decode_dump(content)


def test_a_file_that_names_what_it_lacks_is_refused() -> None:
    dump = take_dump(busy().state, 10.0, "0")
    with pytest.raises(UsageError, match="it names 'n1'"):
        replay(msgspec.structs.replace(dump, nodes=dump.nodes[1:]))
