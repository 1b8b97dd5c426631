"""Which workload may use how much of a device, which releases memory, which process is killed."""

from random import Random

import pytest

from kfp_gpuquota.fractions import Policy, Sample
from tests.fractions.world import DEVICE, ROUND_S, TOTAL, World

TIMEOUT_ROUNDS = 40  # yield_s and term_s at 0.2 s per round, with a margin


def settled(world: World, name: str) -> World:
    world.round()
    assert world.workloads[name].running
    world.rounds(5)
    return world


def runs(world: World, name: str) -> bool:
    return world.workloads[name].running


def test_a_trainer_alone_uses_its_limit() -> None:
    world = World()
    trainer = world.add("trainer", 0.25, 0.8, listens=True)
    settled(world, "trainer")
    assert world.allocate("trainer", trainer.limit)
    assert trainer.used == int(0.8 * TOTAL)


def test_a_trainer_yields_to_an_arriving_owner_and_nobody_is_ended() -> None:
    world = World()
    trainer = world.add("trainer", 0.25, 0.8, listens=True)
    settled(world, "trainer")
    world.allocate("trainer", trainer.limit)
    owner = world.add("owner", 0.75, 0.75)
    world.round()
    assert not runs(world, "owner"), "its request is not free yet"
    world.rounds(3)
    assert runs(world, "owner")
    assert world.allocate("owner", owner.request)
    assert trainer.used == trainer.request
    assert not world.killed


def test_a_process_that_does_not_listen_is_ended_for_an_arriving_owner() -> None:
    world = World()
    deaf = world.add("deaf", 0.25, 0.8)
    settled(world, "deaf")
    world.allocate("deaf", deaf.limit)
    owner = world.add("owner", 0.75, 0.75)
    kill = world.round().kills[0]
    assert (kill.workload, kill.beneficiary) == ("deaf", "owner")
    assert kill.over_mib == int(0.8 * TOTAL) - int(0.25 * TOTAL)
    world.round()
    assert owner.running


def test_a_listener_that_does_not_follow_in_time_counts_as_silent() -> None:
    world = World(Policy(killer=True, yield_s=1.0))
    stuck = world.add("stuck", 0.25, 0.8, listens=True, delay=0)
    settled(world, "stuck")
    world.allocate("stuck", stuck.limit)
    stuck.delay = 1000
    world.add("owner", 0.75, 0.75)
    world.rounds(int(1.0 / ROUND_S))
    assert not world.killed
    world.rounds(2)
    assert world.killed == ["stuck"]
    world.round()
    assert world.workloads["owner"].running


def test_the_killer_is_off_by_default_and_then_only_reports_once() -> None:
    world = World(Policy())
    world.add("deaf", 0.25, 0.8)
    settled(world, "deaf")
    world.allocate("deaf", int(0.8 * TOTAL))
    world.add("owner", 0.75, 0.75)
    assert [kill.only_reported for kill in world.round().kills] == [True]
    assert not world.round().kills
    assert not world.workloads["owner"].running


@pytest.mark.parametrize(
    ("cheap", "dear"),
    [
        ({"priority": 50}, {"priority": 75}),
        ({"used": 0.5}, {"used": 0.3}),
        ({"since": 20.0}, {"since": 10.0}),
    ],
    ids=["least priority", "most over its request", "youngest"],
)
def test_the_cheapest_borrower_is_ended(cheap: dict[str, float], dear: dict[str, float]) -> None:
    world = World()
    for name, facts in (("dear", dear), ("cheap", cheap)):
        workload = world.add(name, 0.1, 0.9, priority=int(facts.get("priority", 50)))
        workload.since = facts.get("since", 0.0)
        settled(world, name)
        assert world.allocate(name, int(facts.get("used", 0.4) * TOTAL))
    world.add("owner", 0.35, 0.35)
    assert [kill.workload for kill in world.round().kills] == ["cheap"]


