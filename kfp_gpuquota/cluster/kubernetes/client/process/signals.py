"""Runs the tasks of a process until one of them ends or a signal arrives."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


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
