"""The rules of the cluster, from the QuotaPolicy named default; absent fields have defaults. Pure.

| rule | bounds | default |
|---|---|---|
| reclaim.boundSeconds | from the decision to reclaim a borrowed GPU, or the plan in which only minimum run times stand in the way, to the GPU's release | 120 |
| reclaim.maxGracePeriodSeconds | the grace period of an evicted pod | 60 |
| reclaim.maxMinRunTimeSeconds | how long `minRunTimeSeconds` protects borrowed GPUs from being reclaimed | 45 |
| unmanaged | the handling of GPU pods in namespaces without the label gpuquota.dev/managed=true | ignore |
| pools.NAME.autoscaled | the maximum size of an autoscaled pool (autoscaled_pools.py); effective after a restart | |
| gpuUse.exporter, intervalSeconds | the Service of dcgm-exporter, and how often it is asked whether the GPUs of pods are used, for the `idle` rules of WorkloadPolicies | nothing is measured; 30 |
| sharing | the most workers that share a GPU, and the part of its memory that is the driver's | 16, 0.02 |
| moves | jobs within the guarantee make room by moving others | true |
| defragmentation | the window in which jobs are moved to gather free GPUs, and what the moves may cost (move_budget.py) | jobs are moved for waiting ones only |
| reserveAfterSeconds | after how long a job within the guarantee is served first, and what it needs is kept for it | 1800 |
| userLabel | the label of pods and ElasticJobs that names their user, for projects that are fair to users | gpuquota.dev/user |
| usageHalfLifeSeconds | past borrowing reduces a team's part of idle GPUs, and counts half after this time | never counts |
| limitGraceSeconds | after how long a team that holds more than its lowered limit loses the rest | 600 |
| maxWaitingPods | how many waiting pods of one team are considered; more of them wait unseen, the youngest ones | 5000 |
| isolateWorkers | whether each ElasticJob has a NetworkPolicy that admits only its own workers to its workers | true |
| gpuResources | resources besides nvidia.com/gpu that count as GPUs, each with the number of GPUs that one counts as | known_gpus.py |
| otherResources | resources that look like GPUs and are none, and those of DeviceClasses without GPUs | |
| recreatingOwners | added to, or with a leading '-' removed from, the kinds of owners that recreate a deleted pod | |

An invalid policy leaves the previous one in effect. Rejected: flags of the controller, which the API server's own
policies (ValidatingAdmissionPolicy) cannot read.
"""  # noqa: E501 - a table

from __future__ import annotations

import logging
from enum import StrEnum
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api.affinity import check_label_key
from kfp_gpuquota.api.defragmentation import Defragmentation
from kfp_gpuquota.api.node import SharingRules
from kfp_gpuquota.api.request_paths import is_object_name
from kfp_gpuquota.api.resources import WHOLE_GPU, Resources
from kfp_gpuquota.api.share import refuse_small_share
from kfp_gpuquota.api.validation import MAX_COUNT, MAX_RUNTIME_S, MAX_SECONDS, check_range
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write
from kfp_gpuquota.cluster.kubernetes.convert.autoscaled_pools import AutoscaledPool
from kfp_gpuquota.cluster.kubernetes.convert.known_gpus import counts_as, divided_of
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import MAX_WEIGHT
from kfp_gpuquota.cluster.kubernetes.objects import labels, paths
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ReservedMoves
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.scheduler import RESERVE_AFTER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import (
        DefragmentationSpec,
        GpuResource,
        GpuUse,
        PolicyPool,
        QuotaPolicyObject,
    )

NAME: Final = "default"
EXEMPT_PREFIXES: Final = ("kube-", "gpuquota-")
RECLAIM_SLACK_S: Final = 15.0
"""The part of the reclaim bound for calls to the API server, the kubelet's delay of one second, and a plan."""

MIN_WEIGHT: Final = 0.001
"""The fewest GPUs that one unit of another resource may count as."""

MAX_INTERVAL_S: Final = 300.0
"""Between two looks at the use of GPUs: rules on unused GPUs count minutes."""

MIN_HALF_LIFE_S: Final = 60.0
"""Shares change with time alone: while jobs wait there are plans in each sixteenth of the half-life."""

