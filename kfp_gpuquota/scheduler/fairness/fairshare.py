"""Computes the fair share of each queue: guaranteed quota first, then the surplus by priority and weight.

The rules are those of hierarchical proportional fairness as KAI-Scheduler documents them. Per resource, and parents
before children, each queue first gets min(deserved, requested, limit). The surplus goes to the highest priority with
unmet requests, within a priority by over-quota weight, in whole units. The rest from rounding goes one unit at a time
by largest remainder, then to the older queue. A queue of weight 0 gets no surplus while siblings of its priority with a
weight request it.

One rule is added: where the guarantees of a level exceed what is there (nodes were lost), a higher priority gets its
own in full before a lower one gets any. Rejected: all guarantees count in full, so that the queue that holds the rest
of the nodes keeps it, whatever its priority.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.scheduler.state import usage
from kfp_gpuquota.scheduler.state.model import GPU, UNLIMITED, Amount, Queue

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    Used = Callable[[Queue], float]

_UNITS: Final = (GPU, 1, 1)

KEPT_PART: Final = 0.25
"""While past use counts, parts change with time alone, so what is left from rounding would change hands, and stop jobs,
with every plan."""


def assign_shares(roots: Iterable[Queue], capacity: Sequence[float], used: Used | None = None) -> None:
    """Set `share` of every queue of the trees, from their present requests and their past GPU usage (`used`)."""
    level = sorted(roots, key=lambda q: (q.created, q.name))
    granted = [grant(level, r, capacity[r]) for r in range(3)]
    divided = [divide(level, r, capacity[r], granted[r], used if r == 0 else None) for r in range(3)]
    for i, queue in enumerate(level):
        queue.granted = Amount(*(amounts[i] for amounts in granted))
        queue.set_share(Amount(*(shares[i] for shares in divided)))
        if queue.children:
            assign_shares(queue.children.values(), queue.share, used)


def grant(queues: Sequence[Queue], r: int, total: float) -> list[float]:
    """Return the part of each sibling's guarantee of resource `r` that holds while there is only `total`.

    The guarantees of the highest priority hold, also where their sum exceeds `total`; a lower priority has what is
    left by those that are requested, older queues first.
    """
    granted = [q.deserved[r] for q in queues]
    priorities = sorted({q.priority for q in queues}, reverse=True)
    wants = [min(q.deserved[r], q.requested[r], q.limit[r]) for q in queues]
    if total == UNLIMITED or sum(wants) <= total:
        return granted
    left = total - sum(want for q, want in zip(queues, wants, strict=True) if q.priority == priorities[0])
    for priority in priorities[1:]:
        for i in [i for i, q in enumerate(queues) if q.priority == priority]:
            got = max(0.0, min(wants[i], left))
            if got < wants[i]:
                granted[i] = got
            left -= got
    return granted


def divide(
    queues: Sequence[Queue], r: int, total: float, granted: Sequence[float], used: Used | None = None
) -> list[float]:
    """Return the share of resource `r` of each of the siblings, which are oldest first, of `total` for all of them.

    `granted` are their guarantees that hold.
    """
    caps = [min(q.requested[r], q.limit[r]) for q in queues]
    # An unlimited guarantee counts as `total`; finite ones of one priority count in full where their sum exceeds it.
    shares = [min(one if one < UNLIMITED else total, cap) for one, cap in zip(granted, caps, strict=True)]
    if total == UNLIMITED:  # the nodes do not report this resource
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
    """Divide `left` within one priority; return the rest that no queue requests."""
    unit = _UNITS[r]
    while left > 0:
        unmet = [i for i in group if shares[i] < caps[i]]
        if not unmet:
            break
        # Weight 0 gets nothing while another queue of the priority has a weight; else all are equal.
        weights = {i: queues[i].weights[r] for i in unmet if queues[i].weights[r] > 0} or dict.fromkeys(unmet, 1.0)
        if used is not None:
            lighter = usage.adjusted(weights, dict(enumerate(used)))
            weights = {i: weight for i, weight in lighter.items() if weight > 0} or weights
        total = sum(weights.values())
        parts = {i: left * weight / total for i, weight in weights.items()}
        left -= _serve(parts, caps, shares, unit)
        if all(shares[i] < caps[i] for i in parts):
            holders = [i for i in parts if used is not None and queues[i].claim(r) > shares[i]]
            return _leftovers(parts, caps, shares, left, unit, holders)
    return left


def _serve(parts: dict[int, float], caps: list[float], shares: list[float], unit: int) -> float:
    """Add to each share its part in whole units, up to its cap; return the sum of what was added."""
    given = 0.0
    for i, part in parts.items():
        got = min(part // unit * unit, caps[i] - shares[i])
        shares[i] += got
        given += got
    return given


def _leftovers(
    parts: dict[int, float],
    caps: list[float],
    shares: list[float],
    left: float,
    unit: int,
    holders: Collection[int],
) -> float:
    """Distribute the rest from rounding one unit at a time by largest remainder, then to the older queue.

    One of the `holders` keeps a unit that it holds until another remainder is larger by `KEPT_PART`.
    """
    kept = dict.fromkeys(holders, KEPT_PART * unit)
    for i in sorted(parts, key=lambda i: -(parts[i] % unit) - kept.get(i, 0.0)):
        got = min(unit, left, caps[i] - shares[i])
        shares[i] += got
        left -= got
    return left
