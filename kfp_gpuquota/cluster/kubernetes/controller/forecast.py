"""Forecasts when waiting jobs start, after plans and while jobs wait.

A child process computes it from the state as it is when it is forked, as what-ifs are, so that neither plans nor the
event loop wait for it. The next one begins `EVERY_S` after the last one has begun, and not before a plan was made,
or `SELDOM_S` after it where nothing changes: run times that pass change estimates as well. One that took long rests for
`RESTS` times as long, and each changes `MOST_CHANGED` jobs at most, since each of them is a write.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api import ExpectedStart
from kfp_gpuquota.cluster.plan_pacing import within
from kfp_gpuquota.engine.expected_starts import note_expected, run_times
from kfp_gpuquota.errors import ClusterUnavailableError
from kfp_gpuquota.scheduler.forecast import expected_starts

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota import scheduler
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import ElasticJobStore
    from kfp_gpuquota.cluster.kubernetes.planner.process import Planner

SOON_S: Final = 1.0
EVERY_S: Final = 15.0
SELDOM_S: Final = 60.0
RESTS: Final = 4
LONGEST_S: Final = 10.0
"""After which it is cut short: a child is killed, without any result, after longer."""
MOST_CHANGED: Final = 100

log = logging.getLogger(__name__)


class StartForecast:
    """Keeps the expected starts of a `book` up to date; `state()` is what plans are made of, None before there is one.

    `planner` computes them, and `clock` returns seconds since the epoch.
    """

    def __init__(
        self,
        planner: Planner,
        state: Callable[[], scheduler.State | None],
        book: ElasticJobStore,
        clock: Callable[[], float],
    ) -> None:
        self._planner = planner
        self._state, self._book, self._clock = state, book, clock
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._earliest = 0.0
        self._again = False

    def planned(self) -> None:
        """Forecast soon: a plan was made."""
        self._again = True
        if self._task is None:
            loop = asyncio.get_running_loop()
            self._at(max(loop.time() + SOON_S, self._earliest))

    def close(self) -> None:
        """Stop."""
        for pending in (self._timer, self._task):
            if pending is not None:
                pending.cancel()
        self._timer = self._task = None

    def _at(self, at: float) -> None:
        if self._timer is not None and self._timer.when() <= at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._again = False
        loop = asyncio.get_running_loop()
        self._earliest = loop.time() + EVERY_S
        if (state := self._state()) is not None and (state.ledger.has_waiting or self._book.expected_starts):
            self._task = loop.create_task(self._forecast(state))

    async def _forecast(self, state: scheduler.State) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await self._update(state)
        except (OSError, TimeoutError, ClusterUnavailableError, msgspec.DecodeError) as error:
            log.warning("expected starts are not up to date: %s", error or type(error).__name__)
        except Exception:
            log.exception("expected starts are not up to date")
        self._task = None
        self._earliest = max(self._earliest, loop.time() + RESTS * (loop.time() - began))
        self._at(self._earliest if self._again else max(self._earliest, loop.time() + SELDOM_S))

    async def _update(self, state: scheduler.State) -> None:
        book, now = self._book, self._clock()

        def compute() -> bytes:
            return msgspec.json.encode(expected_starts(state, now, run_times(book, now), in_time=within(LONGEST_S)))

        found = msgspec.json.decode(await self._planner.aside(compute), type=dict[str, ExpectedStart])
        changed = note_expected(book, found, now, MOST_CHANGED)
        self._again = self._again or len(changed) == MOST_CHANGED
        for uid in changed:
            if uid in book.runtime_states:
                book.changed(uid)
