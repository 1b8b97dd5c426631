"""What a team has borrowed counts on Kubernetes, too, also for the next leader, and is not written all the time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest

from kfp_gpuquota.api import Order
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import GpuQuota, GpuQuotaStatus, OverQuotaUsage
from kfp_gpuquota.cluster.kubernetes.quota.borrowed import LEAST_S, WRITTEN_EVERY_S, Borrowed
from kfp_gpuquota.scheduler import State
from kfp_gpuquota.scheduler.state.usage import used_by
from tests.kubernetes.detached import POLICIES, QUOTAS, detached
from tests.scheduler.world import World

if TYPE_CHECKING:
    from collections.abc import Mapping

HALF_LIFE_S = 3600.0


def world_of(half_life_s: float | None = HALF_LIFE_S) -> World:
    """A team that has borrowed 4 GPUs since the first seconds."""
    world = World(State(usage_half_life_s=half_life_s))
    world.now = 1e9
    world.node("n0", 8)
    world.project("a", 0)
    world.submit("job", "a", 4)
    world.step()
    return world


def borrowed_in(world: World, quotas: Mapping[str, GpuQuota] | None = None) -> Borrowed:
    borrowed = Borrowed(world.state, quotas or {}, world.state.apply, lambda: world.now)
    borrowed.recall()
    return borrowed


def test_what_is_stored_is_written_again_only_when_it_says_something_else() -> None:
    world = world_of()
    borrowed = borrowed_in(world)
    assert borrowed.of("a") == ()
    written: list[OverQuotaUsage] = []
    for _ in range(600):
        world.now += 1
        (note,) = borrowed.of("a") or (None,)
        if note is not None and note not in written:
            written.append(note)
    assert 2 <= len(written) <= 600 / WRITTEN_EVERY_S + 1
    (worker,) = world.of("job")
    world.leave(worker)
    world.exit(worker)
    world.now += WRITTEN_EVERY_S
    last = borrowed.of("a")
    for _ in range(100):
        world.now += HALF_LIFE_S / 50
        assert borrowed.of("a") == last, "what is halved by its age needs no write"


@pytest.mark.parametrize("away_s", [0.0, 5000.0])
def test_another_leader_knows_what_was_borrowed_and_counts_the_time_between(away_s: float) -> None:
    world = world_of()
    borrowed = borrowed_in(world)
    world.now += 3000.0
    usage = borrowed.of("a")
    expected = used_by(world.state.queues_of("a")[0], world.now + away_s, HALF_LIFE_S)
    again = world_of()
    again.now = world.now + away_s
    quota = GpuQuota(Metadata(name="a"), status=GpuQuotaStatus(usage=usage))
    recalled = borrowed_in(again, {"a": quota})
    found = used_by(again.state.queues_of("a")[0], again.now, HALF_LIFE_S)
    assert found == pytest.approx(expected, rel=1e-3)
    assert recalled.of("a")


def test_another_leader_knows_what_was_borrowed_in_a_pool_in_which_nothing_of_the_team_is_left() -> None:
    world = world_of()
    usage = (OverQuotaUsage(7200.0, world.now, "a100"),)
    recalled = borrowed_in(world, {"a": GpuQuota(Metadata(name="a"), status=GpuQuotaStatus(usage=usage))})
    assert usage[0] in recalled.of("a")
    world.node("n1", 1, pool="a100")
    world.submit("again", "a", 1, node_pool="a100")
    world.step()
    assert world.size("again") == 1


def test_a_rule_that_is_new_counts_from_then_and_one_that_is_gone_no_more() -> None:
    world = world_of(None)
    borrowed = borrowed_in(world)
    world.now += 10_000.0
    assert borrowed.of("a") == ()
    world.state.ledger.half_life_s = HALF_LIFE_S
    borrowed.recall()
    assert used_by(world.state.queues_of("a")[0], world.now, HALF_LIFE_S) == 0.0
    world.now += 100.0
    assert borrowed.of("a")[0].gpu_seconds == pytest.approx(400.0, rel=0.02)
    world.state.ledger.half_life_s = None
    borrowed.recall()
    assert borrowed.of("a") == ()


def test_another_leader_knows_what_users_have_used_without_their_names() -> None:
    def world_with_users() -> World:
        world = World(State(usage_half_life_s=HALF_LIFE_S))
        world.now = 1e9
        world.node("n0", 1)
        world.project("a", 1, order=Order.FAIR_USERS)
        return world

    world = world_with_users()
    world.submit("job", "a", 1, user="ann")
    world.step()
    borrowed = borrowed_in(world)
    world.now += 3000.0
    (note,) = borrowed.of("a")
    assert note.gpu_seconds < LEAST_S
    assert "ann" not in msgspec.json.encode(note).decode()
    again = world_with_users()
    again.now = world.now
    recalled = borrowed_in(again, {"a": GpuQuota(Metadata(name="a"), status=GpuQuotaStatus(usage=(note,)))})
    assert recalled.of("a")[0].users == pytest.approx(note.users)
    for user in ("ann", "bob"):
        again.submit(user, "a", 1, user=user)
    assert [bind.job for bind in again.step().bind] == ["bob"]


@pytest.mark.parametrize("stored", [-5.0, 1e300])
def test_a_status_that_somebody_has_edited_does_no_harm(stored: float) -> None:
    world = world_of()
    quota = GpuQuota(Metadata(name="a"), status=GpuQuotaStatus(usage=(OverQuotaUsage(stored, world.now + 1e6),)))
    borrowed = borrowed_in(world, {"a": quota})
    world.step()
    assert all(note.gpu_seconds >= 0 for note in borrowed.of("a"))


def test_the_controller_counts_by_its_policy_and_stores_it() -> None:
    async def scenario() -> tuple[float | None, float]:
        async with detached() as test:
            spec = {"usageHalfLifeSeconds": HALF_LIFE_S}
            test.see(POLICIES, {"metadata": {"name": "default", "uid": "policy"}, "spec": spec})
            test.node()
            usage = [{"gpuSeconds": 7200, "at": test.controller._now()}]
            meta = {"name": "a", "uid": "quota-a"}
            test.see(QUOTAS, {"metadata": meta, "spec": {"guaranteed": 0}, "status": {"usage": usage}})
            test.pod("a", "p", node="node")
            await test.start()
            (note,) = test.controller.snapshot.borrowed.of("a")
            return test.controller.snapshot.state.ledger.half_life_s, note.gpu_seconds

    half_life_s, used = asyncio.run(scenario())
    assert half_life_s == HALF_LIFE_S
    assert used == pytest.approx(7200, rel=0.01)
