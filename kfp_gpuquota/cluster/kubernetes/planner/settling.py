"""Delays what loses work until plans have wanted it for a moment, so that a burst of changes is decided as one.

A command that deletes two objects reaches the API server as two requests: a plan in between would move running jobs for
a job that is deleted next. Starts and growth are not delayed, and elastic jobs that only shrink lose nothing.

Invariant: no loss is delayed for longer than LONGEST_S since the first plan that wanted any. Rejected: to measure that
by worker. Where each plan chooses other victims (the youngest, while others start), none of them is wanted for long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.scheduler import promises_after_starts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kfp_gpuquota.api.placement import Placement
    from kfp_gpuquota.scheduler import Plan

SETTLE_S: Final = 0.5
LONGEST_S: Final = 2.0
"""Changes that never end delay a loss this long."""


class Settling:
    """What recent plans wanted to stop; `now` is of a monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._wanted: dict[str, float] = {}  # by worker, since when
        self._delayed_since: float | None = None  # when the first loss was delayed that was not carried out yet

    def settled(
        self, plan: Plan, promises: Mapping[str, tuple[Placement, ...]], now: float
    ) -> tuple[Plan, float | None]:
        """Return what of the plan is carried out now, and in how many seconds to plan again for the rest, if any.

        `promises` are those in force: they stay while no room is made for others.
        """
        self._wanted = {worker: self._wanted.get(worker, now) for worker in _victims(plan)}
        if not (plan.evict or plan.move):
            self._delayed_since = None
            return plan, None
        since = now if self._delayed_since is None else self._delayed_since
        wait_s = min(max(self._wanted.values()) + SETTLE_S, since + LONGEST_S) - now
        if wait_s <= 0:
            self._delayed_since = None
            return plan, None
        self._delayed_since = since
        grows = tuple(one for one in plan.resize if not one.remove)
        plan = msgspec.structs.replace(plan, evict=(), move=(), resize=grows, nominate=(), defragmented=None)
        return msgspec.structs.replace(plan, promises=promises_after_starts(promises, plan)), wait_s


def _victims(plan: Plan) -> Iterator[str]:
    for evict in plan.evict:
        yield from evict.workers
    for move in plan.move:
        yield move.worker
    for resize in plan.resize:
        yield from resize.remove
