"""Keeps what teams have borrowed in the status of their GpuQuotas, if it counts, for the next leader.

Invariant: what is stored and halved by its age, with what is borrowed now since then, differs from what counts by
less than `MIN_CHANGE_S` and `MIN_CHANGE` of it, or is less than `WRITTEN_EVERY_S` old; so is what each user of a team
that is fair to its users has used. So a team that borrows nothing, or always as much, is not written. Rejected: usage
from Prometheus, which a cluster need not have, or from a history of events, which a controller has none of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kfp_gpuquota import scheduler
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import OverQuotaUsage
from kfp_gpuquota.scheduler.state.usage import decayed, noted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import GpuQuota
    from kfp_gpuquota.scheduler.state.model import Queue

WRITTEN_EVERY_S: Final = 60.0
MIN_CHANGE: Final = 0.02
MIN_CHANGE_S: Final = 60.0
LEAST_S: Final = 1.0


class Borrowed:
    """What counts for each team, and what of it was stored. `emit` receives the scheduler's events."""

    def __init__(
        self,
        state: scheduler.State,
        quotas: Mapping[str, GpuQuota],
        emit: Callable[[scheduler.Event], None],
        now: Callable[[], float],
    ) -> None:
        self._state, self._quotas, self._emit, self._now = state, quotas, emit, now
        self._stored: dict[tuple[str, str], OverQuotaUsage] = {}
        self._counts = False

    def recall(self) -> None:
        """Begin to count, with what was stored, after all objects are listed or a rule has changed."""
        half_life_s, counted = self._state.ledger.half_life_s, self._counts
        self._counts = half_life_s is not None
        if half_life_s is None or counted:
            return
        now = self._now()
        self._stored = {
            (name, one.pool): OverQuotaUsage(max(0.0, one.gpu_seconds), min(one.at, now), one.pool, one.users)
            for name, quota in self._quotas.items()
            for one in quota.status.usage
        }
        queues = ((queue.name, queue.pool) for queue in self._state.ledger.queues.values())
        for name, pool in dict.fromkeys([*queues, *self._stored]):  # a team may have nothing left in a pool
            stored = self._stored.get((name, pool)) or OverQuotaUsage(0.0, now)
            self._emit(scheduler.UsageRecalled(name, stored.gpu_seconds, stored.at, pool, stored.users))

    def of(self, team: str) -> tuple[OverQuotaUsage, ...]:
        """Return what is to be stored of a team, by node pool."""
        half_life_s = self._state.ledger.half_life_s
        if half_life_s is None or not self._counts:
            return ()
        return tuple(self._noted(team, half_life_s))

    def _noted(self, team: str, half_life_s: float) -> Iterator[OverQuotaUsage]:
        for queue in self._state.queues_of(team):
            note = self._note(queue, half_life_s)
            if note is None:
                self._stored.pop((team, queue.pool), None)
            else:
                self._stored[team, queue.pool] = note
                yield note

    def _note(self, queue: Queue, half_life_s: float) -> OverQuotaUsage | None:
        """Return the note of a queue: the last one while it says as much."""
        now, before = self._now(), self._stored.get((queue.name, queue.pool))
        found = noted(queue, now, half_life_s)
        used, users = found.gpu_seconds, {key: round(one, 1) for key, one in found.users.items() if one >= LEAST_S}
        if used < LEAST_S and not users:
            return None
        if before is not None:
            age_s = now - before.at
            pairs = [(used, before.gpu_seconds)]
            pairs += [(users.get(key, 0.0), before.users.get(key, 0.0)) for key in users.keys() | before.users.keys()]
            small = all(
                abs(is_now - decayed(was, 0.0, age_s, half_life_s)) <= max(MIN_CHANGE_S, MIN_CHANGE * is_now)
                for is_now, was in pairs
            )
            if small or age_s < WRITTEN_EVERY_S:
                return before
        return OverQuotaUsage(round(used, 1), round(now, 3), queue.pool, users)
