"""Tasks of a process: until one of them ends or a signal arrives, and without one that keeps the others waiting."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kfp_gpuquota.backoff import Backoff
from kfp_gpuquota.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

T = TypeVar("T")

TIME_SLICE_S: Final = 0.005
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 10.0

log = logging.getLogger(__name__)


async def until_done(what: str, attempt: Callable[[], Awaitable[T]]) -> T:
    """Return the result of the first attempt that raises no RunError; the errors are logged, the pauses double.

    For what a process needs from the API server before it can begin: one that starts, or whose roles are applied after
    the process, refuses what it will allow.
    """
    backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, jitter=random.Random())  # noqa: S311 - not a secret
    while True:
        try:
            return await attempt()
        except RunError as error:
            pause_s = backoff.next_s()
            log.warning("%s: %s; tried again in %.1f s", what, error, pause_s)
            await asyncio.sleep(pause_s)


async def first_to_end(*running: Coroutine[Any, Any, Any]) -> None:
    """Run coroutines until one ends; cancel the others, and raise the first exception."""
    tasks = [asyncio.ensure_future(one) for one in running]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def until_stopped(program: Coroutine[Any, Any, Any]) -> bool:
    """Run the program until SIGTERM or SIGINT; return False if it ended without a signal."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await first_to_end(program, stop.wait())
    return stop.is_set()


class TimeSlices:
    """Measures the time since the computation last yielded to the event loop."""

    def __init__(self, slice_s: float = TIME_SLICE_S) -> None:
        self._slice_s, self._since = slice_s, time.perf_counter()

    async def yield_if_due(self) -> None:
        """Yield to the event loop if the computation has run for `slice_s` seconds since it last did."""
        if time.perf_counter() - self._since >= self._slice_s:
            await asyncio.sleep(0)
            self._since = time.perf_counter()