RECREATING_OWNERS: Final = frozenset(
    {
        "apps/DaemonSet",
        "apps/ReplicaSet",
        "apps/StatefulSet",  # a Notebook's and a LeaderWorkerSet's pods are a StatefulSet's
        "batch/Job",  # a JobSet's and a TrainJob's pods are a Job's
        "core/ReplicationController",
        "kubeflow.org/JAXJob",
        "kubeflow.org/MPIJob",
        "kubeflow.org/MXJob",
        "kubeflow.org/PaddleJob",
        "kubeflow.org/PyTorchJob",
        "kubeflow.org/TFJob",
        "kubeflow.org/XGBoostJob",
        "leaderworkerset.x-k8s.io/LeaderWorkerSet",
        "ray.io/RayCluster",
        f"{labels.GROUP}/ElasticJob",
    }
)
"""Owners (API group/kind) whose controllers recreate a deleted pod."""

_SHARING: Final = {"max_sharers": "maxSharers", "memory_reserve": "memoryReserve", "smallest_share": "smallestShare"}
_DEFRAGMENTATION: Final = {
    "window": "window",
    "time_zone": "timeZone",
    "budget_gpu_minutes": "budgetGpuMinutes",
    "max_gpu_minutes_per_gpu": "maxGpuMinutesPerGpu",
    "min_age_s": "minAgeSeconds",
}

log = logging.getLogger(__name__)


class Unmanaged(StrEnum):
    """The handling of GPU pods in unmanaged namespaces."""

    IGNORE = "ignore"
    DENY = "deny"
    DEFAULT_QUOTA = "default-quota"


