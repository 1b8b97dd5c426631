"""Time-based fair share: past over-quota usage reduces a queue's part of the surplus, and decays with a half-life.

Usage is what a queue held above its guarantee, in GPU-seconds, which count half after every half-life. Where siblings
share a surplus, a queue with the part n of the weights and the part u of the usage gets the weight max(0, n + (n - u)),
as in KAI-Scheduler's time-based fair share with k = 1: a queue whose usage matches its weight keeps its weight.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.scheduler.state.model import GPU

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kfp_gpuquota.scheduler.state.model import Queue

LOOKS_PER_HALF_LIFE: Final = 16
"""How often to plan again per half-life while jobs wait, because shares change with time alone."""


def used_by(queue: Queue, now: float, half_life_s: float) -> float:
    """Return the queue's decayed over-quota GPU-seconds at `now`."""
    borrowed = max(0.0, queue.held[0] + queue.leaving[0] - queue.deserved[0]) / GPU
    return decayed(queue.used, borrowed, now - queue.used_until, half_life_s)


def decayed(used: float, borrowed: float, elapsed_s: float, half_life_s: float) -> float:
    """Return `used` GPU-seconds plus those of `borrowed` GPUs, both decayed over `elapsed_s`."""
    left: float = 2.0 ** -(max(0.0, elapsed_s) / half_life_s)
    return used * left + borrowed * (1 - left) * half_life_s / log(2)


def note(queues: Iterable[Queue], at: float, half_life_s: float) -> None:
    """Update the usage of these queues before a change of what they hold at that time."""
    for queue in queues:
        queue.used, queue.used_until = used_by(queue, at, half_life_s), max(at, queue.used_until)


def adjusted(weights: Mapping[int, float], used: Mapping[int, float]) -> dict[int, float]:
    """Return the weights by index, lower for those that used more than their part; unchanged without usage."""
    total, total_used = sum(weights.values()), sum(used[i] for i in weights)
    if not total_used or not total:
        return dict(weights)
    parts = {i: weight / total for i, weight in weights.items()}
    return {i: max(0.0, 2 * part - used[i] / total_used) for i, part in parts.items()}
