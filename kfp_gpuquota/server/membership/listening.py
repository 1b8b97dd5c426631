"""A clock that counts only the time in which its owner could receive messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class ListeningClock:
    """Seconds, like `clock`, without the time between late `listened` calls: at most `longest_s` pass between two.

    An owner that was delayed itself (a busy machine, a stopped process, a blocking call) has not received messages in
    the meantime, and must not treat that as silence of the senders.
    """

    def __init__(self, clock: Callable[[], float], longest_s: float) -> None:
        self._clock, self._longest_s = clock, longest_s
        self._listened_at = clock()
        self._deaf_s = 0.0

    def listened(self) -> None:
        """Record that all messages until now have been received, or are about to be."""
        self()
        self._listened_at = self._clock()

    def __call__(self) -> float:
        """Return the seconds; they never decrease."""
        now = self._clock()
        late_s = max(0.0, now - self._listened_at - self._longest_s)
        self._listened_at += late_s
        self._deaf_s += late_s
        return now - self._deaf_s
