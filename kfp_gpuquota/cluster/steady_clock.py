"""The time in records of jobs and workers, of both clusters: the machine's time, but it never decreases.

Growth, minimum run times and retries wait for moments that are computed from recorded times. A machine's clock that is
set back by a day would make each of them wait a day longer. When the machine's clock is set back, this clock therefore
continues from its last value at the speed of the time since boot, and follows the machine's clock again once that has
caught up. After a start of the embedded cluster it begins no earlier than the newest record; a controller on Kubernetes
begins with its machine's time, since after a failover that is another machine.

Rejected: the time since boot alone. Records outlive a boot, and people read their times.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def since_boot_s() -> float:
    """Seconds since the machine started, those in which it was suspended included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """Called, it returns seconds since the epoch: never less than at the call before, or than `at_least`."""

    def __init__(
        self,
        at_least: float = 0.0,
        machine: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = since_boot_s,
    ) -> None:
        self._machine, self._elapsed = machine, elapsed
        self._last, self._last_elapsed = at_least, elapsed()

    def __call__(self) -> float:
        """Return the time."""
        elapsed = self._elapsed()
        self._last = max(self._machine(), self._last + elapsed - self._last_elapsed)
        self._last_elapsed = elapsed
        return self._last
