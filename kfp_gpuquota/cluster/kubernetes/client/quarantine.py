"""Objects that cannot be read or handled: reported once each, counted, and never the end of a watch.

Invariant: whatever a user writes into an object, the watch that delivers it goes on, and all other objects are handled.
What a quarantined pod holds is counted by its plain GPU request (`translate.counted_view`); of any other kind the last
good version stays in force.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.event_recorder import Subject

REASON = "Quarantined"


class Quarantine:
    """Quarantined objects by uid. `report(subject, reason, message)` shows a warning to the object's owner."""

    def __init__(self, report: Callable[[Subject, str, str], None]) -> None:
        self._report = report
        self._problems: dict[str, tuple[str, str]] = {}

    def put(self, subject: Subject, problem: str) -> None:
        """The object has this problem; it is reported when it is new."""
        if self._problems.get(subject.uid) == (subject.kind, problem):
            return
        self._problems[subject.uid] = subject.kind, problem
        self._report(subject, REASON, problem)

    def release(self, uid: str) -> None:
        """The object is gone, or can be handled again."""
        self._problems.pop(uid, None)

    def counts(self) -> Counter[str]:
        """Quarantined objects by kind."""
        return Counter(kind for kind, _ in self._problems.values())
