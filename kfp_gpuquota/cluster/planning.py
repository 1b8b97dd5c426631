"""Health of planning, for every kind of cluster: consecutive failures, and how long a plan has been overdue.

Invariant: an exception in a plan never stops planning by itself. The next plan follows after a growing pause; after
`MAX_FAILURES` consecutive failures the process exits, because its state in memory may be the cause, and the next
process builds that state again. A single failure does not end it, because the same process serves the workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kfp_gpuquota.errors import PlanningFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_FAILURES: Final = 5
FIRST_PAUSE_S: Final = 0.5
MAX_OVERDUE_S: Final = 60.0


class PlanningHealth:
    """Counts failed plans, and measures how long a requested plan is overdue. `clock` returns monotonic seconds."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_failures: int = MAX_FAILURES,
        first_pause_s: float = FIRST_PAUSE_S,
        max_overdue_s: float = MAX_OVERDUE_S,
    ) -> None:
        self._clock, self._max_failures = clock, max_failures
        self._first_pause_s, self._max_overdue_s = first_pause_s, max_overdue_s
        self._requested_at: float | None = None
        self.failures = 0

    def requested(self) -> None:
        """Record that a plan is needed from now on, unless one is outstanding already."""
        if self._requested_at is None:
            self._requested_at = self._clock()

    def succeeded(self) -> None:
        """Record a plan that was made and executed."""
        self.failures, self._requested_at = 0, None

    def failed(self) -> None:
        """Record a plan that raised. Raise PlanningFailedError after too many in a row."""
        self.failures += 1
        self.requested()
        self.check()

    def check(self) -> None:
        """Raise PlanningFailedError after too many failures in a row."""
        if self.failures >= self._max_failures:
            raise PlanningFailedError(
                f"{self.failures} plans in a row failed; this process ends, and the next one reads the cluster again. "
                "The traceback of each failure is in the log above: please report it"
            )

    @property
    def pause_s(self) -> float:
        """How long to wait before the next plan, in seconds: 0 where the last one succeeded."""
        return self._first_pause_s * 2.0 ** min(self.failures - 1, 10) if self.failures else 0.0

    @property
    def overdue_s(self) -> float:
        """For how long a requested plan has not been made, in seconds; 0 while none is requested."""
        return 0.0 if self._requested_at is None else self._clock() - self._requested_at

    @property
    def healthy(self) -> bool:
        """Whether no requested plan is overdue for longer than the limit."""
        return self.overdue_s <= self._max_overdue_s
