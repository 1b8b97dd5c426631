"""Fair share as tables: for each queue (guaranteed, requested, weight, priority), what it gets of the total."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.scheduler.fairness.fairshare import assign_shares, divide, grant
from kfp_gpuquota.scheduler.state.model import BOUNDLESS, GPU, UNLIMITED, Amount, Queue


def queue(
    guaranteed: float,
    requested: float,
    weight: float = 1,
    priority: int = 100,
    limit: float = UNLIMITED,
    name: str = "q",
) -> Queue:
    made = Queue(
        name=name,
        deserved=Amount(guaranteed * GPU),
        limit=Amount(limit * GPU),
        weights=(weight, 1, 1),
        priority=priority,
    )
    made.requested = [requested * GPU, 0, 0]
    return made


def divided(queues: list[Queue], total: float) -> list[float]:
    return divide(queues, 0, total * GPU, grant(queues, 0, total * GPU))


@pytest.mark.parametrize(
    ("why", "total", "queues", "expected"),
    [
        ("each its guarantee", 4, [(2, 2), (2, 2)], [2, 2]),
        ("no more than it asks for", 4, [(2, 1), (2, 3)], [1, 3]),
        ("surplus by weight", 8, [(0, 8, 3), (0, 8, 1)], [6, 2]),
        ("surplus in whole units, the rest by remainder", 8, [(4, 7, 4), (2, 3, 2)], [5, 3]),
        ("surplus by priority first", 4, [(1, 4, 1, 100), (1, 4, 1, 200)], [1, 3]),
        ("weight 0 borrows nothing while others want to", 4, [(1, 4, 0), (1, 4, 1)], [1, 3]),
        ("weight 0 borrows what nobody else wants", 4, [(1, 4, 0), (1, 2, 1)], [2, 2]),
        ("what one does not want goes to the others", 9, [(0, 1), (0, 9), (0, 9)], [1, 4, 4]),
        ("no more than the limit", 6, [(1, 6, 1, 100, 2), (1, 6)], [2, 4]),
        ("guarantees count in full even beyond the total", 2, [(2, 2), (2, 2)], [2, 2]),
        ("a higher priority's guarantee first where not all are there", 8, [(8, 8, 1, 100), (8, 8, 1, 200)], [0, 8]),
        ("what a higher priority leaves, the older one first", 8, [(4, 4), (4, 4), (4, 2, 1, 200)], [4, 2, 2]),
        ("a guarantee that is not requested costs nobody", 8, [(8, 8, 1, 100), (8, 0, 1, 200)], [8, 0]),
        ("an unlimited guarantee is worth the whole", 4, [(UNLIMITED, 9)], [4]),
    ],
)
def test_what_each_queue_gets(why: str, total: float, queues: list[tuple[float, ...]], expected: list[float]) -> None:
    made = [queue(*map(float, q[:3]), *map(int, q[3:4]), *q[4:]) for q in queues]  # type: ignore[arg-type]
    assert [share / GPU for share in divided(made, total)] == expected, why


def test_departments_divide_before_their_projects() -> None:
    left, right = queue(2, 6, name="left"), queue(2, 6, name="right")
    children = [queue(2, 6, name="a"), queue(0, 2, name="b"), queue(0, 4, name="c")]
    left.children = {"a": children[0]}
    right.children = {"b": children[1], "c": children[2]}
    assign_shares([left, right], [8 * GPU, 0, 0])
    assert [child.share.gpu / GPU for child in children] == [4, 2, 2]


def test_what_a_queue_keeps_is_never_above_its_limit() -> None:
    static = queue(4, 9, limit=2)
    static.deserved = BOUNDLESS
    assign_shares([static], [8 * GPU, 0, 0])
    assert static.keeps.gpu == 2 * GPU


rows = st.tuples(st.integers(0, 8), st.integers(0, 12), st.sampled_from([0, 1, 2, 5]), st.sampled_from([50, 100]))


@given(total=st.integers(0, 30), queues=st.lists(rows, min_size=1, max_size=6))
def test_nothing_is_given_twice_and_nothing_wanted_is_left_over(
    total: int, queues: list[tuple[int, int, int, int]]
) -> None:
    made = [queue(*q) for q in queues]
    shares = [s / GPU for s in divided(made, total)]
    granted = [amount / GPU for amount in grant(made, 0, total * GPU)]
    guaranteed = [min(g, want) for g, (_, want, _, _) in zip(granted, queues, strict=True)]
    wanted = [want for _, want, _, _ in queues]
    assert all(g <= s <= w for g, s, w in zip(guaranteed, shares, wanted, strict=True))
    assert sum(shares) == max(sum(guaranteed), min(total, sum(wanted)))
