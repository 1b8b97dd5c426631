"""Objects that cannot be decoded or processed: each is reported once and counted, and never ends a watch.

Invariant: whatever a user writes into an object, the watch that delivers it continues, and all other objects are
processed. A quarantined pod is counted by its plain GPU request (`convert.pods.counted_view`); of any other kind the
last valid version stays in effect.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Subject

REASON = "Quarantined"


class Quarantine:
    """Quarantined objects by uid. `report(subject, reason, message)` records a warning on the object."""

    def __init__(self, report: Callable[[Subject, str, str], None]) -> None:
        self._report = report
        self._problems: dict[str, tuple[str, str]] = {}

    def put(self, subject: Subject, problem: str) -> None:
        """Quarantine an object; a new problem is reported."""
        if self._problems.get(subject.uid) == (subject.kind, problem):
            return
        self._problems[subject.uid] = subject.kind, problem
        self._report(subject, REASON, problem)

    def release(self, uid: str) -> None:
        """Remove an object that was deleted or can be processed again."""
        self._problems.pop(uid, None)

    def counts(self) -> Counter[str]:
        """Return the number of quarantined objects by kind."""
        return Counter(kind for kind, _ in self._problems.values())
