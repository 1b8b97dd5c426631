"""Fairness among the users of a project: the order against a naive statement of the rule, and what it must not cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gpuquota.api import Order
from kfp_gpuquota.scheduler import Plan, State, UsageRecalled, UserChanged, WorkerGone, plan
from kfp_gpuquota.scheduler.dump import load_state, take_dump
from kfp_gpuquota.scheduler.state import usage
from kfp_gpuquota.scheduler.state.copying import copied
from kfp_gpuquota.scheduler.state.model import GPU
from tests.scheduler.test_growth import report
from tests.scheduler.world import World

USERS = ("ann", "bob", "cem")
HALF_LIFE_S = 1000.0


class Asked(NamedTuple):
    """A job: how many GPUs its user asks for, at which priority."""

    user: str
    gpus: int
    priority: int


ASKED = st.builds(Asked, st.sampled_from(USERS), st.integers(1, 3), st.sampled_from([50, 50, 50, 60]))


def shared(gpus: int, guaranteed: int, order: Order = Order.FAIR_USERS, half_life_s: float | None = None) -> World:
    """One node, one project."""
    world = World(State(usage_half_life_s=half_life_s))
    world.node("n", gpus)
    world.project("team", guaranteed, order=order)
    return world


def asks(world: World, jobs: list[Asked], prefix: str = "j") -> None:
    for number, one in enumerate(jobs):
        world.submit(f"{prefix}{number:02}", "team", one.gpus, user=one.user, priority=one.priority)


def started(decided: Plan) -> list[str]:
    return sorted(bind.job for bind in decided.bind)


def naive(world: World, waiting: dict[str, Asked], guaranteed: int) -> list[str]:
    """Return the jobs that start: one after the other the first in the order, each time again, until none fits."""
    held: dict[str, int] = defaultdict(int)
    for running in world.workers.values():
        held[world.state.jobs[running.job].user.name] += len(running.devices)
    idle, starts, tried = world.nodes["n"] - sum(held.values()), [], set()
    while left := [name for name in waiting if name not in tried]:
        total = sum(held.values())

        def place(name: str, total: int = total) -> tuple[int, bool, int, str]:
            job = waiting[name]
            return -job.priority, total + job.gpus > guaranteed, held[job.user], name  # names are in order of age

        name = min(left, key=place)
        tried.add(name)
        if waiting[name].gpus <= idle:
            idle, held[waiting[name].user] = idle - waiting[name].gpus, held[waiting[name].user] + waiting[name].gpus
            starts.append(name)
    return sorted(starts)


@given(st.lists(ASKED, max_size=4), st.lists(ASKED, max_size=9), st.integers(1, 9), st.integers(0, 9))
@settings(deadline=None)
def test_jobs_start_in_the_order_of_the_naive_rule(
    first: list[Asked], then: list[Asked], gpus: int, guaranteed: int
) -> None:
    world = shared(gpus, guaranteed)
    asks(world, first, "a")
    world.carry_out(plan(world.state, world.now, ("allocate",)))
    waiting = {f"a{i:02}": one for i, one in enumerate(first) if not world.size(f"a{i:02}")}
    asks(world, then, "b")
    waiting |= {f"b{i:02}": one for i, one in enumerate(then)}
    assert started(plan(world.state, world.now, ("allocate",))) == naive(world, waiting, guaranteed)


@given(st.lists(ASKED, max_size=10), st.integers(1, 9), st.integers(0, 9), st.booleans())
@settings(deadline=None)
def test_one_user_alone_has_the_same_plans_as_without_fairness(
    jobs: list[Asked],
    gpus: int,
    guaranteed: int,
    counts: bool,
) -> None:
    half_life_s = HALF_LIFE_S if counts else None
    worlds = [shared(gpus, guaranteed, order, half_life_s) for order in (Order.FAIR, Order.FAIR_USERS)]
    for number, one in enumerate(jobs):
        for world in worlds:
            world.submit(f"j{number}", "team", one.gpus, 1, one.gpus + 1, user="ann", priority=one.priority)
        plans = [world.step() for world in worlds]
        assert plans[0] == plans[1]
        for world in worlds:
            if number % 3 == 2 and world.workers:
                world.release()
                world.remove(min(world.specs))


def test_the_job_of_the_user_who_uses_less_is_next() -> None:
    world = shared(4, 4)
    asks(world, [Asked("ann", 1, 50)] * 6 + [Asked("bob", 1, 50)])
    world.settle()
    assert {job for job in world.specs if world.size(job)} == {"j00", "j01", "j02", "j06"}
    asks(world, [Asked("bob", 1, 50)], "k")
    waiting = world.plan().waiting
    assert [waiting[name].details["user_gpus"] for name in ("j03", "k00")] == [3, 1]


def test_the_reason_names_who_uses_what_and_whose_job_is_next() -> None:
    world = shared(4, 4)
    asks(world, [Asked("ann", 1, 50)] * 5, "a")
    world.settle()
    asks(world, [Asked("bob", 1, 50)], "b")
    reasons = world.plan().waiting
    assert reasons["a04"].message.endswith("; user ann uses 4 of the 4 GPUs of team, so bob's job b00 comes first")
    assert "comes first" not in reasons["b00"].message


def test_jobs_of_several_users_that_wait_for_one_gpu_are_one_queue() -> None:
    world = shared(1, 1)
    asks(world, [Asked("cem", 1, 50)])
    world.settle()
    asks(world, [Asked("ann", 1, 50), Asked("bob", 1, 50)], "k")
    reasons = world.plan().waiting
    assert reasons["k00"].message == reasons["k01"].message
    assert "so the first of 2 such jobs starts when" in reasons["k00"].message
    assert reasons["k00"].details["user"] == "ann"


def test_no_job_is_stopped_for_another_user_of_the_project() -> None:
    world = shared(4, 4)
    asks(world, [Asked("ann", 1, 50)] * 4, "a")
    world.settle()
    asks(world, [Asked("bob", 1, 50)] * 4, "b")
    assert all(plan.empty for plan in world.settle())


def test_priority_comes_before_users() -> None:
    world = shared(2, 2)
    asks(world, [Asked("ann", 1, 50)], "a")
    world.settle()
    asks(world, [Asked("bob", 1, 50), Asked("ann", 1, 60)], "b")
    assert started(world.step()) == ["b01"]


def test_a_job_within_the_guarantee_comes_before_one_beyond_it() -> None:
    world = shared(4, 2)
    asks(world, [Asked("ann", 1, 50)], "a")
    world.settle()
    asks(world, [Asked("bob", 3, 50), Asked("ann", 1, 50)], "b")
    assert started(world.step()) == ["b01"]


def test_who_used_much_comes_after_who_used_little_and_that_is_forgotten() -> None:
    def next_user(idle_s: float) -> str:
        world = shared(4, 4, half_life_s=HALF_LIFE_S)
        asks(world, [Asked("ann", 4, 50)], "a")
        world.settle()
        world.now += 10 * HALF_LIFE_S
        world.remove("a00")
        for worker in list(world.workers):
            del world.workers[worker]
            world.state.apply(WorkerGone(worker, world.now))
        world.now += idle_s
        asks(world, [Asked("ann", 4, 50), Asked("bob", 4, 50)], "b")
        return {"b00": "ann", "b01": "bob"}[started(world.step())[0]]

    assert next_user(0.0) == "bob"
    assert next_user(20 * HALF_LIFE_S) == "ann"


@given(st.lists(ASKED, max_size=8), st.lists(ASKED, max_size=6), st.integers(1, 8), st.booleans())
@settings(deadline=None)
def test_a_state_that_was_restored_or_copied_decides_alike(
    first: list[Asked],
    then: list[Asked],
    gpus: int,
    counts: bool,
) -> None:
    world = shared(gpus, gpus, half_life_s=HALF_LIFE_S if counts else None)
    asks(world, first, "a")
    world.step()
    world.now += 100
    asks(world, then, "b")
    expected = world.plan()
    assert plan(copied(world.state), world.now) == expected
    assert plan(load_state(take_dump(world.state, world.now, "1")), world.now) == expected


def test_past_use_that_was_stored_counts_for_users_who_come_later() -> None:
    world = shared(1, 1, half_life_s=HALF_LIFE_S)
    world.state.apply(UsageRecalled("team", 0.0, 0.0, users={usage.key_of("team", "ann"): 5000.0}))
    asks(world, [Asked("ann", 1, 50), Asked("bob", 1, 50)])
    assert started(world.step()) == ["j01"]


@pytest.mark.parametrize("half_life_s", [None, HALF_LIFE_S])
def test_users_without_jobs_cost_no_memory(monkeypatch: pytest.MonkeyPatch, half_life_s: float | None) -> None:
    """The writer of the label may write another one for each job."""
    monkeypatch.setattr(usage, "MOST_USERS", 8)
    world = shared(1, 1, half_life_s=half_life_s)
    for number in range(3 * usage.MOST_USERS):
        world.submit("job", "team", user=f"user{number}")
        world.step()
        world.state.apply(UserChanged("job", f"renamed{number}"))
        world.remove("job")
        world.release()
    (queue,) = world.state.queues_of("team")
    assert len(queue.users) == 0
    assert len(queue.recalled) <= 2 * usage.MOST_USERS


def test_a_user_without_jobs_keeps_its_past_use() -> None:
    world = shared(4, 4, half_life_s=HALF_LIFE_S)
    asks(world, [Asked("ann", 4, 50)])
    world.settle()
    world.now += 500.0
    world.remove("j00")
    for worker in list(world.workers):
        del world.workers[worker]
        world.state.apply(WorkerGone(worker, world.now))
    (queue,) = world.state.queues_of("team")
    assert not queue.users
    used = queue.recalled[usage.key_of("team", "ann")][0]
    asks(world, [Asked("ann", 4, 50)], "k")
    assert queue.users["ann"].used == used > 1000.0


def test_the_reasons_of_many_users_cost_a_constant_time_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, use_of = Counter[int](), usage.use_of

    def counted(*given: Any) -> float:
        asked[users] += 1
        return use_of(*given)

    monkeypatch.setattr(usage, "use_of", counted)
    for users in (100, 400):
        world = shared(4, 4)
        for number in range(users):
            world.submit(f"j{number:03}", "team", user=f"user{number:03}")
        assert len(world.plan().waiting) == users - 4
    assert asked[400] < 5 * asked[100]


def test_a_job_that_changes_its_user_takes_what_it_holds_with_it() -> None:
    world = shared(4, 4)
    asks(world, [Asked("ann", 2, 50), Asked("ann", 1, 50)])
    world.settle()
    world.state.apply(UserChanged("j00", "bob"))
    world.check_indexes()
    users = {name: user.held / GPU for name, user in world.state.queues_of("team")[0].users.items()}
    assert users == {"ann": 1, "bob": 2}


def test_a_project_may_change_its_order_while_jobs_wait() -> None:
    world = shared(2, 2, Order.FAIR)
    asks(world, [Asked("ann", 1, 50)], "a")
    world.settle()
    asks(world, [Asked("ann", 1, 50), Asked("bob", 1, 50)], "b")
    assert started(world.plan()) == ["b00"]
    world.project("team", 2, order=Order.FAIR_USERS)
    assert started(world.plan()) == ["b01"]
    world.project("team", 2)
    assert started(world.plan()) == ["b00"]


@pytest.mark.parametrize(("order", "sizes"), [(Order.FAIR, [2, 2, 2]), (Order.FAIR_USERS, [2, 1, 3])])
def test_what_is_lent_is_divided_between_users_first(order: Order, sizes: list[int]) -> None:
    world = shared(6, 6, order)
    for name, user in (("a0", "ann"), ("a1", "ann"), ("b0", "bob")):
        world.submit(name, "team", 1, 1, 8, user=user, cool_down_s=0.0)
    world.settle()
    assert sorted(world.size(name) for name in ("a0", "a1", "b0")) == sorted(sizes)
    assert world.size("b0") == sizes[2]


def test_lent_gpus_return_to_the_user_who_has_less() -> None:
    world = shared(6, 6)
    for name in ("a0", "a1"):
        world.submit(name, "team", 1, 1, 8, user="ann", cool_down_s=0.0)
    world.settle()
    assert world.size("a0") + world.size("a1") == 6
    world.submit("b0", "team", 1, 1, 8, user="bob", cool_down_s=0.0)
    world.settle()
    assert world.size("b0") >= 1


@pytest.mark.parametrize("users", ["ab", "abc"])
def test_what_is_lent_changes_users_rarely_though_past_use_changes_all_the_time(users: str) -> None:
    world = shared(3 * len(users) - 1, 0, half_life_s=HALF_LIFE_S)
    for user in users:
        world.submit(user, "team", 1, 1, 8, user=user, cool_down_s=0.0)
    world.settle()
    seen: list[tuple[int, ...]] = []
    for _ in range(200):
        world.now += HALF_LIFE_S / 50
        for user in users:
            report(world, user, world.size(user), 10.0 * world.size(user))
        world.settle()
        seen.append(tuple(world.size(user) for user in users))
    changes = sum(before != after for before, after in pairwise(seen))
    assert 1 <= changes <= 8
    assert all(max(sizes) == 3 and sum(sizes) == 3 * len(users) - 1 for sizes in seen)


def test_long_waits_do_not_give_a_user_more_than_the_order_does() -> None:
    world = shared(2, 2)
    world.state.ledger.reserve_after_s = 60.0
    asks(world, [Asked("ann", 1, 50)] * 4, "a")
    world.settle()
    world.now += 1000.0
    asks(world, [Asked("bob", 1, 50)], "b")
    world.remove("a00")
    world.release()
    assert started(world.step()) == ["b00"]


def test_what_a_large_job_needs_is_kept_for_it_once_its_user_is_first() -> None:
    world = shared(4, 4)
    world.state.ledger.reserve_after_s = 60.0
    asks(world, [Asked("ann", 1, 50)] * 4, "a")
    world.settle()
    asks(world, [Asked("bob", 4, 50)], "b")
    asks(world, [Asked("ann", 1, 50)] * 4, "c")
    for name in ("a00", "a01", "a02"):
        world.now += 100.0
        world.remove(name)
        world.release()
        world.step()
    world.remove("a03")
    world.release()
    assert started(world.step()) == ["b00"]
