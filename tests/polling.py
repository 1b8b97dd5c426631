"""Polling for the effect of another process, with a timeout."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Found = TypeVar("Found")

TIMEOUT_S = 300.0
"""Long, because CI machines are shared: a success ends the wait early, and only a failure takes the whole time.
Tests have no shorter patience of their own."""


def until(
    condition: Callable[[], Found | None], what: object = "", timeout_s: float = TIMEOUT_S, pause_s: float = 0.3
) -> Found:
    """Return the result of `condition` as soon as it is true.

    It is asked less often the longer it takes, down to each `pause_s`: a question to an API server costs both sides
    milliseconds. Raises TimeoutError with `what`, or with its result if it is callable.
    """
    began = time.monotonic()
    while not (found := condition()):
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what() if callable(what) else what}")
        time.sleep(min(max(0.02, waited_s / 20), pause_s))
    return found


def pace(began: float, part: int, least_s: float = 0.02) -> float:
    """Return the pause before a training's next step, a `part`th of the time since it began (time.monotonic).

    So a training of some hundred steps does not end before its test lets it, on a machine of any speed: the last steps
    would take hours. Of 20 parts at least: a worker leaves at the end of a step, or is killed after 30 seconds.
    """
    return max(least_s, (time.monotonic() - began) / part)


async def until_async(condition: Callable[[], object]) -> None:
    """Return once it holds; the other tasks of the event loop run meanwhile."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.001)
