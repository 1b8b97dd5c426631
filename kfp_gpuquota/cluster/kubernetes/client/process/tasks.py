"""Tasks of a process: until one of them ends or a signal arrives, and without one that keeps the others waiting."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Coroutine

TIME_SLICE_S: Final = 0.005


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
