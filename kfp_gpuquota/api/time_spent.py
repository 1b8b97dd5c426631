"""Where a job's time went: how long it was held, waited and for what, started, ran, changed its size and stopped. Pure.

Invariant: the parts of a job's life add up to it, from its submission until its end, or until now.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.reason import ReasonCode

if TYPE_CHECKING:
    from kfp_gpuquota.api.job import JobStatus


class Activity(StrEnum):
    """What a job does at a time. Two wait in the queue: for quota, or for idle GPUs on suitable nodes (room)."""

    HELD = "held"
    SUSPENDED = "suspended"
    QUOTA = "quota"
    ROOM = "room"
    STARTING = "starting"
    RUNNING = "running"
    RESIZING = "resizing"
    STOPPING = "stopping"
    UNRECORDED = "unrecorded"

    @property
    def label(self) -> str:
        """The activity in words."""
        return _LABELS[self]


_LABELS: Final = {
    Activity.HELD: "held (begin, after, array, project)",
    Activity.SUSPENDED: "suspended",
    Activity.QUOTA: "waiting for quota",
    Activity.ROOM: "waiting for room",
    Activity.STARTING: "starting",
    Activity.RUNNING: "running",
    Activity.RESIZING: "changing size",
    Activity.STOPPING: "stopping",
    Activity.UNRECORDED: "not recorded",
}
_QUOTA_CODES: Final = {ReasonCode.OVER_LIMIT, ReasonCode.OVER_QUOTA_BUILD, ReasonCode.OVER_FAIR_SHARE}


def activity_of(status: JobStatus) -> Activity | None:
    """Return what the job does, by its phase and by why it waits; None: it has ended."""
    if status.phase.final:
        return None
    if status.phase.value != "Pending":
        return Activity(status.phase.value.lower())
    code = status.reason.code if status.reason else None
    if code is not None and code.holds:
        return Activity.HELD
    return Activity.QUOTA if code in _QUOTA_CODES else Activity.ROOM


def time_spent(status: JobStatus, now: float) -> dict[Activity, float]:
    """Return how long the job did what, in seconds; `now` in seconds since the epoch."""
    found = {activity: status.spent[activity] for activity in Activity if status.spent.get(activity)}
    if (doing := activity_of(status)) is not None and status.counted_until is not None:
        found[doing] = found.get(doing, 0.0) + max(0.0, now - status.counted_until)
    return found
