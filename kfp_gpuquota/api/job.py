"""A job: what a user asks for, and what became of it."""

from __future__ import annotations

from enum import StrEnum
from math import ceil, inf
from typing import Annotated, Any, Final

import msgspec

from kfp_gpuquota.api.affinity import (
    GPU_PRODUCT,
    NodeTerm,
    Operator,
    Requirement,
    Toleration,
    check_label_key,
    check_labels,
    within,
)
from kfp_gpuquota.api.quantity import as_number, show_gpus, show_mib
from kfp_gpuquota.api.reason import Reason, ReasonCode
from kfp_gpuquota.api.share import check_share
from kfp_gpuquota.api.start_conditions import ArrayTask, Dependencies, Time, check_start_conditions
from kfp_gpuquota.api.validation import (
    MAX_COUNT,
    MAX_MIB,
    MAX_PRIORITY,
    MAX_RUNTIME_S,
    MAX_SECONDS,
    MIN_CORES,
    Cores,
    Count,
    Fraction,
    Mebibytes,
    Name,
    PositiveCount,
    Priority,
    RunTime,
    Seconds,
    check_count,
    check_environment,
    check_name,
    check_range,
)
from kfp_gpuquota.api.worker import Worker, WorkerPhase
from kfp_gpuquota.errors import InvalidFieldError

DEFAULT_GRACE_PERIOD_S: Final = 30.0
DEFAULT_COOL_DOWN_S: Final = 10.0
DEFAULT_RESTART_WINDOW_S: Final = 6 * 3600.0
DEFAULT_MAX_RESTARTS: Final = 3


class Kind(StrEnum):
    """BUILD is an interactive session: inside quota only, never preempted. TRAIN may borrow and be preempted."""

    TRAIN = "train"
    BUILD = "build"


MAX_TYPES: Final = 16
GpuTypes = Annotated[
    tuple[Annotated[str, msgspec.Meta(extra_json_schema={"minLength": 1, "maxLength": 63})], ...],
    msgspec.Meta(extra_json_schema={"maxItems": MAX_TYPES}),
]
"""The types of GPUs that a job accepts, values of the label GPU_PRODUCT, in the order of preference."""


COMMAND_OF_PODS: Final = ("pod",)  # in the specification of what runs in pods: their own is in their template
USER_LABEL: Final = "gpuquota.dev/user"
"""The label that names the user of a job, unless an administrator names another one."""