class ReclaimRules(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits for reclaiming a borrowed GPU."""

    bound_s: float = 120.0
    max_grace_s: float = 60.0
    max_min_run_time_s: float = 45.0

    def __post_init__(self) -> None:
        check_range("reclaim.boundSeconds", self.bound_s, 1, MAX_SECONDS, "s")
        check_range("reclaim.maxGracePeriodSeconds", self.max_grace_s, 1, MAX_SECONDS, "s")
        check_range("reclaim.maxMinRunTimeSeconds", self.max_min_run_time_s, 0, MAX_SECONDS, "s")
        needed = self.max_grace_s + self.max_min_run_time_s + RECLAIM_SLACK_S
        if needed > self.bound_s:
            raise InvalidFieldError(
                "reclaim.boundSeconds",
                self.bound_s,
                f"maxGracePeriodSeconds, maxMinRunTimeSeconds and {RECLAIM_SLACK_S:g} s for the calls are {needed:g} s",
                hint=f"give at least {needed:g}, or lower one of the others",
            )


class GpuUseRules(msgspec.Struct, frozen=True, kw_only=True):
    """The Service whose endpoints report on each node whether GPUs are used, and how often they are asked."""

    exporter: str
    interval_s: float = 30.0

    def __post_init__(self) -> None:
        parts = self.exporter.split("/")
        if len(parts) != 2 or not all(map(is_object_name, parts)):
            raise InvalidFieldError(
                "gpuUse.exporter",
                self.exporter,
                "it must be the namespace and the name of a Service",
                hint="for example gpu-operator/nvidia-dcgm-exporter",
            )
        check_range("gpuUse.intervalSeconds", self.interval_s, 1, MAX_INTERVAL_S, "s")

    @property
    def namespace(self) -> str:
        """Return the namespace of the Service."""
        return self.exporter.partition("/")[0]

    @property
    def service(self) -> str:
        """Return the name of the Service."""
        return self.exporter.partition("/")[2]

    @property
    def longest_gap_s(self) -> float:
        """Return for how long a workload may not be measured, or no controller lead, without being counted again."""
        return 5 * self.interval_s + 10


class ClusterRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of a cluster."""

    reclaim: ReclaimRules = ReclaimRules()
    unmanaged: Unmanaged = Unmanaged.IGNORE
    default_quota: tuple[tuple[str, Any], ...] = ()
    exempt_namespaces: frozenset[str] = frozenset()
    recreating_owners: frozenset[str] = RECREATING_OWNERS
    pools: tuple[AutoscaledPool, ...] = ()
    isolates_workers: bool = True
    max_waiting_pods: int = 5000
    limit_grace_s: float = 600.0
    sharing: SharingRules = SharingRules()
    moves: bool = True
    defragmentation: Defragmentation | None = None
    reserve_after_s: float = RESERVE_AFTER_S
    usage_half_life_s: float | None = None
    gpu_weights: Resources = ()
    divided: tuple[tuple[str, str], ...] = ()  # resources whose devices may be parts of GPUs, and by which counter
    other_resources: frozenset[str] = frozenset()
    gpu_use: GpuUseRules | None = None
    user_label: str = labels.USER

    def __post_init__(self) -> None:
        check_range("reserveAfterSeconds", self.reserve_after_s, 0, MAX_SECONDS, "s")
        if self.usage_half_life_s is not None:
            check_range("usageHalfLifeSeconds", self.usage_half_life_s, MIN_HALF_LIFE_S, MAX_RUNTIME_S, "s")
        check_label_key("userLabel", self.user_label)
        check_range("limitGraceSeconds", self.limit_grace_s, 0, MAX_SECONDS, "s")
        check_range("maxWaitingPods", self.max_waiting_pods, 1, MAX_COUNT)

    def user_of(self, given: Mapping[str, str]) -> str:
        """Return the user that an object's labels name; "" if they name none."""
        return given.get(self.user_label, "")

    def recreates(self, pod: PodView) -> bool:
        """Return whether the pod's owner recreates a deleted pod."""
        return pod.controller_kind in self.recreating_owners

    def exempts(self, namespace: str) -> bool:
        """Return whether the namespace is exempt from `unmanaged`."""
        return namespace.startswith(EXEMPT_PREFIXES) or namespace in self.exempt_namespaces

    def check_share(self, fraction: float | None, pool: str) -> None:
        """Raise InvalidFieldError for a share that is too small, or in an autoscaled pool."""
        refuse_small_share(fraction, None, self.sharing.smallest_share)
        self.refuse_shares_in(pool)

    def refuse_shares_in(self, pool: str) -> None:
        """Raise InvalidFieldError for an autoscaled pool, whose stand-ins have no shares and no other vendors' GPUs."""
        if any(one.name == pool for one in self.pools):
            raise InvalidFieldError(
                labels.POOL, pool, "it is autoscaled, and gives whole GPUs only", hint="ask for nvidia.com/gpu there"
            )

    def consequence(self, pod: PodView) -> str:
        """Return the consequence of the pod's eviction, as the last part of a message."""
        group, _, kind = pod.controller_kind.partition("/")
        if self.recreates(pod):
            return f"its {kind} creates another pod, which waits for its turn"
        if kind:
            lost = f"its owner, a {kind} of {group}, does not create it again, so the {kind} may fail"
        else:
            lost = "it has no owner that creates it again"
        return (
            f"{lost}; label {labels.PREEMPTIBLE}=false keeps such pods within quota, and from being stopped for others"
        )


DEFAULT_RULES: Final = ClusterRules()


def rules_of(stored: QuotaPolicyObject) -> ClusterRules:
    """Return the rules of the policy. Raises InvalidFieldError for an invalid one."""
    spec = stored.spec
    given = {"bound_s": "boundSeconds", "max_grace_s": "maxGracePeriodSeconds"}
    given["max_min_run_time_s"] = "maxMinRunTimeSeconds"
    reclaim = _renamed(spec.reclaim or {}, given)
    try:
        return ClusterRules(
            reclaim=msgspec.convert(reclaim, ReclaimRules),
            unmanaged=msgspec.convert(spec.unmanaged, Unmanaged),
            default_quota=tuple(sorted((spec.default_quota or {}).items())),
            exempt_namespaces=frozenset(spec.exempt_namespaces or ()),
            recreating_owners=_owners(spec.recreating_owners or ()),
            pools=_pools(spec.pools or {}),
            isolates_workers=spec.isolate_workers,
            max_waiting_pods=spec.max_waiting_pods,
            limit_grace_s=spec.limit_grace_seconds,
            sharing=msgspec.convert(_renamed(spec.sharing or {}, _SHARING), SharingRules),
            moves=spec.moves,
            defragmentation=_defragmentation(spec.defragmentation),
            reserve_after_s=spec.reserve_after_seconds,
            usage_half_life_s=spec.usage_half_life_seconds,
            gpu_weights=gpu_weights_of(spec.gpu_resources or ()),
            divided=divided_of(spec.gpu_resources or ()),
            other_resources=frozenset(spec.other_resources or ()),
            gpu_use=gpu_use_rules(spec.gpu_use),
            user_label=spec.user_label,
        )
    except msgspec.ValidationError as error:
        raise InvalidFieldError("spec", stored.metadata.name, str(error)) from None


def gpu_use_rules(given: GpuUse | None) -> GpuUseRules | None:
    """Return where the use of GPUs is read. Raises InvalidFieldError."""
    return None if given is None else GpuUseRules(exporter=given.exporter, interval_s=given.interval_seconds)


def _defragmentation(given: DefragmentationSpec | None) -> Defragmentation | None:
    """Return when jobs are moved to gather free GPUs. Raises InvalidFieldError, with the names of the object."""
    if given is None:
        return None
    try:
        return Defragmentation(
            window=given.window,
            time_zone=given.time_zone,
            budget_gpu_minutes=given.budget_gpu_minutes,
            max_gpu_minutes_per_gpu=given.max_gpu_minutes_per_gpu,
            min_age_s=given.min_age_seconds,
        )
    except InvalidFieldError as error:
        field = _DEFRAGMENTATION[error.field.partition(".")[2]]
        raise InvalidFieldError(f"defragmentation.{field}", error.value, error.rule) from None


def _renamed(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that are given, by our names instead of the object's."""
    return {name: given[wire] for name, wire in names.items() if wire in given}


def _pools(given: Mapping[str, PolicyPool]) -> tuple[AutoscaledPool, ...]:
    return tuple(
        AutoscaledPool(
            name=name,
            max_gpus=pool.autoscaled.max_gpus,
            gpus_per_node=pool.autoscaled.gpus_per_node,
            labels=tuple(sorted((pool.autoscaled.labels or {}).items())),
        )
        for name, pool in sorted(given.items())
        if pool.autoscaled is not None
    )


def gpu_weights_of(table: Iterable[GpuResource]) -> Resources:
    """Return the millionths of a GPU that one of each resource counts as. Raises InvalidFieldError."""
    weights: dict[str, int] = {}
    for row in table:
        field = f"gpuResources.{row.name}"
        if "/" not in row.name or row.name == labels.GPU_RESOURCE:
            raise InvalidFieldError(
                "gpuResources",
                row.name,
                f"it must be an extended resource other than {labels.GPU_RESOURCE}, which always counts as 1",
            )
        if row.name in weights:
            raise InvalidFieldError("gpuResources", row.name, "it is listed twice")
        number = counts_as(row)
        if not isfinite(number) or not MIN_WEIGHT <= number <= MAX_WEIGHT:
            raise InvalidFieldError(
                field, number, f"countsAs must be a number of GPUs from {MIN_WEIGHT:g} to {MAX_WEIGHT}"
            )
        weights[row.name] = round(number * WHOLE_GPU)
    return tuple(sorted(weights.items()))


def _owners(given: Iterable[str]) -> frozenset[str]:
    owners = set(RECREATING_OWNERS)
    for one in given:
        name = one.removeprefix("-")
        group, slash, kind = name.partition("/")
        if not (group and slash and kind) or "/" in kind:
            raise InvalidFieldError(
                "recreatingOwners",
                one,
                "it must be an API group and a kind",
                hint="for example apps.kruise.io/CloneSet",
            )
        if one.startswith("-"):
            owners.discard(name)
        else:
            owners.add(name)
    return frozenset(owners)


def default_policy() -> Write:
    """Return the request that creates the policy with the schema's defaults, if there is none.

    The API server's admission policies read the object, so it must exist for the defaults to apply.
    """
    body = {"apiVersion": labels.API_VERSION, "kind": "QuotaPolicy", "metadata": {"name": NAME}, "spec": {}}
    return Write(verb="POST", path=paths.QUOTA_POLICIES, about=NAME, body=body)


class CurrentRules:
    """The rules in effect. `changed()` is called when they change."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self._changed, self._uid = changed, ""
        self.written = False
        self.reserved_moves = ReservedMoves()  # as it was when the policy was read first
        self.rules = DEFAULT_RULES

    def put(self, stored: QuotaPolicyObject) -> None:
        """Apply a policy; one with another name is ignored, and the API server refuses it."""
        if stored.metadata.name != NAME:
            return
        if not self.written:
            self.reserved_moves = stored.status.defragmentation
        self._uid, self.written = stored.metadata.uid, True
        try:
            self._replace(rules_of(stored))
        except InvalidFieldError as error:
            log.error("QuotaPolicy %s is invalid; the previous rules stay in effect: %s", NAME, error.message)

    def drop(self, uid: str) -> None:
        """Apply the defaults after the policy was deleted."""
        if uid == self._uid:
            self._uid = ""
            self._replace(DEFAULT_RULES)

    def _replace(self, rules: ClusterRules) -> None:
        if rules != self.rules:
            self.rules = rules
            log.info("the cluster's rules are now: %s", rules)
            self._changed()
