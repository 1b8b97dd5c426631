"""A clock that counts only the time in which its owner could hear others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class ListeningClock:
    """Seconds, like `clock`, less those in which nobody called `listened`: at most `longest_s` pass between two calls.

    Who was held up itself (a busy machine, a stopped process, a call that blocked) has not heard what others said in
    the meantime, and must not take that for their silence.
    """

    def __init__(self, clock: Callable[[], float], longest_s: float) -> None:
        self._clock, self._longest_s = clock, longest_s
        self._listened_at = clock()
        self._deaf_s = 0.0

    def listened(self) -> None:
        """What had been said until now is heard, or about to be."""
        self()
        self._listened_at = self._clock()

    def __call__(self) -> float:
        """Never falls."""
        now = self._clock()
        late_s = max(0.0, now - self._listened_at - self._longest_s)
        self._listened_at += late_s
        self._deaf_s += late_s
        return now - self._deaf_s
