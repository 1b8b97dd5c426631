"""Bodies of HTTP requests and responses between clients and the server, beyond the shared types."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from kfp_gpuquota.api.job import ExpectedStart, Job, JobSpec
from kfp_gpuquota.api.node import Device, Node
from kfp_gpuquota.api.project import Project
from kfp_gpuquota.api.quantity import as_number
from kfp_gpuquota.api.reason import Reason, ReasonCode
from kfp_gpuquota.api.validation import MAX_SECONDS, PositiveCount, Priority, Seconds, check_count, check_range

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Lease(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A lease on a job: its holder must renew it within `duration_s`, or the job is cancelled.

    Only its holder renews it; 0 s releases the job, and `reason` says why. With `take_over` the requester becomes the
    holder; the one before can then neither renew nor shorten it.
    """

    holder: str
    duration_s: Seconds
    take_over: bool = False
    reason: str = ""

    def __post_init__(self) -> None:
        check_range("duration_s", self.duration_s, 0, MAX_SECONDS, "s")


class SubmitJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/jobs. The same `request_id` again answers with the job that the first request made.

    With `dry_run` the job is checked, and answered as it would be, but not queued; it has no uid.
    """

    spec: JobSpec
    request_id: str
    lease: Lease | None = None
    dry_run: bool = False


class JobUpdate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST .../update: new size bounds or another priority; None leaves a field as it is."""

    min_gpus: PositiveCount | None = None
    max_gpus: PositiveCount | None = None
    priority: Priority | None = None


class StopAction(StrEnum):
    """What becomes of jobs that are stopped: they are forgotten, kept out of the queue, or stay listed."""

    DELETE = "delete"
    SUSPEND = "suspend"
    CANCEL = "cancel"


class StopJobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST .../stop-jobs: jobs of one project that are stopped in one transaction, or none of them."""

    names: tuple[str, ...]
    action: StopAction


class ProjectView(msgspec.Struct, frozen=True, kw_only=True):
    """A project and what it holds now, in GPUs, a share of one as such. `over_quota` is the part above what is
    guaranteed, in each node pool.

    `surplus` is the part above what its jobs request, which does not count where fair shares are compared; `lent` is
    what other projects hold of its guarantee (`lending.with_lent`). `members` are the users and @groups that may submit
    jobs to it, on a cluster that several users of a machine share.
    """

    project: Project
    allocated: int | float
    over_quota: int | float
    requested: int | float
    lent: int | float = 0
    surplus: int | float = 0
    members: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET


class MembersChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST .../members: users, and groups as @GROUP, that become members of a project, or no longer are."""

    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()


class ShareView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's part of a device's memory, and its use of it, in MiB.

    `granted_mib` is what it may use now: its limit, or less while others need theirs. `listens`: it follows that.
    """

    worker: str
    job: str
    project: str
    device: int
    total_mib: int
    used_mib: int
    request_mib: int
    limit_mib: int
    granted_mib: int
    listens: bool = False


class ResourceView(msgspec.Struct, frozen=True, kw_only=True):
    """A resource of a node of which each one counts as a number of GPUs, and what each pod holds of it.

    What pods hold that the reader may not see, or no pod, is under the name "". A pod with 0 shares what is counted for
    another one.
    """

    name: str
    count: int
    counts_as: float
    type: str = ""
    held: dict[str, float] = {}

    @property
    def in_use(self) -> float:
        """Return how many of it are held; parts of devices by DRA drivers that divide them."""
        return as_number(sum(self.held.values()))


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node and the workers that hold its devices: device index -> worker ids. `used` is the held part of each.

    `shares` are the parts of those that several may hold, with the memory that is used. `resources` are others that
    count as GPUs: on Kubernetes those of other vendors, time slices and MIG devices.
    """

    node: Node
    held: dict[int, tuple[str, ...]]
    used: dict[int, float] = {}
    shares: tuple[ShareView, ...] = ()
    resources: tuple[ResourceView, ...] = ()

    @property
    def has_gpus(self) -> bool:
        """Return whether it has devices, or anything that counts as GPUs."""
        return bool(self.node.devices or self.resources)

    @property
    def gpus(self) -> float:
        """Return the number of its GPUs, with what counts as GPUs."""
        return len(self.node.devices) + sum(one.count * one.counts_as for one in self.resources)

    @property
    def gpus_in_use(self) -> float:
        """Return how many of them are held."""
        return sum(self.used.values()) + sum(one.in_use * one.counts_as for one in self.resources)

    @property
    def gpus_idle(self) -> float:
        """Return how many of them nobody holds any part of."""
        held = {*self.held, *(device for device, part in self.used.items() if part)}
        return (
            len(self.node.devices)
            - len(held)
            + sum(max(0, one.count - one.in_use) * one.counts_as for one in self.resources)
        )

    @property
    def holders(self) -> list[str]:
        """Return the workers and pods that hold GPUs of it, as far as the reader may see them."""
        others = [pod for one in self.resources for pod in one.held if pod]
        return [*(worker for workers in self.held.values() for worker in workers), *others]

    @property
    def types(self) -> list[str]:
        """Return the types of its GPUs."""
        others = {one.type or one.name for one in self.resources if one.count}
        return sorted({device.model for device in self.node.devices} | others)


class JobList(msgspec.Struct, frozen=True, kw_only=True):
    """All jobs as of `revision`; ask with after=revision to wait for the next change.

    Of a list in pages, `next_page` is what to ask for the following one with; "" after the last.
    """

    revision: int
    jobs: tuple[Job, ...]
    next_page: str = ""


