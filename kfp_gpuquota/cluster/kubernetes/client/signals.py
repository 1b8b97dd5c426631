"""Tasks of a process that end together, by themselves or on a signal."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


async def first_to_end(*running: Coroutine[Any, Any, Any]) -> None:
    """Run them until one ends; the others are cancelled then, and what failed is raised."""
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
    """Run it until SIGTERM or SIGINT comes; False where it has ended by itself."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await first_to_end(program, stop.wait())
    return stop.is_set()
