"""Exponential backoff: the pauses between the attempts of one operation, and when to give up.

It only counts, so that it serves blocking and asyncio callers, which pause themselves. Rejected: tenacity and stamina,
which repeat a function that raises: here an attempt may also fail with a response, a server names its own pause
(Retry-After), a watch that worked resets the pauses, and a request gives its slot back while it waits.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random


class Backoff:
    """Pauses that double from `first_s` to `longest_s`, for at most `limit_s` from now on.

    `jitter` randomizes each pause by up to 50 %, so that several callers do not repeat at the same moment.
    """

    def __init__(
        self,
        first_s: float,
        longest_s: float,
        *,
        limit_s: float = math.inf,
        jitter: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_s, self._longest_s, self._pause_s = first_s, longest_s, first_s
        self._jitter, self._clock = jitter, clock
        self._deadline = clock() + limit_s

    @property
    def exhausted(self) -> bool:
        """Return whether another attempt after the next pause would exceed the limit."""
        return self._clock() + self._pause_s > self._deadline

    def next_s(self, at_least_s: float = 0.0) -> float:
        """Return the next pause in seconds, which a server may have prolonged; the one after is twice as long."""
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, self._longest_s)
        if self._jitter is not None:
            pause_s *= 0.5 + self._jitter.random()
        return max(pause_s, at_least_s)

    def reset(self) -> None:
        """Begin with the first pause again, after an attempt that succeeded."""
        self._pause_s = self._first_s
