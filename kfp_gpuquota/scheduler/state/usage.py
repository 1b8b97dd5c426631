"""Usage over time: who has borrowed lately is lent less, and it is forgotten by a half-life.

Counted is what a queue held above its guarantee, in GPU-seconds, each second worth half as much after every half-life.
Where siblings share a surplus, a queue with the part n of the weights and the part u of the usage has the weight
max(0, n + (n - u)), as time-based fair share of KAI-Scheduler has it with k = 1: who used what its weight entitles it
to keeps its weight.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.scheduler.state.model import GPU

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kfp_gpuquota.scheduler.state.model import Queue

LOOKS_PER_HALF_LIFE: Final = 16
"""While jobs wait, shares change by the passing of time alone: so often is planned again."""


def used_by(queue: Queue, now: float, half_life_s: float) -> float:
    """GPU-seconds borrowed until `now`, as much as is not forgotten."""
    borrowed = max(0.0, queue.held[0] + queue.leaving[0] - queue.deserved[0]) / GPU
    return decayed(queue.used, borrowed, now - queue.used_until, half_life_s)


def decayed(used: float, borrowed: float, elapsed_s: float, half_life_s: float) -> float:
    """What is left of `used` GPU-seconds, and of what `borrowed` GPUs add, after a while."""
    left: float = 2.0 ** -(max(0.0, elapsed_s) / half_life_s)
    return used * left + borrowed * (1 - left) * half_life_s / log(2)


def note(queues: Iterable[Queue], at: float, half_life_s: float) -> None:
    """What these queues hold is about to change, at that time."""
    for queue in queues:
        queue.used, queue.used_until = used_by(queue, at, half_life_s), max(at, queue.used_until)


def adjusted(weights: Mapping[int, float], used: Mapping[int, float]) -> dict[int, float]:
    """The weights by index, less for those that used more than their part; unchanged where nobody used anything."""
    total, total_used = sum(weights.values()), sum(used[i] for i in weights)
    if not total_used or not total:
        return dict(weights)
    parts = {i: weight / total for i, weight in weights.items()}
    return {i: max(0.0, 2 * part - used[i] / total_used) for i, part in parts.items()}
