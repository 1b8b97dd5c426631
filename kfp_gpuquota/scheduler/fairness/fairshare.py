"""How much of the cluster each queue may have: guaranteed first, the surplus by priority and weight.

The rules of hierarchical proportional fairness as KAI-Scheduler documents them: per resource and parents before
children, each queue first gets min(deserved, requested, limit); the surplus goes to the highest priority that still
wants some, within a priority by over-quota weight, in whole units; what rounding leaves goes one unit at a time by
largest remainder, then to the older queue. A queue of weight 0 takes no surplus.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.scheduler.state import usage
from kfp_gpuquota.scheduler.state.model import GPU, UNLIMITED, Amount, Queue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Used = Callable[[Queue], float]

_UNITS: Final = (GPU, 1, 1)


def assign_shares(roots: Iterable[Queue], capacity: Sequence[float], used: Used | None = None) -> None:
    """Set `share` of every queue of the trees, from what they request now, and what they `used` of GPUs before."""
    level = sorted(roots, key=lambda q: (q.created, q.name))
    divided = [divide(level, r, capacity[r], used if r == 0 else None) for r in range(3)]
    for i, queue in enumerate(level):
        queue.set_share(Amount(*(shares[i] for shares in divided)))
        if queue.children:
            assign_shares(queue.children.values(), queue.share, used)


def divide(queues: Sequence[Queue], r: int, total: float, used: Used | None = None) -> list[float]:
    """The share of resource `r` of each of the siblings, oldest first, when there is `total` for all of them."""
    caps = [min(q.requested[r], q.limit[r]) for q in queues]
    # Unlimited guarantees are worth the whole; finite ones count in full even where they exceed it together.
    shares = [
        min(q.deserved[r] if q.deserved[r] < UNLIMITED else total, cap) for q, cap in zip(queues, caps, strict=True)
    ]
    if total == UNLIMITED:  # nobody counts what there is of it
        return caps
    left = total - sum(shares)
    amounts = None if used is None else [used(queue) for queue in queues]
    order = sorted(range(len(queues)), key=lambda i: -queues[i].priority)
    for _, group in groupby(order, key=lambda i: queues[i].priority):
        if left <= 0:
            break
        left = _give(list(group), queues, caps, shares, left, r, amounts)
    return shares


def _give(
    group: list[int],
    queues: Sequence[Queue],
    caps: list[float],
    shares: list[float],
    left: float,
    r: int,
    used: list[float] | None,
) -> float:
    """Share `left` within one priority; returns what nobody wants."""
    unit = _UNITS[r]
    while left > 0:
        hungry = [i for i in group if shares[i] < caps[i]]
        if not hungry:
            break
        # Weight 0 borrows nothing while others of the priority want to; when none does, all are equal.
        weights = {i: queues[i].weights[r] for i in hungry if queues[i].weights[r] > 0} or dict.fromkeys(hungry, 1.0)
        if used is not None:
            lighter = usage.adjusted(weights, dict(enumerate(used)))
            weights = {i: weight for i, weight in lighter.items() if weight > 0} or weights
        total = sum(weights.values())
        parts = {i: left * weight / total for i, weight in weights.items()}
        left -= _serve(parts, caps, shares, unit)
        if all(shares[i] < caps[i] for i in parts):
            return _leftovers(parts, caps, shares, left, unit)
    return left


def _serve(parts: dict[int, float], caps: list[float], shares: list[float], unit: int) -> float:
    """Give each its part in whole units, but no more than it wants; returns what was given."""
    given = 0.0
    for i, part in parts.items():
        got = min(part // unit * unit, caps[i] - shares[i])
        shares[i] += got
        given += got
    return given


def _leftovers(parts: dict[int, float], caps: list[float], shares: list[float], left: float, unit: int) -> float:
    """What rounding left, one unit at a time by largest remainder, then to the older queue."""
    for i in sorted(parts, key=lambda i: -(parts[i] % unit)):
        got = min(unit, left, caps[i] - shares[i])
        shares[i] += got
        left -= got
    return left
