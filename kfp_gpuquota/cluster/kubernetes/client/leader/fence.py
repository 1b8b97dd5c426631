"""The fence before all writes of a leader: no write is sent once another process may hold the lease.

Invariant: the validity period starts when the request that renewed the lease was sent. The API server stores the
renewal after that, and a standby counts the lease's duration from when it reads the renewal, later still. So a write is
sent only while no other process can lead, provided that the period is shorter than the lease's duration.

The clock includes the time in which the process is stopped or the machine is suspended (CLOCK_BOOTTIME), so a resumed
process finds its lease expired before it writes. Rejected: a flag that the renewing task clears; after a stop, the
tasks that write may run before that task.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Protocol

from kfp_gpuquota.cluster.steady_clock import since_boot_s
from kfp_gpuquota.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable


class StaleLeaseError(RunError):
    """A write was not sent, because another process may lead by now."""


class Fence(Protocol):
    """Protocol of the check immediately before each attempt to send a write."""

    def valid(self) -> bool:
        """Return whether this process may write now."""


class NoFence:
    """The fence of a process without leader election: always open."""

    def valid(self) -> bool:
        """Return True."""
        return True


NO_FENCE: Final = NoFence()


class LeaseValidity:
    """Fence that is open for `period_s` seconds from the start of the request that acquired or renewed the lease.

    The thread that renews the lease and those that write share it: once one of them has seen it closed, no renewal
    opens it, so each method is one step for the others.
    """

    def __init__(self, period_s: float, clock: Callable[[], float] = since_boot_s) -> None:
        self._period_s, self._clock = period_s, clock
        self._lock = threading.RLock()
        self._until: float | None = None  # None: not held

    def acquired(self, requested_at: float) -> None:
        """Open the fence: the request that acquired the lease was started at `requested_at` of this fence's clock."""
        self._until = requested_at + self._period_s

    def renewed(self, requested_at: float) -> None:
        """Keep the fence open for another period. After it has closed, only `acquired` opens it again."""
        with self._lock:
            if self.valid():
                self.acquired(requested_at)

    def revoke(self) -> None:
        """Close the fence."""
        self._until = None

    def remaining_s(self) -> float:
        """Return for how many more seconds the fence is open; 0 after the lease has expired."""
        with self._lock:
            now = self._clock()
            if self._until is not None and now >= self._until:
                self.revoke()
            return 0.0 if self._until is None else self._until - now

    def valid(self) -> bool:
        """Return whether this process may write now."""
        return self.remaining_s() > 0.0
