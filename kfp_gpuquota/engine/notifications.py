"""Which changes of jobs people outside of the cluster are notified of, and in which words. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from kfp_gpuquota.api import Phase
from kfp_gpuquota.api.wire import EventKind

if TYPE_CHECKING:
    from kfp_gpuquota.api import Reason
    from kfp_gpuquota.api.wire import Event
    from kfp_gpuquota.engine.records import JobRecord


class Notified(StrEnum):
    """What happened to a job, as an administrator selects it."""

    STARTED = "started"
    FAILED = "failed"
    PREEMPTED = "preempted"
    LATE = "late"
    UNUSED = "unused"


_WORDS: Final = {
    Notified.STARTED: "started",
    Notified.FAILED: "failed",
    Notified.PREEMPTED: "was preempted",
    Notified.LATE: "waits longer than expected",
    Notified.UNUSED: "does not use its GPUs",
}
_OF_EVENTS: Final = {
    EventKind.JOB_STARTED: Notified.STARTED,
    EventKind.JOB_EVICTED: Notified.PREEMPTED,
    EventKind.GPUS_UNUSED: Notified.UNUSED,
}


class Notification(NamedTuple):
    """One change of one job; `user` is its owner on a cluster that several users share, `why` a sentence or "".

    `kind` is what a pod, or an object that is suspended as a whole, is called on Kubernetes. A `test` is of no job.
    """

    what: Notified
    project: str
    job: str
    uid: str
    user: str
    labels: dict[str, str]
    why: str
    at: float
    kind: str = "Job"
    test: bool = False

    @property
    def headline(self) -> str:
        """What happened to which job, in names alone."""
        if self.test:
            return "This is a test message of gpuquota"
        return f"{self.kind} {self.job} of project {self.project} {_WORDS[self.what]}"

    @property
    def text(self) -> str:
        """The notification as one line."""
        return f"{self.headline}: {self.why}" if self.why else self.headline


def notification_of(job: JobRecord, event: Event) -> Notification | None:
    """Return the notification that follows from an event of the history, after which the job is as given."""
    ended = event.kind is EventKind.JOB_ENDED and job.status.phase is Phase.FAILED
    what = Notified.FAILED if ended else _OF_EVENTS.get(event.kind)
    return None if what is None else _notification(job, what, event.reason, event.at)


def late_notification(job: JobRecord, latest: float, now: float) -> Notification:
    """Return the notification that the job still waits, which was first expected to start by `latest`."""
    by = datetime.fromtimestamp(latest, UTC).strftime("%Y-%m-%d %H:%M UTC")
    why = f"it was first expected to start by {by}"
    if job.status.reason is not None:
        why = f"{why}; {job.status.reason.message}"
    return _notification(job, Notified.LATE, None, now)._replace(why=why)


def _notification(job: JobRecord, what: Notified, reason: Reason | None, at: float) -> Notification:
    spec, user = job.spec, "" if job.owner is None else job.owner.name
    why = "" if reason is None else reason.message
    return Notification(what, spec.project, spec.name, job.uid, user, spec.labels, why, at)
