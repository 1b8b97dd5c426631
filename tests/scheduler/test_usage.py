"""Usage over time: a team that borrowed yesterday yields today."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.scheduler import QuotaRemoved, State, TimePassed, UsageRecalled
from kfp_gpuquota.scheduler.fairness.fairshare import divide, grant
from kfp_gpuquota.scheduler.state.copying import copied
from kfp_gpuquota.scheduler.state.model import GPU, Amount, Queue
from kfp_gpuquota.scheduler.state.usage import adjusted, note, used_by
from tests.scheduler.world import World

HALF_LIFE_S = 1000.0


def borrowers(half_life_s: float | None, waits_s: float) -> World:
    """Project a borrows all 8 GPUs in jobs of one; after a while project b asks for as many."""
    world = World(State(usage_half_life_s=half_life_s))
    world.node("n0", 8)
    world.project("a", 0)
    world.project("b", 0)
    for i in range(8):
        world.submit(f"a{i}", "a")
    world.step()
    world.now += waits_s
    for i in range(8):
        world.submit(f"b{i}", "b")
    world.step()
    return world


def sizes(world: World) -> tuple[int, int]:
    return tuple(sum(world.size(job) for job in world.specs if job.startswith(team)) for team in "ab")  # type: ignore[return-value]


def test_without_a_half_life_two_borrowers_are_equal_at_once() -> None:
    assert sizes(borrowers(None, 10_000.0))[0] == 4


def test_who_borrowed_for_long_yields_to_who_did_not() -> None:
    assert sizes(borrowers(HALF_LIFE_S, 10_000.0))[0] == 0


def test_what_was_borrowed_is_forgotten() -> None:
    world = borrowers(HALF_LIFE_S, 10_000.0)
    world.release()
    world.step()
    assert sizes(world) == (0, 8)
    for _ in range(200):
        world.now += HALF_LIFE_S / 16
        world.step()
        world.release()
    assert sizes(world) == (4, 4)


@pytest.mark.parametrize("gpus", [1, 3])
@pytest.mark.parametrize("every_s", [10.0, 30.0])
def test_a_gpu_that_two_borrow_in_turn_changes_hands_rarely(gpus: int, every_s: float) -> None:
    """Who has it has used more a moment later, and would lose it again: a job was stopped with every plan."""
    world = World(State(usage_half_life_s=HALF_LIFE_S))
    world.node("n0", gpus)
    world.project("a", 0)
    world.project("b", 0)
    for number in range(gpus):
        world.submit(f"a{number}", "a")
    world.step()
    world.now += 100.0
    for number in range(gpus):
        world.submit(f"b{number}", "b")
    evictions, of_b, until = 0, list[int](), world.now + 10 * HALF_LIFE_S
    while world.now < until:
        world.now += every_s
        evictions += len(world.step().evict)
        of_b.append(sizes(world)[1])
        world.release()
    assert 5 <= evictions <= 24
    assert sum(of_b) / len(of_b) == pytest.approx(gpus / 2, abs=0.2)


def test_a_plan_looks_again_while_jobs_wait_though_nothing_happens() -> None:
    world = borrowers(HALF_LIFE_S, 0.0)
    assert world.plan().again_at == world.now + HALF_LIFE_S / 16


def test_what_was_within_a_guarantee_is_not_borrowed_afterwards() -> None:
    """A guarantee that was lowered, or a department that is new, counted for the whole time before."""
    world = World(State(usage_half_life_s=HALF_LIFE_S))
    world.now = 1e9
    world.node("n0", 8)
    world.project("a", 8)
    world.submit("job", "a", 8)
    world.step()
    world.now += 10_000.0
    world.state.apply(TimePassed(world.now))
    world.project("a", 0, parent="new")
    world.project("new", 0)
    world.project("a", 0, parent="other")
    found = [used_by(q, world.now, HALF_LIFE_S) for name in ("a", "new", "other") for q in world.state.queues_of(name)]
    assert found == [0.0, 0.0, 0.0]
    world.state.apply(QuotaRemoved("a"))
    assert used_by(world.state.queues_of("a")[0], world.now + 1, HALF_LIFE_S) == pytest.approx(8.0, rel=0.01)


def test_a_guarantee_is_obtained_whatever_was_borrowed() -> None:
    world = borrowers(HALF_LIFE_S, 10_000.0)
    world.release()
    world.step()
    world.project("a", 3)
    world.step()
    world.release()
    world.step()
    assert sizes(world)[0] == 3


def test_usage_is_integrated_and_decays_by_half() -> None:
    queue = Queue("q", deserved=Amount(GPU, 0, 0))
    queue.held[0] = 3 * GPU
    note([queue], 1.0, HALF_LIFE_S)
    assert used_by(queue, 1.0 + 1e-3, HALF_LIFE_S) - used_by(queue, 1.0, HALF_LIFE_S) == pytest.approx(2e-3, rel=0.01)
    queue.held[0] = 0
    assert used_by(queue, 1.0 + HALF_LIFE_S, HALF_LIFE_S) == pytest.approx(queue.used / 2)


def test_what_is_recalled_counts() -> None:
    world = World(State(usage_half_life_s=HALF_LIFE_S))
    world.node("n0", 4)
    world.project("a", 0)
    world.project("b", 0)
    world.state.apply(UsageRecalled("a", 1e6, 0.0))
    for team in "ab":
        for i in range(4):
            world.submit(f"{team}{i}", team)
    world.step()
    assert sizes(world) == (0, 4)
    assert copied(world.state).ledger.half_life_s == HALF_LIFE_S


@given(
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=6),
    used=st.lists(st.floats(0, 1e6), min_size=6, max_size=6),
)
def test_weights_never_become_negative_and_those_who_used_their_part_keep_theirs(
    weights: list[float], used: list[float]
) -> None:
    given_weights = dict(enumerate(weights))
    assert all(weight >= 0 for weight in adjusted(given_weights, dict(enumerate(used))).values())
    fair = {i: 7 * weight for i, weight in given_weights.items()}
    total = sum(weights)
    assert adjusted(given_weights, fair) == pytest.approx({i: w / total for i, w in given_weights.items()})


def test_a_surplus_is_divided_by_weight_less_usage() -> None:
    queues = [Queue(name) for name in "ab"]
    for queue in queues:
        queue.requested[0] = 100 * GPU
    used = {"a": 3.0, "b": 1.0}
    shares = divide(queues, 0, 8 * GPU, grant(queues, 0, 8 * GPU), lambda queue: used[queue.name])
    assert [share / GPU for share in shares] == [2, 6]
