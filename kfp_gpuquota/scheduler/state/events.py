"""The scheduler's events, in the past tense: only they change a `State`."""

from __future__ import annotations

import msgspec

from kfp_gpuquota.api import JobSpec, Node, Project, Reason
from kfp_gpuquota.api.placement import Placement


class Event(msgspec.Struct, frozen=True, tag_field="event"):
    """Base of all events; times are seconds since the epoch."""


class NodeChanged(Event, frozen=True, tag=True):
    """The node was added or changed. Workers on it are not affected."""

    node: Node


class NodeRemoved(Event, frozen=True, tag=True):
    """The node was removed. Its workers hold their devices until they have exited."""

    name: str


class QuotaChanged(Event, frozen=True, tag=True):
    """The project's quota was set or changed."""

    project: Project


class QuotaRemoved(Event, frozen=True, tag=True):
    """The project was deleted; jobs that still name it wait."""

    name: str


class LimitEnforced(Event, frozen=True, tag=True):
    """Workers of the project are stopped while it holds more than its limit; `enforced=False` takes that back.

    Without it a lowered limit only keeps further workers from starting.
    """

    project: str
    enforced: bool = True


class JobSubmitted(Event, frozen=True, tag=True):
    """The job is pending. `at` is its submission time permanently, also across evictions.

    `overlapping`: its next run may start while workers of the last one are still exiting; otherwise it waits for them.
    Not `movable`: the owner of its workers does not create replacements, so a worker that is stopped is lost.
    `together`: the name of those workers, of this and of other jobs of the project, that are moved all at once or not
    at all, because their owner counts the loss of one as a failure; "": each may be moved.
    With `parts` its workers differ: each spec is the request of a set, and all workers of all sets start together.
    `replaces`: it is a lost worker of a gang that runs, whose other workers are other jobs; a hold lets it start.
    `user` is who submitted it; "": unknown, and all such jobs of a project count as those of one user.
    """

    uid: str
    spec: JobSpec
    at: float
    movable: bool = True
    overlapping: bool = False
    together: str = ""
    replaces: bool = False
    parts: dict[str, JobSpec] = {}
    user: str = ""


class JobUpdated(Event, frozen=True, tag=True):
    """The job has other size bounds or another priority; its workers and its age stay.

    With `at`, a job that is smaller than its new minimum is below it since then.
    """

    uid: str
    spec: JobSpec
    at: float | None = None


class UserChanged(Event, frozen=True, tag=True):
    """The job is one of another user: who that is is read from another label now, or the label has changed."""

    uid: str
    user: str


class RunTimeExpected(Event, frozen=True, tag=True):
    """All runs of the job together are expected to last for so many seconds; None: that is unknown."""

    uid: str
    seconds: float | None


class JobRemoved(Event, frozen=True, tag=True):
    """The job ended or was cancelled; its workers hold their devices until they have exited."""

    uid: str


class JobCompleting(Event, frozen=True, tag=True):
    """A worker of the job has finished, so that the job gets no more workers; `completing=False` takes that back.

    It is taken back when the job returns to the queue.
    """

    uid: str
    completing: bool = True


class JobSuspended(Event, frozen=True, tag=True):
    """The job is not considered until it is resumed, for `reason`; None: a user has suspended it."""

    uid: str
    reason: Reason | None = None


class JobResumed(Event, frozen=True, tag=True):
    """The job is considered again, with its submission time; with `at`, as if it were submitted at that time."""

    uid: str
    at: float | None = None


class JobDeferred(Event, frozen=True, tag=True):
    """Until `until` the job is not started and gets no workers above its minimum, for `reason`.

    It replaces an earlier deferral; a time in the past ends it. A running gang below its minimum is still completed,
    and the job keeps its workers.
    """

    uid: str
    until: float
    reason: Reason


class NodesBarred(Event, frozen=True, tag=True):
    """No worker of the job is placed on these nodes, which replace those named before; running workers stay.

    Used where its workers did not fit for a reason that the scheduler does not model.
    """

    uid: str
    nodes: tuple[str, ...]


class ConstraintsChanged(Event, frozen=True, tag=True):
    """The workers of the job, or only `worker`, may use other nodes from now on: those that `spec` admits.

    Running workers stay where they are, and nodes that are barred stay so. Only the constraints of `spec` are read: a
    volume that was bound after the job started restricts its moves and its growth.
    """

    uid: str
    spec: JobSpec
    worker: str = ""


class WorkerStarted(Event, frozen=True, tag=True):
    """The worker holds `devices` (indices on `node`). `worker` is never used again for another worker.

    `part` is the part of the job that it belongs to, if the job has parts.
    """

    worker: str
    job: str
    node: str
    devices: tuple[int, ...]
    at: float
    part: str = ""


class WorkerMoved(Event, frozen=True, tag=True):
    """The worker holds these devices instead of those that it held: another node was chosen before it was bound."""

    worker: str
    node: str
    devices: tuple[int, ...]


class WorkerLeaving(Event, frozen=True, tag=True):
    """The worker was asked to leave, and still holds its devices.

    With `at`, here or in WorkerGone, a job is not expanded again until its cool-down has passed.
    """

    worker: str
    at: float | None = None


class WorkerGone(Event, frozen=True, tag=True):
    """The worker has exited and its devices are free: quota is released only here.

    With `at`, a gang that stays below its minimum from then on is stopped as a whole after `stale_after_s`.
    """

    worker: str
    at: float | None = None


class PlacementsPromised(Event, frozen=True, tag=True):
    """A plan made room for the next workers of the job at these placements; they replace those promised before.

    None: it has no promise any more. `victims` are the workers that leave for it; of those that were not asked to,
    because a process ended between two requests, the next plan asks the rest again. `at` is when it was promised: an
    earlier promise is kept first, and a promise that replaces another one has the time of that one.
    """

    job: str
    placements: tuple[Placement, ...] = ()
    at: float = 0.0
    victims: tuple[str, ...] = ()


class UsageRecalled(Event, frozen=True, tag=True):
    """The project's decayed over-quota usage up to `at`, which replaces the recorded one (after a restart).

    It is that in a node pool, or in nodes of no pool. `users` is the past use of its users in GPU-seconds, all of it,
    by `usage.key_of` their names.
    """

    project: str
    gpu_seconds: float
    at: float
    pool: str = ""
    users: dict[str, float] = {}


class Defragmented(Event, frozen=True, tag=True):
    """A plan has looked for moves that gather free GPUs at `at`.

    `lost_gpu_s` is the work in GPU-seconds that all such moves of the window have cost, including those of this plan.
    """

    at: float
    lost_gpu_s: float = 0.0


class TimePassed(Event, frozen=True, tag=True):
    """It is at least `at`: what was held until then counts as usage. For events that come without a time."""

    at: float


class ProgressReported(Event, frozen=True, tag=True):
    """Progress that a training reported.

    `step` counts applied global batches. `throughput` is in samples per second; if it is never reported, steps per
    second are used instead. `workers` is the size that the report is about, by default all workers of the job.
    `batch_size` is the samples of a step at this size. `noise_scale` is the gradient noise scale tr(S) / |g|^2 in
    samples, S the covariance of one sample's gradient and g its mean (McCandlish et al. 2018). `pause_s` is how long
    the last change of its size stopped it.
    """

    job: str
    step: int
    at: float
    checkpoint_at: float | None = None
    throughput: float | None = None
    workers: int | None = None
    batch_size: int | None = None
    noise_scale: float | None = None
    pause_s: float | None = None
