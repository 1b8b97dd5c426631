"""Time-based fair share: past over-quota usage reduces a queue's part of the surplus, and decays with a half-life.

Usage is what a queue held above its guarantee, in GPU-seconds, which count half after every half-life. Where siblings
share a surplus, a queue with the part n of the weights and the part u of the usage gets the weight max(0, n + (n - u)),
as in KAI-Scheduler's time-based fair share with k = 1: a queue whose usage matches its weight keeps its weight.

Among the users of one queue all use counts, since no user has a guarantee: the GPUs that the user's jobs hold, and with
a half-life the mean of those that they have held, in which each second counts half after every half-life. Rejected:
past use alone, as in Slurm's fair tree. A user without any would start all of its jobs before it counts.
"""

from __future__ import annotations

from hashlib import sha256
from math import log
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Order
from kfp_gpuquota.scheduler.state.events import UsageRecalled
from kfp_gpuquota.scheduler.state.model import GPU

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kfp_gpuquota.scheduler.state.model import Queue, User

MOST_USERS: Final = 256
"""The users of a queue without jobs whose past use is kept, those with the most: names are free to choose."""
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


def use_of(user: User, now: float, half_life_s: float | None) -> float:
    """Return the GPUs that count as the user's: those held, and with a half-life the mean of those in the past.

    In hundredths, so that a difference which nobody notices does not come before the age of jobs.
    """
    mean = 0.0 if half_life_s is None else used_by_user(user, now, half_life_s) * log(2) / half_life_s
    return round(user.held / GPU + mean, 2)


def used_by_user(user: User, now: float, half_life_s: float) -> float:
    """Return the user's decayed GPU-seconds at `now`."""
    return decayed(user.used, user.occupied / GPU, now - user.used_until, half_life_s)


def note_user(user: User, at: float, half_life_s: float) -> None:
    """Update the user's past use before a change of what its workers have."""
    user.used, user.used_until = used_by_user(user, at, half_life_s), max(at, user.used_until)


def noted(queue: Queue, now: float, half_life_s: float) -> UsageRecalled:
    """Return what the queue, and in one that is fair to its users each of them, has used until `now`.

    Users are those with the most, by `key_of` their name.
    """
    found: dict[str, float] = {}
    if queue.order is Order.FAIR_USERS:
        found = {key: decayed(used, 0.0, now - at, half_life_s) for key, (used, at) in queue.recalled.items()}
        users = queue.users.values()
        found |= {key_of(queue.name, user.name): used_by_user(user, now, half_life_s) for user in users}
    most = sorted(found.items(), key=lambda one: (-one[1], one[0]))[:MOST_USERS]
    kept = {key: used for key, used in sorted(most) if used > 0}
    return UsageRecalled(queue.name, used_by(queue, now, half_life_s), now, queue.pool, kept)


def forget(queue: Queue, user: User, half_life_s: float | None) -> None:
    """Remove a user without jobs; what it has used is kept under the key of its name."""
    del queue.users[user.name]
    if half_life_s is not None and user.used:
        queue.recalled[key_of(queue.name, user.name)] = user.used, user.used_until
        if len(queue.recalled) > 2 * MOST_USERS:
            keep_most(queue, half_life_s)


def keep_most(queue: Queue, half_life_s: float) -> None:
    """Forget the past use of all but the `MOST_USERS` users without jobs that have used most."""
    until = max((at for _, at in queue.recalled.values()), default=0.0)
    use = {key: decayed(used, 0.0, until - at, half_life_s) for key, (used, at) in queue.recalled.items()}
    most = sorted(use, key=lambda key: (-use[key], key))[:MOST_USERS]
    queue.recalled = {key: queue.recalled[key] for key in most}


def key_of(queue: str, user: str) -> str:
    """Return what a user's past use is stored under: objects that everybody reads do not have users' names."""
    return sha256(f"{queue}/{user}".encode()).hexdigest()[:16]


def adjusted(weights: Mapping[int, float], used: Mapping[int, float]) -> dict[int, float]:
    """Return the weights by index, lower for those that used more than their part; unchanged without usage."""
    total, total_used = sum(weights.values()), sum(used[i] for i in weights)
    if not total_used or not total:
        return dict(weights)
    parts = {i: weight / total for i, weight in weights.items()}
    return {i: max(0.0, 2 * part - used[i] / total_used) for i, part in parts.items()}