class Phase(StrEnum):
    """The phase of a job. The last four are final."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    STOPPING = "Stopping"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"

    @property
    def final(self) -> bool:
        """No event changes it any more."""
        return self is Phase.SUCCEEDED or self is Phase.FAILED or self is Phase.CANCELLED  # a set would hash each


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user's request. GPU counts are of the whole job, in devices.

    A job is elastic where `min_gpus` < `max_gpus`: it starts with as few as `min_gpus` when the rest of `gpus` is
    not free, grows to `max_gpus` with what is idle, and gives back one worker at a time. A worker holds
    `gpus_per_worker` GPUs of one node: by default 1 for an elastic job, all of `gpus` for any other.

    With 0 `gpus` it is one process without a GPU, which waits until its node has the `cpu` that it asks for (1 core by
    default). A job may instead ask for a *share*: one worker that holds `gpu_fraction`, or `gpu_memory_mib`, of each of
    `gpu_devices` GPUs of one node. The request is placed and counted against quota; `gpu_fraction_limit` or
    `gpu_memory_limit_mib` is what it may use of idle memory, and is never counted. The two kinds do not
    mix. `gpus` is then `gpu_devices`, and need not be given. `gpu_compute` is the part of each device's computing
    power, which MPS limits on NVIDIA's; a worker counts as the larger one of its two parts.

    `cpu` (cores) and `memory_mib` (main memory) are per worker, as are `cpu_limit` and `memory_limit_mib`, which the
    kernel enforces (a request that is not given is then the limit), `node_selector` (labels that a node must have),
    `node_affinity` (one of the terms must admit the node) and `tolerations`. All workers run on GPUs of one of the
    `gpu_types`, of the first in that order on which the gang can start. It runs on nodes of `node_pool`, within
    its project's quota there; without one on nodes of no pool. All workers run on nodes with the same
    value of the label `required_topology` (a rack, a zone), and of `preferred_topology` where that is possible. With a
    `segment` each so many workers run on nodes with the same value of `segment_topology`, a narrower label than those:
    its sizes are whole segments. With `spread` they run on as many nodes as possible instead of as few.

    `resource_claim_template` names, on Kubernetes, the ResourceClaimTemplate of which each worker gets a claim, instead
    of `nvidia.com/gpu`: as many devices as `worker_gpus`.

    `runtime_env` is Ray's, on a cluster that runs on Ray: what is set up for its workers before they start.

    It fails when it was restarted `max_restarts` times for ends of its own workers, without `restart_window_s` between
    two of them.

    After it has grown, it is not grown again for `cool_down_s`; shrinking for others is never delayed.
    When all its starts together have run for `max_runtime_s` its workers are asked to leave, and it fails.
    Before it has run for `min_run_time_s` it is not stopped for others; what it holds above its minimum may be taken.

    It is not queued before `begin_at` (seconds since the epoch), nor before the jobs `after` of its project have
    succeeded ("prep") or ended in any way ("any:prep"), nor before its turn in its `array`.
    """

    name: Name
    project: Name
    command: Annotated[tuple[str, ...], msgspec.Meta(extra_json_schema={"minItems": 1})]
    gpus: Count = 1
    min_gpus: PositiveCount | None = None
    max_gpus: PositiveCount | None = None
    gpus_per_worker: PositiveCount | None = None
    gpu_fraction: Fraction | None = None
    gpu_fraction_limit: Fraction | None = None
    gpu_memory_mib: Mebibytes | None = None
    gpu_memory_limit_mib: Mebibytes | None = None
    gpu_compute: Fraction | None = None
    gpu_devices: PositiveCount | None = None
    cpu: Cores | None = None
    memory_mib: Mebibytes | None = None
    cpu_limit: Cores | None = None
    memory_limit_mib: Mebibytes | None = None
    kind: Kind = Kind.TRAIN
    priority: Priority | None = None
    preemptible: bool | None = None
    node: Name | None = None
    node_selector: dict[str, str] = {}
    node_affinity: tuple[NodeTerm, ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    gpu_types: GpuTypes = ()
    node_pool: str = ""
    required_topology: str | None = None
    preferred_topology: str | None = None
    segment: PositiveCount | None = None
    segment_topology: str | None = None
    spread: bool = False
    environment: dict[str, str] = {}
    working_directory: str = ""
    grace_period_s: Seconds = DEFAULT_GRACE_PERIOD_S
    max_restarts: Count = DEFAULT_MAX_RESTARTS
    restart_window_s: Seconds = DEFAULT_RESTART_WINDOW_S
    cool_down_s: Seconds = DEFAULT_COOL_DOWN_S
    min_run_time_s: Seconds = 0.0
    max_runtime_s: RunTime | None = None
    begin_at: Time | None = None
    after: Dependencies = ()
    array: ArrayTask | None = None
    labels: dict[str, str] = {}
    runtime_env: dict[str, Any] = {}
    resource_claim_template: str = ""

    def __post_init__(self) -> None:
        check_name("name", self.name)
        check_name("project", self.project)
        self._check_share()
        if self.gpus:
            self._check_sizes()
        else:
            self._check_without_gpus()
        self._check_machine()
        self._check_scheduling()
        check_start_conditions(self)
        self._check_process()

    @property
    def shared(self) -> bool:
        """Whether it requests a part of its devices: others may hold the rest."""
        return self.gpu_fraction is not None or self.gpu_memory_mib is not None

    def share_of(self, device_memory_mib: int) -> float:
        """The part of each device that a worker holds, on devices of that size, in millionths, rounded up.

        The larger one of its memory's part and its computing power's. Above 1 where it cannot fit.
        """
        compute = _millionths(self.gpu_compute or 0.0)
        if self.gpu_memory_mib is not None:
            memory = -(-self.gpu_memory_mib * 10**6 // device_memory_mib) / 10**6 if device_memory_mib else inf
            return max(memory, compute)
        return 1.0 if self.gpu_fraction is None else max(_millionths(self.gpu_fraction), compute)

    @property
    def asks(self) -> str:
        """Its GPU request as a text: "2", "0.25", "4Gi", "8 x 40Gi"."""
        if not self.shared:
            return str(self.gpus)
        one = show_mib(self.gpu_memory_mib) if self.gpu_memory_mib is not None else f"{self.gpu_fraction:g}"
        return one if self.worker_gpus == 1 else f"{self.worker_gpus} x {one}"

    @property
    def elastic(self) -> bool:
        """The job may run at more than one size."""
        return self.smallest < self.largest

    @property
    def smallest(self) -> int:
        """The fewest GPUs it runs with: its gang."""
        return self.gpus if self.min_gpus is None else self.min_gpus

    @property
    def largest(self) -> int:
        """The most GPUs it makes use of."""
        return self.gpus if self.max_gpus is None else self.max_gpus

    @property
    def worker_gpus(self) -> int:
        """Devices held by each worker, each whole or in part."""
        if self.gpus_per_worker is not None:
            return self.gpus_per_worker
        return 1 if self.elastic else self.gpus

    def workers_of(self, gpus: int) -> int:
        """Return how many workers hold this number of GPUs."""
        return gpus // self.worker_gpus if self.worker_gpus else 1

    @property
    def may_be_preempted(self) -> bool:
        """Whether all of its GPUs may be reclaimed for others; else only those above `smallest` may."""
        return self.kind is Kind.TRAIN if self.preemptible is None else self.preemptible

    def protected_of(self, held: float) -> float:
        """Return how many of the GPUs that the job holds nobody may reclaim."""
        if self.may_be_preempted:
            return 0.0
        return min(held, self.smallest) if self.elastic else held

    @property
    def effective_priority(self) -> int:
        """The priority given, or that of its kind: train 50, preemptible build 75, build 100."""
        if self.priority is not None:
            return self.priority
        if self.kind is Kind.TRAIN:
            return 50
        return 75 if self.may_be_preempted else 100

    @property
    def node_terms(self) -> tuple[NodeTerm, ...]:
        """The terms of which one must admit a node: those of its affinity, with its types of GPUs."""
        if not self.gpu_types:
            return self.node_affinity
        return within(self.node_affinity, (NodeTerm((Requirement(GPU_PRODUCT, Operator.IN, self.gpu_types),)),))

    def _check_share(self) -> None:
        check_share(self)
        if self.shared:
            msgspec.structs.force_setattr(self, "gpus", self.gpu_devices or 1)

    def _check_sizes(self) -> None:
        check_count("gpus", self.gpus, 1)
        check_count("min_gpus", self.smallest, 1)
        check_count("max_gpus", self.largest, 1)
        requested = show_gpus(self.gpus)
        if self.smallest > self.gpus:
            raise InvalidFieldError("min_gpus", self.smallest, f"it cannot exceed the requested {requested}")
        if self.largest < self.gpus:
            raise InvalidFieldError(
                "max_gpus", self.largest, f"it cannot be below the requested {show_gpus(self.gpus)}"
            )
        check_count("gpus_per_worker", self.worker_gpus, 1)
        for field, count in (("gpus", self.gpus), ("min_gpus", self.smallest), ("max_gpus", self.largest)):
            if count % self.worker_gpus:
                raise InvalidFieldError(
                    field, count, f"it must be a multiple of gpus_per_worker, which is {self.worker_gpus}"
                )

    def _check_without_gpus(self) -> None:
        for field in ("min_gpus", "max_gpus", "gpus_per_worker"):
            if (value := getattr(self, field)) is not None:
                raise InvalidFieldError(field, value, "the job asks for no GPU: gpus is 0", hint="leave it out")
        if self.cpu is None and self.cpu_limit is None:
            msgspec.structs.force_setattr(self, "cpu", 1.0)

    def _check_machine(self) -> None:
        """Check amounts of CPU and memory; a request that is not given is the limit, as on Kubernetes."""
        for field, limit in (("cpu", "cpu_limit"), ("memory_mib", "memory_limit_mib")):
            for name in (field, limit):
                if (value := getattr(self, name)) is not None and name.startswith("cpu"):
                    check_range(name, value, MIN_CORES, MAX_COUNT, "cores")
                elif value is not None:
                    check_count(name, value, 1, "MiB", MAX_MIB)
            requested, most = getattr(self, field), getattr(self, limit)
            if requested is None:
                msgspec.structs.force_setattr(self, field, most)
            elif most is not None and most < requested:
                raise InvalidFieldError(limit, most, f"it cannot be below {field}, which is {requested:g}")

    def _check_scheduling(self) -> None:
        check_range("priority", self.effective_priority, 0, MAX_PRIORITY)
        check_range("cool_down_s", self.cool_down_s, 0, MAX_SECONDS, "s")
        check_range("min_run_time_s", self.min_run_time_s, 0, MAX_SECONDS, "s")
        if self.max_runtime_s is not None:
            check_range("max_runtime_s", self.max_runtime_s, 1, MAX_RUNTIME_S, "s")
        if self.node is not None:
            check_name("node", self.node)
        if self.node_pool:
            check_name("node_pool", self.node_pool)
        if self.resource_claim_template:
            check_name("resource_claim_template", self.resource_claim_template)
            if self.shared or not self.gpus:
                why = "its workers claim whole devices, and the job asks for a part of one, or for none"
                raise InvalidFieldError("resource_claim_template", self.resource_claim_template, why)
        check_labels("node_selector", self.node_selector)
        self._check_gpu_types()
        for field in ("required_topology", "preferred_topology", "segment_topology"):
            if getattr(self, field) is not None:
                check_label_key(field, getattr(self, field))
        self._check_segment()
        if self.kind is Kind.BUILD and self.elastic:
            raise InvalidFieldError(
                "kind", self.kind.value, "an interactive session has one size", hint="leave out min_gpus and max_gpus"
            )

    def _check_segment(self) -> None:
        """Check that all sizes of the job are whole segments."""
        if self.segment is None or self.segment_topology is None:
            if self.segment is not None:
                rule = "it needs the node label that the workers of a segment share"
                raise InvalidFieldError("segment", self.segment, rule, hint="set segment_topology")
            if self.segment_topology is not None:
                rule = "it needs the number of workers in a segment"
                raise InvalidFieldError("segment_topology", self.segment_topology, rule, hint="set segment")
            return
        check_count("segment", self.segment, 1, "workers")
        if not self.gpus:
            raise InvalidFieldError("segment", self.segment, "the job asks for no GPU: gpus is 0")
        for size in (self.smallest, self.gpus, self.largest):
            if (workers := self.workers_of(size)) % self.segment:
                rule = f"it does not divide the {workers} worker{'s' if workers != 1 else ''} of {show_gpus(size)}"
                whole = show_gpus(self.segment * self.worker_gpus)
                hint = f"give sizes that are multiples of {whole}, or set gpus_per_worker"
                raise InvalidFieldError("segment", self.segment, rule, hint=hint)

    def _check_gpu_types(self) -> None:
        if len(self.gpu_types) > MAX_TYPES:
            raise InvalidFieldError("gpu_types", ",".join(self.gpu_types), f"it has more than {MAX_TYPES} types")
        for number, one in enumerate(self.gpu_types):
            if not one:
                rule = f"a type is the value of the node label {GPU_PRODUCT}"
                raise InvalidFieldError("gpu_types", ",".join(self.gpu_types), rule)
            check_labels("gpu_types", {GPU_PRODUCT: one})
            if one in self.gpu_types[:number]:
                raise InvalidFieldError("gpu_types", ",".join(self.gpu_types), f"it has {one} twice")
        if self.gpu_types and not self.gpus:
            raise InvalidFieldError("gpu_types", ",".join(self.gpu_types), "the job asks for no GPU: gpus is 0")

    def _check_process(self) -> None:
        if not self.command or not self.command[0]:
            raise InvalidFieldError("command", self.command, "it must name a program", hint="add: -- COMMAND ARGS")
        for part in self.command:
            if "\0" in part:
                raise InvalidFieldError("command", part, "an argument cannot hold a NUL character")
        check_environment("environment", self.environment)
        check_range("grace_period_s", self.grace_period_s, 0, MAX_SECONDS, "s")
        check_count("max_restarts", self.max_restarts, unit="")
        check_range("restart_window_s", self.restart_window_s, 0, MAX_SECONDS, "s")


def _millionths(part: float) -> float:
    """Round up to millionths; 0.55 * 10**6 is slightly more than 550000, which must not count as one more."""
    return ceil(round(part * 10**6, 3)) / 10**6


class MeasuredSize(msgspec.Struct, frozen=True, kw_only=True):
    """What a training last reported with this number of workers: samples per second, and samples of a full step."""

    workers: int
    throughput: float
    batch_size: int | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The last report of the training. `step` counts applied global batches.

    `checkpoint_at` is when it last saved one, in seconds since the epoch; `throughput` is in samples per second, over
    all the time since it has had its `workers`; `step_ms` is the recent mean duration of a step. `stragglers` are
    workers that the others wait for: how many times the mean their own part of a step takes. `not_finite` has the
    metrics for which JSON has no number: "nan", "inf" or "-inf". `batch_size` is the samples of a full step at this
    size, and `noise_scale` the gradient noise scale in samples, where the training estimates it. `sizes` are those that
    it has reported a throughput for, the last one last.
    """

    step: int = 0
    total_steps: int | None = None
    epoch: int = 0
    at: float = 0.0
    metrics: dict[str, float] = {}
    checkpoint_at: float | None = None
    throughput: float | None = None
    step_ms: float | None = None
    workers: int | None = None
    stragglers: dict[str, float] = {}
    not_finite: dict[str, str] = {}
    batch_size: int | None = None
    noise_scale: float | None = None
    sizes: tuple[MeasuredSize, ...] = ()

    @property
    def metric_texts(self) -> list[str]:
        """Each metric with its value, such as "loss 0.25"; first those that are not finite."""
        found = [f"{name} {value}" for name, value in self.not_finite.items()]
        return found + [f"{name} {value:.4g}" for name, value in self.metrics.items()]


class Resize(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a running job's size, as it happened; times are seconds since the epoch."""

    at: float
    from_gpus: int
    to_gpus: int
    generation: int
    step: int
    reason: Reason
    pause_ms: float | None = None
    lost_steps: int = 0


class Occurrence(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a job, and why; `at` is in seconds since the epoch."""

    at: float
    reason: Reason


class ExpectedStart(msgspec.Struct, frozen=True, kw_only=True):
    """When a waiting job is expected to start, in seconds since the epoch: between these times, four times out of five.

    It follows from the run times of other jobs, which are estimates too, and holds unless something happens that
    nobody announced: a job of a higher priority, a lost node, a changed quota. `held` is the part of the cluster's
    latest estimates that held; None if there are too few.
    """

    earliest: float
    latest: float
    held: float | None = None


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a job.

    `gpus` is held now, where a share of a device counts as that; `result_worker` is the worker whose outputs are the
    job's. `set_by` has the policy that set a field of its spec: {field: policy}. `last_failure` is when and why it
    last lost a worker; `eligible_at` is when the conditions of its start were met, from when its age counts; None
    without conditions, or before. `moves` counts how often the scheduler moved one of its workers to another place, of
    which `last_move` is the last. `page` is the URL of the job on the cluster's web page; "" where there is none.
    `spent` is how many seconds it did what until `counted_until`, by `Activity`; what it does since then is not in it
    (`time_spent.time_spent` has both).
    """

    phase: Phase = Phase.PENDING
    reason: Reason | None = None
    gpus: int | float = 0
    generation: int = 0
    restarts: int = 0
    evictions: int = 0
    last_eviction: Occurrence | None = None
    last_failure: Occurrence | None = None
    moves: int = 0
    last_move: Occurrence | None = None
    exit_code: int | None = None
    submitted_at: float = 0.0
    eligible_at: float | None = None
    started_at: float | None = None
    finished_at: float | None = None
    result_worker: str | None = None
    progress: Progress | None = None
    workers: tuple[Worker, ...] = ()
    resizes: tuple[Resize, ...] = ()
    set_by: dict[str, str] = {}
    page: str = ""
    expected_start: ExpectedStart | None = None
    spent: dict[str, float] = {}
    counted_until: float | None = None

    @property
    def queued_at(self) -> float:
        """Since when its age counts in the queue."""
        return self.submitted_at if self.eligible_at is None else self.eligible_at

    @property
    def gpus_unused(self) -> bool:
        """Whether it is warned, or was suspended, because its GPUs are not used."""
        return self.reason is not None and self.reason.code is ReasonCode.GPUS_UNUSED

    @property
    def leaving_gpus(self) -> int | float:
        """The part of `gpus` whose workers were asked to leave: others may run in their place already."""
        return as_number(sum(worker.gpus for worker in self.workers if worker.phase is WorkerPhase.LEAVING))


class Job(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job with its state. `uid` is unique permanently, a name only among existing jobs.

    `owner` is the user of the machine who submitted it, on a cluster that several share.
    """

    uid: str
    spec: JobSpec
    status: JobStatus
    owner: str = ""
