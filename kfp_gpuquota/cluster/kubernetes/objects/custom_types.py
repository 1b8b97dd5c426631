"""The project's custom resources as structs; a test compares manifests/crds/crds.yaml with them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Condition, Metadata, OwnerReference, Struct


class GpuQuotaSpec(Struct, frozen=True):
    """The specification of a GpuQuota. Values are checked when it is converted to a Project; errors name the field."""

    guaranteed: Any = 0
    limit: Any = None
    priority: Any = None
    over_quota_weight: Any = None
    parent: Any = None
    guaranteed_cpu: Any = None
    limit_cpu: Any = None
    guaranteed_memory: Any = None
    limit_memory: Any = None
    pools: Any = None
    default_runtime_seconds: Any = None
    max_runtime_seconds: Any = None
    min_runtime_seconds: Any = None
    reserve_after_seconds: Any = None
    stop_policy: Any = None
    order: Any = None


class PromisedPlacement(Struct, frozen=True):
    """The node and the devices of one worker; `part` is that of a job whose workers differ."""

    node: str
    devices: tuple[int, ...] = ()
    part: str = ""


class Promise(Struct, frozen=True):
    """Placements for which room is made. `job` names the scheduler's job, `at` is in seconds since 1970.

    `victims` are the workers that leave for it.
    """

    job: str
    at: float = 0
    placements: tuple[PromisedPlacement, ...] = ()
    victims: tuple[str, ...] = ()


class OverQuotaUsage(Struct, frozen=True):
    """GPU-seconds above the guarantee in a node pool until `at` (seconds since 1970), each halved by its age.

    `users` are those of the users of a team that is fair to them, by a hash of their names.
    """

    gpu_seconds: float
    at: float
    pool: str = ""
    users: dict[str, float] = msgspec.field(default_factory=dict)


class UnusedWorkload(Struct, frozen=True):
    """A workload whose GPUs are unused `since` then, were last measured at `observedAt`; its owner was warned at
    `warnedAt` by the rule of the `policy`. Times are in seconds since 1970. Everybody reads it, so it has no name.
    """

    uid: str
    since: float
    observed_at: float
    warned_at: float | None = None
    policy: str = ""
    warn_after_seconds: float | None = None
    preempt_after_seconds: float | None = None
    suspend_after_seconds: float | None = None


class GpuQuotaStatus(Struct, frozen=True):
    """The status of a GpuQuota: GPUs that the team holds, borrows and requests, and what its jobs are promised.

    `usage` is what it has borrowed, if that counts, `unused` what is counted of workloads whose GPUs are unused.
    """

    gpus: float = 0
    borrowed: float = 0
    requested: float = 0
    waiting: int = 0
    conditions: tuple[Condition, ...] = ()
    promises: tuple[Promise, ...] = ()
    usage: tuple[OverQuotaUsage, ...] = ()
    unused: tuple[UnusedWorkload, ...] = ()


class GpuQuota(Struct, frozen=True):
    """A GpuQuota: the quota of the namespace of the same name, or of a department."""

    metadata: Metadata
    spec: GpuQuotaSpec = GpuQuotaSpec()
    status: GpuQuotaStatus = GpuQuotaStatus()


class Checkpoint(Struct, frozen=True):
    """A PersistentVolumeClaim for checkpoints."""

    claim_name: str


class JobLease(Struct, frozen=True):
    """A lease on the job: it is cancelled when its client does not renew the lease, or sets 0 s for a `reason`."""

    holder: str = ""
    duration_seconds: float = 0
    renew_time: datetime | None = None
    reason: str = ""


class AwaitedJob(Struct, frozen=True):
    """A job whose end is waited for, as it was found under its name; `met`: it has ended as it should."""

    name: str
    uid: str
    met: bool = False


class ElasticJobSpec(Struct, frozen=True):
    """The specification of an ElasticJob; the pod template is kept as raw JSON."""

    template: msgspec.Raw = msgspec.Raw(b"{}")
    kind: str = "train"
    gpus: int | None = None
    min_gpus: int | None = None
    max_gpus: int | None = None
    gpus_per_worker: int | None = None
    gpu_fraction: Any = None
    gpu_fraction_limit: Any = None
    gpu_memory: Any = None
    gpu_memory_limit: Any = None
    gpu_compute: Any = None
    gpu_devices: int | None = None
    priority: int | None = None
    preemptible: bool | None = None
    suspend: bool = False
    max_runtime_seconds: float | None = None
    begin: Any = None
    after: Any = None
    array: Any = None
    workers_ready_timeout_seconds: float | None = None
    grace_period_seconds: float | None = None
    max_restarts: int | None = None
    restart_window_seconds: float | None = None
    cool_down_seconds: float | None = None
    min_run_time_seconds: float | None = None
    gpu_types: tuple[str, ...] | None = None
    node_pool: str | None = None
    required_topology: str | None = None
    preferred_topology: str | None = None
    segment: int | None = None
    segment_topology: str | None = None
    spread: bool | None = None
    ttl_seconds_after_finished: float | None = None
    checkpoint: Checkpoint | None = None
    lease: JobLease | None = None


class JobOccurrence(Struct, frozen=True):
    """When something last happened to the job, and why."""

    time: datetime
    reason: str = ""
    message: str = ""


class StartRange(Struct, frozen=True):
    """The times between which a waiting job is expected to start, four times out of five."""

    earliest: datetime
    latest: datetime


class TrainingSize(Struct, frozen=True):
    """What a training last reported with this number of workers."""

    workers: int
    throughput: float
    batch_size: int | None = None


class TrainingProgress(Struct, frozen=True):
    """The progress that the training last reported. `notFinite` has the metrics that are "nan", "inf" or "-inf"."""

    step: int = 0
    total_steps: int | None = None
    epoch: int = 0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    step_ms: float | None = None
    stragglers: dict[str, float] = msgspec.field(default_factory=dict)
    not_finite: dict[str, str] = msgspec.field(default_factory=dict)
    noise_scale: float | None = None
    sizes: tuple[TrainingSize, ...] = ()


class SizeChange(Struct, frozen=True):
    """One change of a running job's size: training paused for `pauseMs` at `step`."""

    time: datetime
    from_gpus: int
    to_gpus: int
    generation: int = 0
    step: int = 0
    reason: str = ""
    message: str = ""
    pause_ms: float | None = None
    lost_steps: int = 0


