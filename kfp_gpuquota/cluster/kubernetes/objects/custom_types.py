"""Our own kinds as narrow structs, as the API server gives and takes them; their schemas are made from these."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from kfp_gpuquota.cluster.kubernetes.objects.core_types import Condition, Metadata, Struct


class GpuQuotaSpec(Struct, frozen=True):
    """A team's quota. Values are checked when they become a Project, so that one wrong field names itself."""

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


class GpuQuotaStatus(Struct, frozen=True):
    """What the team holds."""

    gpus: float = 0
    borrowed: float = 0
    requested: float = 0
    waiting: int = 0
    conditions: tuple[Condition, ...] = ()


class GpuQuota(Struct, frozen=True):
    """The quota of the namespace of the same name, or of a department."""

    metadata: Metadata
    spec: GpuQuotaSpec = GpuQuotaSpec()
    status: GpuQuotaStatus = GpuQuotaStatus()


class Checkpoint(Struct, frozen=True):
    """A durable place for checkpoints."""

    claim_name: str


class JobLease(Struct, frozen=True):
    """Whoever waits for the job renews this, or it is cancelled."""

    holder: str = ""
    duration_seconds: float = 0
    renew_time: datetime | None = None


class ElasticJobSpec(Struct, frozen=True):
    """What a user asks for; the pod template is kept as it came."""

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
    gpu_devices: int | None = None
    priority: int | None = None
    preemptible: bool | None = None
    suspend: bool = False
    max_runtime_seconds: float | None = None
    workers_ready_timeout_seconds: float | None = None
    grace_period_seconds: float | None = None
    max_restarts: int | None = None
    cool_down_seconds: float | None = None
    min_run_time_seconds: float | None = None
    node_pool: str | None = None
    required_topology: str | None = None
    preferred_topology: str | None = None
    spread: bool | None = None
    ttl_seconds_after_finished: float | None = None
    checkpoint: Checkpoint | None = None
    lease: JobLease | None = None


class LastEviction(Struct, frozen=True):
    """When and why the job was last stopped for others."""

    time: datetime
    reason: str = ""
    message: str = ""


class TrainingProgress(Struct, frozen=True):
    """What the training last said."""

    step: int = 0
    total_steps: int | None = None
    epoch: int = 0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    step_ms: float | None = None
    stragglers: dict[str, float] = msgspec.field(default_factory=dict)


class SizeChange(Struct, frozen=True):
    """One change of a running job's size: `pauseMs` is how long training stood still for it, at `step`."""

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
    """A worker of which the kubelet or kube-scheduler says since then that it does not come up."""

    index: int
    since: datetime
    message: str = ""


class RetryState(Struct, frozen=True):
    """GPUs given back, so many times in a row, since workers did not come up; asked for again at `retryAt`, if at all.

    Those of the whole `attempt`, or of the `workers` of these indices.
    """

    count: int
    time: datetime
    retry_at: datetime | None = None
    message: str = ""
    attempt: int = 0
    workers: tuple[int, ...] = ()


class ElasticJobStatus(msgspec.Struct, frozen=True, rename="camel"):
    """What became of the job; written whole, so defaults are not left out."""

    phase: str = "Pending"
    gpus: float = 0
    workers: int = 0
    generation: int = 0
    message: str = ""
    reason: str = ""
    conditions: tuple[Condition, ...] = ()
    observed_generation: int = 0
    start_time: datetime | None = None
    completion_time: datetime | None = None
    exit_code: int | None = None
    result_worker: str | None = None
    restarts: int = 0
    evictions: int = 0
    last_eviction: LastEviction | None = None
    progress: TrainingProgress | None = None
    attempt: int = 0
    next_index: int = 0
    generation_reserved: int = 0
    membership_digest: str = ""
    membership_shard: int = -1
    intent: str = "run"
    ended: tuple[int, ...] = ()
    ran_seconds: float = 0.0
    training_gpus: int = 0
    ranks: tuple[int, ...] = ()
    resizes: tuple[SizeChange, ...] = ()
    not_ready: tuple[NotReadyWorker, ...] = ()
    requeue_state: RetryState | None = None
    grow_state: RetryState | None = None


class ElasticJob(Struct, frozen=True):
    """One training or session, of one or many workers; the namespace is the project."""

    metadata: Metadata
    spec: ElasticJobSpec = ElasticJobSpec()
    status: ElasticJobStatus = ElasticJobStatus()


class AutoscaledSpec(Struct, frozen=True):
    """How far an autoscaler may grow a pool, and of what shape its nodes are."""

    max_gpus: int = 0
    gpus_per_node: int = 1
    labels: dict[str, str] | None = None


class PolicyPool(Struct, frozen=True):
    """What holds for one node pool."""

    autoscaled: AutoscaledSpec | None = None


class QuotaPolicySpec(Struct, frozen=True):
    """The cluster's rules. Values are checked when they become ClusterRules (quota_policy.py)."""

    reclaim: dict[str, Any] | None = None
    unmanaged: str = "ignore"
    default_quota: dict[str, Any] | None = None
    exempt_namespaces: tuple[str, ...] | None = None
    recreating_owners: tuple[str, ...] | None = None
    pools: dict[str, PolicyPool] | None = None


class QuotaPolicyObject(Struct, frozen=True):
    """A QuotaPolicy."""

    metadata: Metadata
    spec: QuotaPolicySpec = QuotaPolicySpec()


class PolicySpec(Struct, frozen=True):
    """Of whom a policy holds, and its rules: {default, most, forced}, each a number, or a quantity."""

    project: str | None = None
    kind: str | None = None
    gpu_fraction_limit: dict[str, Any] | None = None
    gpu_memory_limit: dict[str, Any] | None = None


class PolicyObject(Struct, frozen=True):
    """A WorkloadPolicy."""

    metadata: Metadata
    spec: PolicySpec = PolicySpec()