def test_no_more_are_ended_than_needed() -> None:
    world = World()
    for number in range(4):
        world.add(f"w{number}", 0.1, 0.25)
        settled(world, f"w{number}")
        world.allocate(f"w{number}", TOTAL // 4)
    world.add("owner", 0.4, 0.4)
    world.rounds(TIMEOUT_ROUNDS)
    assert len(world.killed) == 2
    assert world.workloads["owner"].running


def test_who_is_over_its_limit_is_ended_at_once_though_the_device_is_empty() -> None:
    world = World()
    greedy = world.add("greedy", 0.25, 0.5)
    settled(world, "greedy")
    greedy.used = int(0.6 * TOTAL)
    (kill,) = world.round().kills
    assert kill.over_mib == int(0.6 * TOTAL) - int(0.5 * TOTAL)
    assert not kill.beneficiary


def test_who_ignores_sigterm_is_forced() -> None:
    world = World(Policy(killer=True, term_s=1.0))
    greedy = world.add("greedy", 0.25, 0.5, obeys_sigterm=False)
    settled(world, "greedy")
    greedy.used = TOTAL
    forced = [kill.force for _ in range(8) for kill in world.round().kills]
    assert forced == [False, True]


def test_a_silent_owners_unused_guarantee_is_not_lent() -> None:
    world = World()
    world.add("owner", 0.75, 0.75)
    settled(world, "owner")
    trainer = world.add("trainer", 0.25, 0.8, listens=True)
    settled(world, "trainer")
    world.allocate("trainer", trainer.limit)
    assert trainer.used == trainer.request
    assert world.allocate("owner", int(0.75 * TOTAL))


def test_a_policy_lends_a_silent_owners_unused_guarantee() -> None:
    world = World(Policy(killer=True, lend_silent=True))
    world.add("owner", 0.75, 0.75)
    settled(world, "owner")
    trainer = world.add("trainer", 0.25, 0.8, listens=True)
    settled(world, "trainer")
    world.allocate("trainer", trainer.limit)
    assert trainer.used == int(0.8 * TOTAL)


def test_an_owner_that_asks_before_it_grows_lends_what_it_does_not_want() -> None:
    world = World()
    owner = world.add("owner", 0.75, 0.75, listens=True)
    owner.wanted = TOTAL // 10
    settled(world, "owner")
    trainer = world.add("trainer", 0.25, 0.8, listens=True)
    settled(world, "trainer")
    assert world.allocate("trainer", trainer.limit)
    owner.wanted = owner.request
    world.rounds(4)
    assert world.allocate("owner", owner.request)
    assert trainer.used == trainer.request
    assert not world.killed


def test_lent_memory_goes_by_priority_then_by_request() -> None:
    world = World()
    low = world.add("low", 0.1, 1.0, listens=True, priority=50)
    high = [world.add(f"high{n}", 0.1, 0.35, listens=True, priority=75) for n in range(2)]
    world.rounds(8)
    assert [w.follows for w in high] == [int(0.35 * TOTAL)] * 2
    assert low.follows == TOTAL - 2 * int(0.35 * TOTAL)


def test_memory_of_processes_that_nobody_knows_is_not_lent() -> None:
    world = World()
    trainer = world.add("trainer", 0.25, 1.0, listens=True)
    world.add("", 0.0, 0.0).running = True
    world.workloads[""].used = TOTAL // 2
    unknown = world.workloads.pop("")
    claims = [trainer.claim]
    answer = world.enforcer.observe({DEVICE: TOTAL}, claims, [Sample(unknown.process, "", DEVICE, TOTAL // 2)], 1.0)
    assert answer.ready == {"trainer"}
    assert not answer.kills


def test_an_enforcer_that_starts_again_remembers_by_what_is_followed() -> None:
    """The borrower still follows a high limit of the earlier enforcer: the new workload must wait for it."""
    world = World()
    trainer = world.add("trainer", 0.25, 0.8, listens=True, delay=3)
    settled(world, "trainer")
    world.add("owner", 0.75, 0.75)
    world.enforcer = type(world.enforcer)(world.enforcer.policy)
    world.rounds(2)
    assert not runs(world, "owner")
    world.rounds(5)
    assert runs(world, "owner")
    assert trainer.follows == trainer.request


@pytest.mark.parametrize("block", range(10))
def test_the_guarantee_holds_in_random_histories(block: int) -> None:
    """1,000 histories: workloads start in bounded time, and no process within its request is killed (World.round)."""
    for seed in range(block * 100, block * 100 + 100):
        random = Random(seed)
        world = World(Policy(killer=True))
        for _ in range(60):
            world.random_step(random)
            world.round()
            _check_newcomers(world, seed)


def _check_newcomers(world: World, seed: int) -> None:
    for workload in world.workloads.values():
        if workload.running:
            workload.waiting_since = None
            continue
        workload.waiting_since = world.now if workload.waiting_since is None else workload.waiting_since
        waited = world.now - workload.waiting_since
        assert waited <= 2 * (world.enforcer.policy.yield_s + world.enforcer.policy.term_s) + 8 * ROUND_S, seed
    listeners = [w for w in world.workloads.values() if w.listens and w.running]
    if len(listeners) == len(world.workloads):
        assert sum(w.follows or 0 for w in listeners) <= TOTAL, "limits that all follow never exceed the device"


def test_among_listeners_an_allocation_within_the_limit_never_fails() -> None:
    for seed in range(100):
        random = Random(seed)
        world = World(Policy(killer=True))
        for _ in range(60):
            world.random_step(random)
            for workload in world.workloads.values():
                workload.listens, workload.delay = True, min(workload.delay, 2)
            world.round()
        assert not world.killed, seed
        assert not sum(w.failed_allocations for w in world.workloads.values()), seed
