"""The scheduler's records: requests, tasks, jobs, queues and nodes, as plain mutable dataclasses.

They are richer than the API: a device may be shared, quotas cover CPU and memory, queues form a tree of any depth. Only
the `Ledger` changes the counts in a record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from kfp_gpuquota.api import Order, StopPolicy
from kfp_gpuquota.api.affinity import NodeTerm, Taint, Toleration, keeps_off
from kfp_gpuquota.api.project import strictest
from kfp_gpuquota.api.resources import capacity_of, weighed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.api import Reason
    from kfp_gpuquota.api.placement import Placement
    from kfp_gpuquota.api.resources import Resources

GPU: Final = 1_000_000
"""One whole device in micro-GPUs, the unit of shares."""

MILLI: Final = 1000
"""One CPU core in milli-CPUs."""

UNLIMITED: Final = math.inf
NEVER: Final = -math.inf

PAUSE_S: Final = 1.0
"""How long a change of size stops a job that has not measured it yet."""

SHORT_S: Final = 64.0
"""Between jobs that are expected to run for less, age decides."""

STALE_AFTER_S: Final = 60.0
"""How long a gang may run below its minimum, waiting for replacements, before it is stopped as a whole."""


class Amount(NamedTuple):
    """A vector of resources: micro-GPUs, milli-CPUs, bytes of memory."""

    gpu: float = 0
    cpu: float = 0
    memory: float = 0


NOTHING: Final = Amount()
BOUNDLESS: Final = Amount(UNLIMITED, UNLIMITED, UNLIMITED)


class Status(IntEnum):
    """The status of a task. BOUND and NOMINATED exist only during a plan."""

    PENDING = 0
    HELD = 1
    BOUND = 2
    NOMINATED = 3
    LEAVING = 4


@dataclass(frozen=True, slots=True)
class Rules:
    """Which hosts a task may use: required labels, terms of which one must match, and excluded names (`barred`)."""

    labels: tuple[tuple[str, str], ...] = ()
    terms: tuple[NodeTerm, ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    barred: frozenset[str] = frozenset()

    def admit(self, host: Host) -> bool:
        """Return whether the host matches, and has no taint that is not tolerated."""
        if host.name in self.barred or any(host.labels.get(key) != value for key, value in self.labels):
            return False
        if self.terms and not any(term.admits(host.name, host.labels) for term in self.terms):
            return False
        return keeps_off(host.taints, self.tolerations) is None


NO_RULES: Final = Rules()


@dataclass(frozen=True, slots=True)
class Request:
    """The request of one task: `share` of each of `devices` devices of one node, or `memory_mib` of each.

    A request of memory counts at least `compute` micro-GPUs of each device: computing power and memory are placed as
    one number, the larger part, so neither is ever promised twice. Two numbers for each device were rejected: they
    would pack a little tighter, and make every comparison of free devices a partial order.

    `cpu` is in milli-CPUs, `memory` in bytes, `resources` are other amounts that the node must have; `gpu_weights` are
    the micro-GPUs that a unit of some of them counts as, `other_gpus` their sum. `plain`: only whole devices, of any
    node.
    """

    devices: int = 1
    share: int = GPU
    memory_mib: int = 0
    compute: int = 0
    cpu: int = 0
    memory: int = 0
    nodes: frozenset[str] | None = None
    rules: Rules = NO_RULES
    resources: Resources = ()
    gpu_weights: Resources = ()
    whole: bool = field(init=False, compare=False)
    plain: bool = field(init=False, compare=False)
    other_gpus: int = field(init=False, compare=False)
    _amount: Amount = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole", self.share == GPU and not self.memory_mib)
        anywhere = self.nodes is None and self.rules is NO_RULES
        object.__setattr__(self, "plain", self.whole and anywhere and not self.counted)
        object.__setattr__(self, "other_gpus", weighed(dict(self.resources), self.gpu_weights))
        object.__setattr__(self, "_amount", Amount(self.devices * self.share + self.other_gpus, self.cpu, self.memory))

    @property
    def counted(self) -> bool:
        """Whether it needs more of its node than devices."""
        return bool(self.cpu or self.memory or self.resources)

    def share_of(self, gpu_memory_mib: int) -> int:
        """Return the micro-GPUs of each device with that memory; more than GPU where it can never fit."""
        if not self.memory_mib:
            return self.share
        return max(self.compute, -(-self.memory_mib * GPU // gpu_memory_mib)) if gpu_memory_mib else GPU + 1

    def amount(self, gpu_memory_mib: int) -> Amount:
        """Return what the request counts against quotas."""
        if not self.memory_mib:
            return self._amount
        return Amount(self.devices * self.share_of(gpu_memory_mib), self.cpu, self.memory)


@dataclass(slots=True, eq=False)
class User:
    """A user of one queue. `held` are the micro-GPUs of its jobs that neither leave nor are lent.

    `occupied` are all that its workers have, and `used` the decayed GPU-seconds of these up to `used_until`. `jobs` is
    the number of its jobs, also of those that wait: without any, only its past use remains (`usage.forget`).
    """

    name: str = ""
    jobs: int = 0
    held: float = 0.0
    occupied: float = 0.0
    used: float = 0.0
    used_until: float = 0.0


@dataclass(slots=True, eq=False)
class Queue:
    """A project or department, in one node pool. Amounts are of the whole subtree.

    `held` is what tasks will hold after leaving ones have exited: running, bound and nominated ones. `leaving` still
    occupies devices and counts against the limit of tasks that would start now. `lent` is the part of `held` above the
    requests of elastic jobs, `fixed` the part that cannot be preempted. `granted` bounds `deserved` for a cycle.
    `used` is its decayed over-quota usage in GPU-seconds up to `used_until`. `enforced`: what exceeds its limit is
    stopped. No run of its jobs is stopped for others before it has lasted for `min_run_time_s`. `reserve_after_s` is
    its own bound of `State`, None: that of all. `stop_policy` is its own; `halt` is the strictest one of it and of
    those above it. `waiting` has the jobs that plans consider, by shape and in order; `shelved` those that no plan
    considers until a node changes, because no node can hold them (rotation.py). `users` are those who have jobs in it;
    `recalled` is the past use of others by `usage.key_of` their name. `allocated` are the sizes that growth.py chose
    last.
    """

    name: str
    pool: str = ""
    parent: Queue | None = None
    deserved: Amount = NOTHING
    limit: Amount = BOUNDLESS
    enforced: bool = False
    stop_policy: StopPolicy = StopPolicy.NONE
    order: Order = Order.FAIR
    min_run_time_s: float = 0.0
    reserve_after_s: float | None = None
    priority: int = 100
    weights: tuple[float, float, float] = (1.0, 1.0, 1.0)
    created: float = 0.0
    exists: bool = True
    children: dict[str, Queue] = field(default_factory=dict)
    held: list[float] = field(default_factory=lambda: [0, 0, 0])
    leaving: list[float] = field(default_factory=lambda: [0, 0, 0])
    lent: list[float] = field(default_factory=lambda: [0, 0, 0])
    fixed: list[float] = field(default_factory=lambda: [0, 0, 0])
    requested: list[float] = field(default_factory=lambda: [0, 0, 0])
    used: float = 0.0
    used_until: float = 0.0
    share: Amount = NOTHING
    granted: Amount = BOUNDLESS
    keeps: Amount = NOTHING
    path: tuple[Queue, ...] = ()
    version: int = 0
    waiting: dict[Shape, list[tuple[OrderKey, Job]]] = field(default_factory=dict)
    shelved: dict[Shape, list[tuple[OrderKey, Job]]] = field(default_factory=dict)
    running: dict[Job, None] = field(default_factory=dict)
    priorities: dict[int, int] = field(default_factory=dict)
    users: dict[str, User] = field(default_factory=dict)
    recalled: dict[str, tuple[float, float]] = field(default_factory=dict)
    allocated: list[tuple[float, Sequence[object], list[int]] | None] = field(default_factory=lambda: [None, None])

    @property
    def label(self) -> str:
        """The queue's name for messages."""
        return f"{self.name} (node pool {self.pool})" if self.pool else self.name

    @property
    def guarantee(self) -> Amount:
        """What it is guaranteed in this cycle: `deserved`, or the part that higher priorities leave of the nodes."""
        deserved, granted = self.deserved, self.granted
        if granted is BOUNDLESS:
            return deserved
        return Amount(*map(min, deserved, granted))

    @property
    def halt(self) -> StopPolicy:
        """The stop policy that applies to its jobs."""
        return self.halted_by.stop_policy

    @property
    def halted_by(self) -> Queue:
        """The nearest queue, itself or above it, whose policy is the one that applies; itself if none has any."""
        return strictest(self.path) or self

    def claim(self, r: int) -> float:
        """Return the amount of resource `r` that the queue holds, without lent workers."""
        return self.held[r] - self.lent[r]

    def set_share(self, share: Amount) -> None:
        """Set the fair share for a cycle, and `keeps`, which reclaim by others does not take."""
        self.share = share
        self.keeps = Amount(*(min(max(d, s), n) for d, s, n in zip(self.guarantee, share, self.limit, strict=True)))


