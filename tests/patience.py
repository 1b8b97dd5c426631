"""Waiting for what another process does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Found = TypeVar("Found")

PATIENCE_S = 120.0
"""Long, for CI's machines are shared: what works is soon there, and what does not may take its time to fail."""


def until(condition: Callable[[], Found | None], what: object = "", patience_s: float = PATIENCE_S) -> Found:
    """What `condition` returns, as soon as it counts as true.

    Raises TimeoutError with `what`, or with what it returns when called.
    """
    end = time.monotonic() + patience_s
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {patience_s:g} s: {what() if callable(what) else what}")
        time.sleep(0.02)
    return found
