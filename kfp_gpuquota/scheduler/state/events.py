"""What happened, in the past tense: the only way to change a `State`."""

from __future__ import annotations

import msgspec

from kfp_gpuquota.api import JobSpec, Node, Project, Reason


class Event(msgspec.Struct, frozen=True, tag_field="event"):
    """Base of all events; times are seconds since the epoch."""


class NodeChanged(Event, frozen=True, tag=True):
    """The node is as given from now on. Workers on it are not touched."""

    node: Node


class NodeRemoved(Event, frozen=True, tag=True):
    """Nothing new is placed on the node; its workers hold their devices until they are gone."""

    name: str


class QuotaChanged(Event, frozen=True, tag=True):
    """The project's quota is as given from now on."""

    project: Project


class QuotaRemoved(Event, frozen=True, tag=True):
    """The project is gone; jobs that still name it wait."""

    name: str


class JobSubmitted(Event, frozen=True, tag=True):
    """The job waits. `at` fixes its age for ever, also across evictions.

    Not `movable`: whoever started its workers starts none anew, so one that is stopped to run elsewhere would be gone.
    With `parts` its workers differ: each spec says what a set of them asks for, and all of all sets start together.
    """

    uid: str
    spec: JobSpec
    at: float
    movable: bool = True
    parts: dict[str, JobSpec] = {}


class JobUpdated(Event, frozen=True, tag=True):
    """The job has other size bounds or another priority; its workers and its age stay."""

    uid: str
    spec: JobSpec


class JobRemoved(Event, frozen=True, tag=True):
    """The job ended or was cancelled; its workers hold their devices until they are gone."""

    uid: str


class JobCompleting(Event, frozen=True, tag=True):
    """One of its workers has finished: the job takes no more of them, unless it returns to the queue."""

    uid: str


class JobSuspended(Event, frozen=True, tag=True):
    """The job is not considered until it is resumed."""

    uid: str


class JobResumed(Event, frozen=True, tag=True):
    """The job is considered again, with its age."""

    uid: str


class JobDeferred(Event, frozen=True, tag=True):
    """Before `until` the job is neither started nor given more than it needs to run, for that `reason`.

    Instead of what was said before; a time that is past defers nothing. A gang below its minimum is made whole all the
    same, and what the job holds it keeps.
    """

    uid: str
    until: float
    reason: Reason


class NodesBarred(Event, frozen=True, tag=True):
    """No worker of the job is placed on these nodes from now on, instead of those named before; what runs there stays.

    Where its workers found no room for a reason that is not planned with.
    """

    uid: str
    nodes: tuple[str, ...]


class WorkerStarted(Event, frozen=True, tag=True):
    """The worker holds `devices` (indices on `node`) from now on. `worker` is unique for ever.

    `part` says which of the job's parts it belongs to, where it has some.
    """

    worker: str
    job: str
    node: str
    devices: tuple[int, ...]
    at: float
    part: str = ""


class WorkerLeaving(Event, frozen=True, tag=True):
    """The worker was told to go, and still holds its devices.

    With `at`, here or where it is gone, a job that grew less than its cool-down ago is not grown again before that is
    over.
    """

    worker: str
    at: float | None = None


class WorkerGone(Event, frozen=True, tag=True):
    """The worker's devices are free: quota is released only here.

    With `at`, a gang that runs below its minimum from then on is stopped whole after a while.
    """

    worker: str
    at: float | None = None


class UsageRecalled(Event, frozen=True, tag=True):
    """The project has borrowed so much until `at`, as much as is not forgotten; instead of what was known of it."""

    project: str
    gpu_seconds: float
    at: float


class ProgressReported(Event, frozen=True, tag=True):
    """What a training said about itself.

    `step` counts applied global batches. `throughput` is in samples per second; where a training never says it, steps
    per second stand for it. `workers` is the size it speaks of, by default all that the job holds.
    """

    job: str
    step: int
    at: float
    checkpoint_at: float | None = None
    throughput: float | None = None
    workers: int | None = None