@dataclass(frozen=True, slots=True)
class Topology:
    """Labels whose values are nested domains, widest first; the levels (indices) that tasks must or should share.

    `order`: the values of the first label in the order of preference, in which its domains are tried. `segment`: each
    so many tasks must share a domain of the last level, 0: none.
    """

    levels: tuple[str, ...]
    required: int | None = None
    preferred: int | None = None
    order: tuple[str, ...] = ()
    segment: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """A part of a job: a set of tasks of which `gang` start together, or children of which `fewest` (all) are whole."""

    name: str
    gang: int = 0
    children: tuple[Group, ...] = ()
    fewest: int | None = None
    topology: Topology | None = None

    @property
    def needed(self) -> int:
        """The number of children that must be whole."""
        return len(self.children) if self.fewest is None else self.fewest


OrderKey = tuple[int, int, float, str]


class Shape(NamedTuple):
    """Jobs of one queue and shape differ only in age: when one cannot be placed, none can.

    `user` is the name of their user, `length_s` how long they are expected to run, where that decides about their
    order, else "" and 0. `runs` is the uid of a job that runs
    within a topology, else "": where it can grow depends on where it runs.
    """

    requests: tuple[Request, ...]
    priority: int
    preemptible: bool
    starts: bool
    groups: Group | None
    user: str = ""
    length_s: float = 0.0
    runs: str = ""


