"""Forecasts when waiting jobs start, after plans and while jobs wait.

A child process computes it from the state as it is when it is forked, as what-ifs are, so that neither plans nor the
event loop wait for it. The next one begins `EVERY_S` after the last one has begun, and not before a plan was made,
or `SELDOM_S` after it where nothing changes: run times that pass change estimates as well.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api import ExpectedStart
from kfp_gpuquota.engine.expected_starts import note_expected, run_times
from kfp_gpuquota.errors import ClusterUnavailableError
from kfp_gpuquota.scheduler.forecast import expected_starts

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota import scheduler
    from kfp_gpuquota.cluster.kubernetes.elasticjob.store import Book
    from kfp_gpuquota.cluster.kubernetes.planner.process import Planner

SOON_S: Final = 1.0
EVERY_S: Final = 15.0
SELDOM_S: Final = 60.0

log = logging.getLogger(__name__)


class StartForecast:
    """Keeps the expected starts of a `book` up to date; `state()` is what plans are made of, None before there is one.

    `planner` computes them, and `clock` returns seconds since the epoch.
    """

    def __init__(
        self, planner: Planner, state: Callable[[], scheduler.State | None], book: Book, clock: Callable[[], float]
    ) -> None:
        self._planner = planner
        self._state, self._book, self._clock = state, book, clock
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._earliest = 0.0

    def planned(self) -> None:
        """Forecast soon: a plan was made."""
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
        loop = asyncio.get_running_loop()
        self._earliest = loop.time() + EVERY_S
        if (state := self._state()) is not None and (_waits(state) or self._book.expected_starts):
            self._task = loop.create_task(self._forecast(state))

    async def _forecast(self, state: scheduler.State) -> None:
        book, now = self._book, self._clock()
        try:
            answer = await self._planner.aside(
                lambda: msgspec.json.encode(expected_starts(state, now, run_times(book, now)))
            )
            found = msgspec.json.decode(answer, type=dict[str, ExpectedStart])
        except (OSError, TimeoutError, ClusterUnavailableError) as error:
            log.warning("expected starts are not up to date: %s", error or type(error).__name__)
        else:
            for uid in note_expected(book, found, now):
                if uid in book.runtime_states:
                    book.changed(uid)
        self._task = None
        self._at(asyncio.get_running_loop().time() + SELDOM_S)


def _waits(state: scheduler.State) -> bool:
    return any(queue.waiting for queue in state.ledger.queues.values())
