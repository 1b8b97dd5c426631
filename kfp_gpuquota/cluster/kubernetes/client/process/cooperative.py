"""Time slices for long computations in the event loop, so that other tasks run in between."""

from __future__ import annotations

import asyncio
import time
from typing import Final

TIME_SLICE_S: Final = 0.005


class TimeSlices:
    """Measures the time since the computation last yield_if_due to the event loop."""

    def __init__(self, slice_s: float = TIME_SLICE_S) -> None:
        self._slice_s, self._since = slice_s, time.perf_counter()

    async def yield_if_due(self) -> None:
        """Yield to the event loop if the computation has run for `slice_s` seconds since it last did."""
        if time.perf_counter() - self._since >= self._slice_s:
            await asyncio.sleep(0)
            self._since = time.perf_counter()