@dataclass(slots=True, eq=False)
class Task:
    """One worker, running or still to be placed. `id` is "" until it is started.

    `group` is the set of its job that it belongs to, `within` the hosts to which a placement attempt is limited.
    """

    job: Job
    request: Request
    index: int
    id: str = ""
    priority: int = 0
    status: Status = Status.PENDING
    node: Host | None = None
    devices: tuple[int, ...] = ()
    started_at: float = 0.0
    moved: Task | None = None
    group: str = ""
    within: frozenset[Host] | None = None


class Mark(NamedTuple):
    """The step of a training at a time, with its number of workers."""

    step: int
    at: float
    workers: int


@dataclass(slots=True, eq=False)
class Job:
    """A gang of `gang` tasks, elastic up to `wanted`; above that, up to `most`, GPUs are only lent to it.

    `started_at` is the start of its present run, `grown_at` and `shrunk_at` are the times of its last expansion and
    shrink. `throughput` is by number of workers, in one unit for all: samples per second if the training reports them
    (`throughput_reported`), else steps per second since `counting_from`. `batches` are the samples of a step by number
    of workers, `noise_scale` is the gradient noise scale in samples, if it is reported; `pause_s` is how long a change
    of its size stops it. With `groups` the gang has parts; with `spread` its tasks are spread over hosts instead of
    being packed. Workers of a job that is not `movable` are not
    moved, those of all jobs of its project with its `together` only all at once. `overlapping`: a run may start before
    the workers of the last one have exited. `replaces`: it is a worker of a gang whose others, which run, are other
    jobs. `promised` are the placements for which room was made, at `promised_at`, by asking `victims` to leave.
    `exceeds`: its size was updated while it ran, to a gang beyond the guarantee, so it has no core until this run ends.
    Before `deferred_until` it gets no workers above its minimum, for the reason `deferred_for`. `suspended_for` is
    why it is not considered; None: a user has suspended it.
    """

    uid: str
    name: str
    queue: Queue
    gang: int
    wanted: int
    most: int
    request: Request
    groups: Group | None = None
    spread: bool = False
    user: User = field(default_factory=User)
    priority: int = 50
    preemptible: bool = True
    exceeds: bool = False
    movable: bool = True
    overlapping: bool = False
    together: str = ""
    replaces: bool = False
    submitted_at: float = 0.0
    suspended: bool = False
    suspended_for: Reason | None = None
    completing: bool = False
    removed: bool = False
    promised: tuple[Placement, ...] = ()
    promised_at: float = 0.0
    victims: tuple[str, ...] = ()
    tasks: dict[str, Task] = field(default_factory=dict)
    pending: list[Task] = field(default_factory=list)
    hosts: dict[Host, int] = field(default_factory=dict)
    active: int = 0
    placed: int = 0
    next_index: int = 0
    filed: tuple[Shape, OrderKey] | None = None
    requested: Amount = NOTHING
    below_since: float | None = None
    stale_after_s: float = STALE_AFTER_S
    waiting_since: float = 0.0
    deferred_until: float = NEVER
    deferred_for: Reason | None = None
    preemption_delay_s: float = 0.0
    cool_down_s: float = 0.0
    min_run_time_s: float = 0.0
    most_s: float = UNLIMITED  # a run and its grace period end within it, because it is stopped then
    expected_s: float = UNLIMITED  # how long all its runs are expected to last together
    started_at: float = 0.0
    grown_at: float = NEVER
    shrunk_at: float = NEVER
    checkpoint_at: float = NEVER
    throughput: dict[int, float] = field(default_factory=dict)
    throughput_reported: bool = False
    batches: dict[int, int] = field(default_factory=dict)
    noise_scale: float | None = None
    pause_s: float = PAUSE_S
    measured_last: int = 0  # the number of workers of its last report
    reports: int = 0  # how many; `worth` is what growth.py computed from them
    worth: object = None
    counting_from: Mark | None = None

    def ends_by(self, now: float) -> float:
        """Return when its run ends at the latest, if it starts now or has started; `inf` if nothing ends it."""
        return (self.started_at if self.active else now) + self.most_s

    @property
    def least_s(self) -> float:
        """How long a run of it lasts before it is stopped for others, in seconds."""
        return max(self.min_run_time_s, self.queue.min_run_time_s)

    @property
    def length_s(self) -> float:
        """How long it is expected to run, as the next power of two in seconds; `inf` if that is unknown.

        So age decides between similar jobs.
        """
        expected_s = min(self.expected_s, self.most_s)
        return max(SHORT_S, 2.0 ** math.ceil(math.log2(max(1.0, expected_s)))) if expected_s < UNLIMITED else UNLIMITED

    @property
    def saved_at(self) -> float:
        """The time from which work is lost if the job is stopped: its last checkpoint, else the start of this run."""
        return self.checkpoint_at if self.checkpoint_at > self.started_at else self.started_at

    @property
    def stopped(self) -> bool:
        """Whether its last run has ended, and its next one waits for the exit of that run's workers."""
        return not self.overlapping and not self.active and bool(self.tasks)

    @property
    def resumable(self) -> bool:
        """Stopping one of its workers loses no more than what was done since its last checkpoint.

        Also of a training that others of its workers carry on.
        """
        return self.checkpoint_at > NEVER or (bool(self.throughput) and self.active > self.gang)

    @property
    def halted(self) -> bool:
        """Whether a stop policy of its project, or of one above it, applies."""
        return any(queue.stop_policy is not StopPolicy.NONE for queue in self.queue.path)

    @property
    def goes_on(self) -> bool:
        """Whether what the job runs stays, in a project with a stop policy: its gang is completed when it loses one."""
        return (self.active > 0 or self.replaces) and (self.queue.halt is StopPolicy.HOLD or self.core > 0)

    @property
    def segment(self) -> int:
        """The number of workers by which its size changes: those of a segment, else 1."""
        return max(1, self.segments.segment) if self.segments is not None else 1

    @property
    def segments(self) -> Topology | None:
        """Its topology if it has segments."""
        topology = None if self.groups is None else self.groups.topology
        return topology if topology is not None and topology.segment else None

    @property
    def surplus(self) -> int:
        """The number of tasks above the gang, which can be evicted one by one."""
        return max(0, self.active - self.gang)

    @property
    def core(self) -> float:
        """The number of tasks that nobody takes: the gang of a job that is not preemptible, with parts all of it."""
        if self.preemptible or self.exceeds:
            return 0
        return self.gang if self.groups is None or not self.groups.children else UNLIMITED

    @property
    def reports_progress(self) -> bool:
        """Whether the job has reported progress, so that it is a training that changes its size without losing work."""
        return bool(self.throughput) or self.counting_from is not None

    @property
    def lent(self) -> int:
        """The number of tasks above the request, which are evicted first."""
        return max(0, self.active - self.wanted)