class EventKind(StrEnum):
    """The kind of an entry in the history."""

    PROJECT_CHANGED = "project-changed"
    PROJECT_DELETED = "project-deleted"
    JOB_SUBMITTED = "job-submitted"
    JOB_STARTED = "job-started"
    JOB_RESIZED = "job-resized"
    JOB_EVICTED = "job-evicted"
    JOB_UPDATED = "job-updated"
    JOB_SUSPENDED = "job-suspended"
    JOB_RESUMED = "job-resumed"
    JOB_ENDED = "job-ended"
    JOB_DELETED = "job-deleted"
    WORKER_STARTED = "worker-started"
    WORKER_GONE = "worker-gone"
    WORKER_MOVED = "worker-moved"
    GPU_MEMORY_RECLAIMED = "gpu-memory-reclaimed"
    GPUS_UNUSED = "gpus-unused"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the cluster's history; `at` is seconds since the epoch, `gpus` the change in GPUs held.

    `user` is that of the job, in entries of its workers.
    """

    revision: int
    at: float
    kind: EventKind
    project: str = ""
    job: str = ""
    job_uid: str = ""
    worker: str = ""
    gpus: int | float = 0
    reason: Reason | None = None
    user: str = ""


class EventList(msgspec.Struct, frozen=True, kw_only=True):
    """Entries after the revision asked for, oldest first."""

    revision: int
    events: tuple[Event, ...]


class JobName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job by its names."""

    project: str
    name: str


MOST_NODES: Final = 64
MOST_GPUS_OF_NODE: Final = 256


class NewNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node that might be added: its whole GPUs, of the size of the smallest there are, and its pool."""

    gpus: int
    pool: str = ""

    def __post_init__(self) -> None:
        check_count("gpus", self.gpus, 1, "GPUs", MOST_GPUS_OF_NODE)

    def node(self, name: str, labels_in_pool: Iterable[Mapping[str, str]], memory_mib: int) -> Node:
        """Return the node as those of its pool are: with the labels that all of them have, as their type of GPUs."""
        alike = [set(labels.items()) for labels in labels_in_pool]
        devices = tuple(Device(index=index, memory_mib=memory_mib) for index in range(self.gpus))
        labels = dict(set.intersection(*alike)) if alike else {}
        return Node(name=name, devices=devices, pool=self.pool, labels=labels)


class Supposition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/what-if: these jobs are submitted, projects are as given, jobs deleted, nodes lost and added.

    With `growing` nothing else is supposed: the answer is why these jobs do not grow.
    """

    submit: tuple[JobSpec, ...] = ()
    projects: tuple[Project, ...] = ()
    delete: tuple[JobName, ...] = ()
    without_nodes: tuple[str, ...] = ()
    with_nodes: Annotated[tuple[NewNode, ...], msgspec.Meta(max_length=MOST_NODES)] = ()
    growing: Annotated[tuple[JobName, ...], msgspec.Meta(max_length=1)] = ()


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """The hypothetical outcome for one job, the reason, and when it is expected to start where it would wait."""

    project: str
    job: str
    reason: Reason | None = None
    expected_start: ExpectedStart | None = None


class OtherTeams(msgspec.Struct, frozen=True, kw_only=True):
    """The effects on jobs that the asking user may not see: how many of them, and the GPUs that they would release."""

    starts: int = 0
    no_longer_starts: int = 0
    grows: int = 0
    shrinks: int = 0
    stops: int = 0
    released_gpus: int | float = 0


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """The difference of the next plan under a supposition. `waits`: jobs of the supposition that would not
    start; `starts` and `grows` count those that would as soon as others have left. `keeps`: jobs that were asked about
    which run with less than their maximum and do not grow, with the reason.

    `others` sums up jobs that are not listed; it is zero where the user sees every job.
    """

    starts: tuple[Effect, ...] = ()
    waits: tuple[Effect, ...] = ()
    no_longer_starts: tuple[Effect, ...] = ()
    grows: tuple[Effect, ...] = ()
    shrinks: tuple[Effect, ...] = ()
    stops: tuple[Effect, ...] = ()
    keeps: tuple[Effect, ...] = ()
    others: OtherTeams = OtherTeams()

    def effects(self) -> tuple[tuple[str, Effect], ...]:
        """Return all effects with their verbs ("would start"), in the order in which people read them."""
        too_large = tuple(one for one in self.waits if one.reason and one.reason.code is ReasonCode.TOO_LARGE)
        kinds = (
            ("would start", self.starts),
            ("would wait", tuple(one for one in self.waits if one not in too_large)),
            ("cannot start on the nodes that there are", too_large),
            ("would no longer start", self.no_longer_starts),
            ("would grow", self.grows),
            ("would shrink", self.shrinks),
            ("would be stopped", self.stops),
        )
        return tuple((verb, effect) for verb, effects in kinds for effect in effects)


class LogChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a worker's log as bytes, the offset behind it, and whether more may come."""

    text: bytes
    next_offset: int
    more: bool


class Health(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The version and the identity of the server. `problem`: what the cluster cannot do at present, and why.

    `shared`: several users of the machine use it, each with the rights of their own.
    """

    version: str
    pid: int
    home: str
    started_at: float
    problem: str = ""
    shared: bool = False


class PageLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link to the web page, which opens once; `valid_s` is for how many seconds."""

    url: str
    valid_s: float


class PageAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a browser finds the web page if a proxy leads to it: scheme and host, and the path before the page's own.

    `{port}` in the path is the port on which the page is served.
    """

    origin: str = ""
    base_path: str = ""


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One error: a stable code, a sentence with the next step, and the field at fault where there is one.

    `rule` is the part of the sentence that follows the field and its value.
    """

    code: str
    message: str
    field: str = ""
    rule: str = ""


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every answer that is not a success."""

    error: ErrorBody
