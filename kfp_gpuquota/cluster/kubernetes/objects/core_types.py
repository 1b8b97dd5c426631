"""Kubernetes objects as narrow structs: only what is read, so that a pod costs microseconds and little memory.

Unknown fields are skipped while decoding. What is kept for long is smaller still (see translate.py). Names are those
of the API, in Python's spelling.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class Struct(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, gc=False):
    """Base of all: camelCase on the wire; what is absent has its default."""


class OwnerReference(Struct, frozen=True):
    """Who made an object; `controller` is set for the one that makes it anew."""

    kind: str
    name: str
    uid: str
    api_version: str = ""
    controller: bool = False


class Metadata(Struct, frozen=True):
    """What every object has."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] | None = None
    owner_references: tuple[OwnerReference, ...] = ()


class Condition(Struct, frozen=True):
    """A condition as most kinds have it."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None
    observed_generation: int | None = None


# Nodes


class Taint(Struct, frozen=True):
    """Keeps pods away that do not tolerate it."""

    key: str
    effect: str
    value: str = ""


class NodeSpec(Struct, frozen=True):
    """What admins wish of a node."""

    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class NodeStatus(Struct, frozen=True):
    """What a node has."""

    allocatable: dict[str, str] = {}
    conditions: tuple[Condition, ...] = ()


class Node(Struct, frozen=True):
    """A machine."""

    metadata: Metadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


# Pods


class Named(Struct, frozen=True):
    """Something with a name, such as a scheduling gate."""

    name: str


class Resources(Struct, frozen=True):
    """Quantities by resource: text in what the API server gives, numbers too in a template that somebody wrote."""

    requests: dict[str, Any] = {}
    limits: dict[str, Any] = {}


class Container(Struct, frozen=True):
    """One container of a pod."""

    name: str = ""
    resources: Resources = Resources()
    restart_policy: str = ""


class NodeMatch(Struct, frozen=True):
    """One requirement on a node's labels or fields."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] = ()


class NodeSelectorTerm(Struct, frozen=True):
    """One alternative of where a pod may run."""

    match_fields: tuple[NodeMatch, ...] = ()
    match_expressions: tuple[NodeMatch, ...] = ()


class NodeSelector(Struct, frozen=True):
    """Alternatives of where a pod may run."""

    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()


class NodeAffinity(Struct, frozen=True):
    """Where a pod must run; what it prefers is left to kube-scheduler."""

    required: NodeSelector | None = msgspec.field(default=None, name="requiredDuringSchedulingIgnoredDuringExecution")


class NodeAffinityOfVolume(Struct, frozen=True):
    """Where a volume can be mounted."""

    required: NodeSelector | None = None


class Affinity(Struct, frozen=True):
    """Where a pod must run."""

    node_affinity: NodeAffinity | None = None


class Toleration(Struct, frozen=True):
    """A taint that a pod puts up with."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""
    toleration_seconds: int | None = None


class ClaimSource(Struct, frozen=True):
    """A volume by its claim."""

    claim_name: str = ""


class PodVolume(Struct, frozen=True):
    """One volume of a pod; only claims are read."""

    persistent_volume_claim: ClaimSource | None = None


class PodSpec(Struct, frozen=True):
    """What a pod asks for."""

    node_name: str = ""
    scheduling_gates: tuple[Named, ...] = ()
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    affinity: Affinity | None = None
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    termination_grace_period_seconds: float = 30.0
    overhead: dict[str, Any] = {}
    volumes: tuple[PodVolume, ...] = ()
    resources: Resources = Resources()


class Terminated(Struct, frozen=True):
    """How a container ended."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""


class Waiting(Struct, frozen=True):
    """Why a container has not started."""

    reason: str = ""
    message: str = ""


class ContainerState(Struct, frozen=True):
    """One of the two, or neither where it runs."""

    terminated: Terminated | None = None
    waiting: Waiting | None = None


class ContainerStatus(Struct, frozen=True):
    """What became of a container."""

    name: str = ""
    restart_count: int = 0
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()
    container_id: str = msgspec.field(default="", name="containerID")


class PodStatus(Struct, frozen=True):
    """What became of a pod."""

    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(Struct, frozen=True):
    """A pod. `problem`: why only a part of it could be read; never on the wire."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()
    problem: str = ""


class ClaimSpec(Struct, frozen=True):
    """What a claim is bound to; "" while it is not."""

    volume_name: str = ""


class PersistentVolumeClaim(Struct, frozen=True):
    """A claim to a volume."""

    metadata: Metadata
    spec: ClaimSpec = ClaimSpec()


class VolumeSpec(Struct, frozen=True):
    """Where a volume can be mounted."""

    node_affinity: NodeAffinityOfVolume | None = None


class PersistentVolume(Struct, frozen=True):
    """A volume."""

    metadata: Metadata
    spec: VolumeSpec = VolumeSpec()


class Namespace(Struct, frozen=True):
    """A namespace."""

    metadata: Metadata


class LimitItem(Struct, frozen=True):
    """What containers (or pods, or claims) of a namespace get that do not say it themselves."""

    type: str = ""
    default_request: dict[str, Any] = {}


class LimitRangeSpec(Struct, frozen=True):
    """All of one LimitRange's items."""

    limits: tuple[LimitItem, ...] = ()


class LimitRange(Struct, frozen=True):
    """Defaults and bounds of a namespace's containers."""

    metadata: Metadata
    spec: LimitRangeSpec = LimitRangeSpec()


# Others'


class Plugin(Struct, frozen=True):
    """One plugin of a Profile."""

    kind: str = ""
    spec: msgspec.Raw = msgspec.Raw(b"{}")


class ResourceQuotaSpec(Struct, frozen=True):
    """The ResourceQuota that a Profile asks for."""

    hard: dict[str, str] = {}


class ProfileSpec(Struct, frozen=True):
    """What a Profile asks for."""

    plugins: tuple[Plugin, ...] | None = None
    resource_quota_spec: ResourceQuotaSpec | None = None


class Profile(Struct, frozen=True):
    """Kubeflow's team."""

    metadata: Metadata
    spec: ProfileSpec = ProfileSpec()


class LeaseSpec(Struct, frozen=True):
    """Who leads, and until when."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(Struct, frozen=True):
    """A coordination Lease."""

    metadata: Metadata
    spec: LeaseSpec = LeaseSpec()


class ListMetadata(Struct, frozen=True):
    """Where a list stands."""

    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Page(msgspec.Struct, Generic[T], frozen=True):
    """One page of a list."""

    metadata: ListMetadata
    items: list[T] | None = None


class WatchLine(msgspec.Struct, frozen=True):
    """One line of a watch."""

    type: str
    object: msgspec.Raw