@dataclass(slots=True, eq=False, order=False)
class Host:
    """A node. `taken[device]`: micro-GPUs of running, leaving and nominated tasks, `sharers[device]`: their numbers.

    `counted` are the amounts of other resources that these tasks hold; `resources` are the totals, None: unlimited;
    `gpu_weights` as in Request.
    """

    name: str
    devices: tuple[int, ...]
    gpu_memory_mib: int = 0
    ready: bool = True
    cpu: float = UNLIMITED
    memory: float = UNLIMITED
    max_tasks: float = UNLIMITED
    labels: dict[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    pool: str = ""
    resources: dict[str, int] | None = None
    gpu_weights: Resources = ()
    max_sharers: float = UNLIMITED
    taken: dict[int, list[int]] = field(default_factory=dict)
    sharers: dict[int, list[int]] = field(default_factory=dict)
    other: tuple[list[float], list[float], list[float]] = field(
        default_factory=lambda: ([0.0] * 3, [0.0] * 3, [0.0] * 3)
    )
    counted: dict[str, list[int]] = field(default_factory=dict)
    tasks: dict[Task, None] = field(default_factory=dict)
    idle_whole: int = 0
    future_whole: int = 0
    shared: int = 0
    version: int = 0
    filed: tuple[int, int] = (0, 0)
    admitted: dict[Rules, bool] = field(default_factory=dict)

    def admits(self, rules: Rules) -> bool:
        """Return whether the rules admit this host. Cached: a changed host is a new record."""
        if rules is NO_RULES and not self.taints:
            return True
        admitted = self.admitted.get(rules)
        if admitted is None:
            admitted = self.admitted[rules] = rules.admit(self)
        return admitted

    @property
    def gpus(self) -> int:
        """The micro-GPUs of all of its devices, and of the resources that count as GPUs."""
        return GPU * len(self.devices) + weighed(self.resources or {}, self.gpu_weights)

    @property
    def special(self) -> bool:
        """Whether running on the host needs more than a free device: a toleration, the node pool or a free pod slot."""
        return bool(self.taints) or bool(self.pool) or self.max_tasks < UNLIMITED

    @property
    def countable(self) -> bool:
        """Whether no device is shared and pods are unlimited, so that counting whole devices decides what fits."""
        return not self.shared and self.max_tasks == UNLIMITED

    def left_of(self, resource: str, *, future: bool) -> float:
        """Return what is free of another resource now, or with `future` after leaving tasks have exited."""
        used, leaving, nominated = self.counted.get(resource, (0, 0, 0))
        return capacity_of(self.resources, resource) - used - (nominated if future else max(leaving, nominated))

    def other_idle(self, index: int) -> float:
        """Return what a task could hold now of CPU (0, in milli-CPUs) or memory (1, in bytes); less than 0 if short."""
        used, leaving, nominated = (column[index] for column in self.other)
        return (self.cpu, self.memory)[index] - used - max(leaving, nominated)

    def idle(self, device: int) -> int:
        """Return the micro-GPUs of the device that a task could hold now."""
        if device in self.sharers:
            used, leaving, nominated = self.sharers[device]
            if used + max(leaving, nominated) >= self.max_sharers:
                return 0
        used, leaving, nominated = self.taken[device]
        return GPU - used - max(leaving, nominated)

    def future(self, device: int, fewer: int = 0) -> int:
        """Return the micro-GPUs of the device that a task could hold after leaving and `fewer` other ones have exited.

        What those hold is not included.
        """
        if device in self.sharers:
            used, _, nominated = self.sharers[device]
            if used + nominated - fewer >= self.max_sharers:
                return 0
        used, _, nominated = self.taken[device]
        return GPU - used - nominated