class NotReadyWorker(Struct, frozen=True):
    """A worker that does not start, as the kubelet or kube-scheduler has reported since `since`."""

    index: int
    since: datetime
    message: str = ""


class RetryState(Struct, frozen=True):
    """GPUs were released `count` times in a row because workers did not start; they are requested again at `retryAt`.

    It refers to all workers of the `attempt`, or to the `workers` with these indices. Without `retryAt` there is no
    further attempt.
    """

    count: int
    time: datetime
    retry_at: datetime | None = None
    message: str = ""
    attempt: int = 0
    workers: tuple[int, ...] = ()


class ElasticJobStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The status of an ElasticJob; it is written as a whole, so defaults are included."""

    phase: str = "Pending"
    gpus: float = 0
    workers: int = 0
    generation: int = 0
    message: str = ""
    reason: str = ""
    conditions: tuple[Condition, ...] = ()
    page: str | None = None
    observed_generation: int = 0
    eligible_time: datetime | None = None
    awaited: tuple[AwaitedJob, ...] = ()
    start_time: datetime | None = None
    completion_time: datetime | None = None
    exit_code: int | None = None
    result_worker: str | None = None
    restarts: int = 0
    last_restart_time: datetime | None = None
    completing: bool = False
    evictions: int = 0
    last_eviction: JobOccurrence | None = None
    last_failure: JobOccurrence | None = None
    moves: int = 0
    last_move: JobOccurrence | None = None
    growth_failed: str | None = None
    expected_start: StartRange | None = None
    progress: TrainingProgress | None = None
    attempt: int = 0
    next_index: int = 0
    generation_reserved: int = 0
    membership_digest: str = ""
    membership_shard: int = -1
    network_policy: str | None = None
    intent: str = "run"
    ended: tuple[int, ...] = ()
    default_runtime_seconds: float | None = None
    ran_seconds: float = 0.0
    training_gpus: int = 0
    ranks: tuple[int, ...] = ()
    counted_resources: dict[str, int] | None = None
    resizes: tuple[SizeChange, ...] = ()
    spent_seconds: dict[str, float] = msgspec.field(default_factory=dict)
    counted_until: datetime | None = None
    not_ready: tuple[NotReadyWorker, ...] = ()
    requeue_state: RetryState | None = None
    grow_state: RetryState | None = None


class ElasticJob(Struct, frozen=True):
    """An ElasticJob: a training or a session with one or more workers; its namespace is the project."""

    metadata: Metadata
    spec: ElasticJobSpec = ElasticJobSpec()
    status: ElasticJobStatus = ElasticJobStatus()

    @property
    def owning_job(self) -> OwnerReference | None:
        """Return the Job (batch/v1) that it runs for, which has its name; None for any other."""
        for one in self.metadata.owner_references:
            if one.controller and (one.api_version, one.kind, one.name) == ("batch/v1", "Job", self.metadata.name):
                return one
        return None


class AutoscaledSpec(Struct, frozen=True):
    """The limit and the node shape of an autoscaled pool."""

    max_gpus: int = 0
    gpus_per_node: int = 1
    labels: dict[str, str] | None = None


class PolicyPool(Struct, frozen=True):
    """The rules of one node pool."""

    autoscaled: AutoscaledSpec | None = None


class GpuResource(Struct, frozen=True):
    """An extended resource of which each one counts as a number of GPUs.

    Defaults are those of `known_gpus.py`. `type_label` is the label of nodes that has the type of these GPUs.
    `counts_by` is the counter or capacity by which devices of a DeviceClass are parts of a GPU.
    """

    name: str
    counts_as: float | None = None
    counts_by: str | None = None
    type_label: str | None = None


class GpuUse(Struct, frozen=True):
    """The Service of dcgm-exporter, as NAMESPACE/NAME, and how often it is asked whether GPUs are used."""

    exporter: str = ""
    interval_seconds: float = 30.0


class DefragmentationSpec(Struct, frozen=True):
    """The window in which jobs are moved to gather free GPUs, and what the moves may cost."""

    window: str = ""
    time_zone: str = "UTC"
    budget_gpu_minutes: float = 600.0
    max_gpu_minutes_per_gpu: float = 15.0
    min_age_seconds: float = 1800.0


class ReservedMoves(Struct, frozen=True):
    """What moves that gather free GPUs may lose in the window that is open `at` this time: stored before they begin."""

    at: float = 0.0
    gpu_seconds: float = 0.0


class QuotaPolicyStatus(Struct, frozen=True):
    """The status of a QuotaPolicy."""

    defragmentation: ReservedMoves = ReservedMoves()


class QuotaPolicySpec(Struct, frozen=True):
    """The specification of a QuotaPolicy. Values are checked when it is converted to ClusterRules (quota_policy.py)."""

    reclaim: dict[str, Any] | None = None
    unmanaged: str = "ignore"
    default_quota: dict[str, Any] | None = None
    exempt_namespaces: tuple[str, ...] | None = None
    other_resources: tuple[str, ...] | None = None
    gpu_resources: tuple[GpuResource, ...] | None = None
    recreating_owners: tuple[str, ...] | None = None
    pools: dict[str, PolicyPool] | None = None
    isolate_workers: bool = True
    max_waiting_pods: int = 5000
    limit_grace_seconds: float = 600.0
    sharing: dict[str, Any] | None = None
    moves: bool = True
    defragmentation: DefragmentationSpec | None = None
    reserve_after_seconds: float = 1800.0
    usage_half_life_seconds: float | None = None
    user_label: str = labels.USER
    gpu_use: GpuUse | None = None


class QuotaPolicyObject(Struct, frozen=True):
    """A QuotaPolicy: the rules of the cluster."""

    metadata: Metadata
    spec: QuotaPolicySpec = QuotaPolicySpec()
    status: QuotaPolicyStatus = QuotaPolicyStatus()


class PolicySpec(Struct, frozen=True):
    """The project and kind that a WorkloadPolicy applies to, and its rules: {default, most, forced}.

    `idle` has the times after which owners of unused GPUs are warned, and their workloads suspended.
    """

    project: str | None = None
    kind: str | None = None
    gpu_fraction_limit: dict[str, Any] | None = None
    gpu_memory_limit: dict[str, Any] | None = None
    idle: dict[str, Any] | None = None


class PolicyObject(Struct, frozen=True):
    """A WorkloadPolicy: limits and defaults for shared GPUs, and what follows if GPUs are unused."""

    metadata: Metadata
    spec: PolicySpec = PolicySpec()
