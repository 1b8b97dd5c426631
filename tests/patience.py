"""Waiting for what another process does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Found = TypeVar("Found")

PATIENCE_S = 60.0
"""Long, for CI's machines are shared: what works is soon there, and what does not may take its time to fail."""


def until(condition: Callable[[], Found | None], what: object = "", patience_s: float = PATIENCE_S) -> Found:
    """What `condition` returns, as soon as it counts as true.

    `what` is said, or called and its answer said, where that takes too long. That is a TimeoutError and not an
    AssertionError: CI tries a test once more that waited in vain on a busy machine, but never one that saw a wrong
    result.
    """
    end = time.monotonic() + patience_s
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {patience_s:g} s: {what() if callable(what) else what}")
        time.sleep(0.02)
    return found
