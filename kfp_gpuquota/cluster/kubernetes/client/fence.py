"""The fence in front of all writes of a leader: nothing is sent on a lease that another process may hold by now.

Invariant: validity counts from the start of the request that renewed the lease. The API server stored that renewal
later than this, and a standby counts the lease's duration from when it saw the renewal, later still. So a write is sent
only while no other process can lead, provided that the period here is shorter than the lease's duration.

The clock goes on while the process is stopped and while the machine sleeps (CLOCK_BOOTTIME), so a process that was
continued finds its lease expired before it does anything else. Rejected: a flag that the renewing task clears; after a
stop, the tasks that write may run before that one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol

from kfp_gpuquota.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable


class StaleLeaseError(RunError):
    """A write was not sent, because this process may not lead any more."""


class Fence(Protocol):
    """What a write is checked against immediately before each attempt to send it."""

    def valid(self) -> bool:
        """Return whether this process may write now."""


class NoFence:
    """The fence of a process without leader election: always open."""

    def valid(self) -> bool:
        """Return True."""
        return True


NO_FENCE: Final = NoFence()


def boot_time_s() -> float:
    """Return seconds since the machine started, including those in which it or this process was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseValidity:
    """How long a lease that this process renewed may be acted on: `period_s` from the start of the renewing request."""

    def __init__(self, period_s: float, clock: Callable[[], float] = boot_time_s) -> None:
        self._period_s, self._clock = period_s, clock
        self._until: float | None = None  # None: not held

    def acquired(self, requested_at: float) -> None:
        """Open the fence: the lease was acquired by a request that was started then, by this fence's clock."""
        self._until = requested_at + self._period_s

    def renewed(self, requested_at: float) -> None:
        """Keep the fence open for another period. Once it has closed, only `acquired` opens it again."""
        if self.valid():
            self.acquired(requested_at)

    def revoke(self) -> None:
        """Close the fence."""
        self._until = None

    def remaining_s(self) -> float:
        """Return for how many seconds the lease may still be acted on; 0 once it has expired."""
        if self._until is not None and self._clock() >= self._until:
            self.revoke()
        return 0.0 if self._until is None else self._until - self._clock()

    def valid(self) -> bool:
        """Return whether this process may write now."""
        return self.remaining_s() > 0.0
