"""Long work in the event loop that lets others have their turn."""

from __future__ import annotations

import asyncio
import time
from typing import Final

TURN_S: Final = 0.005


class Turns:
    """Counts the time since the loop last turned."""

    def __init__(self, turn_s: float = TURN_S) -> None:
        self._turn_s, self._since = turn_s, time.perf_counter()

    async def yielded(self) -> None:
        """Let the event loop turn where this work has had it for `turn_s` seconds."""
        if time.perf_counter() - self._since >= self._turn_s:
            await asyncio.sleep(0)
            self._since = time.perf_counter()
