"""Kubernetes objects as structs with only the fields that are read, so that decoding a pod costs microseconds.

Unknown fields are skipped while decoding. Long-lived data is smaller still (see convert/pods.py). Field names are those
of the API in snake case.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class Struct(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, gc=False):
    """Base class: camelCase in JSON; absent fields have their default."""


class OwnerReference(Struct, frozen=True):
    """An owner of an object; `controller` is true for the managing controller."""

    kind: str
    name: str
    uid: str
    api_version: str = ""
    controller: bool = False


class Metadata(Struct, frozen=True):
    """Metadata of an object."""

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
    """A condition of an object's status."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None
    observed_generation: int | None = None


class Subject(msgspec.Struct, frozen=True):
    """The object that an event refers to (its involvedObject)."""

    kind: str
    name: str
    namespace: str = ""
    uid: str = ""
    api_version: str = "v1"


# Nodes


class Taint(Struct, frozen=True):
    """A node's taint: it repels pods that do not tolerate it."""

    key: str
    effect: str
    value: str = ""


class NodeSpec(Struct, frozen=True):
    """The specification of a node."""

    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class NodeStatus(Struct, frozen=True):
    """The status of a node."""

    allocatable: dict[str, str] = {}
    conditions: tuple[Condition, ...] = ()


class Node(Struct, frozen=True):
    """A node."""

    metadata: Metadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


# Pods


class Named(Struct, frozen=True):
    """An object with only a name, such as a scheduling gate."""

    name: str


class Resources(Struct, frozen=True):
    """Quantities by resource: strings in the API server's objects; a user's template may also have numbers."""

    requests: dict[str, Any] = {}
    limits: dict[str, Any] = {}


class ContainerPort(Struct, frozen=True):
    """A port of a container; `host_port` is 0 if it takes none of its node."""

    host_port: int = 0
    protocol: str = "TCP"
    host_ip: str = msgspec.field(default="", name="hostIP")


class Container(Struct, frozen=True):
    """One container of a pod."""

    name: str = ""
    resources: Resources = Resources()
    restart_policy: str = ""
    ports: tuple[ContainerPort, ...] = ()


class Present(Struct, frozen=True):
    """An object of which only the presence matters."""


class NodeMatch(Struct, frozen=True):
    """One requirement on a node's labels or fields."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] = ()


class NodeSelectorTerm(Struct, frozen=True):
    """A node selector term; terms are alternatives."""

    match_fields: tuple[NodeMatch, ...] = ()
    match_expressions: tuple[NodeMatch, ...] = ()


class NodeSelector(Struct, frozen=True):
    """Node selector terms, of which a node must satisfy one."""

    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()


class NodeAffinity(Struct, frozen=True):
    """A pod's required node affinity. Preferences are left to kube-scheduler: only whether there are any is read."""

    required: NodeSelector | None = msgspec.field(default=None, name="requiredDuringSchedulingIgnoredDuringExecution")
    preferred: tuple[Present, ...] = msgspec.field(default=(), name="preferredDuringSchedulingIgnoredDuringExecution")


class NodeAffinityOfVolume(Struct, frozen=True):
    """The nodes on which a volume can be mounted."""

    required: NodeSelector | None = None


class LabelRequirement(Struct, frozen=True):
    """One requirement on an object's labels."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] = ()


class LabelSelector(Struct, frozen=True):
    """Labels that an object must have; an empty one selects every object."""

    match_labels: dict[str, str] = {}
    match_expressions: tuple[LabelRequirement, ...] = ()


class PodAffinityTerm(Struct, frozen=True):
    """Pods near which, or apart from which, a pod must run."""

    label_selector: LabelSelector | None = None
    namespaces: tuple[str, ...] = ()
    namespace_selector: LabelSelector | None = None


class PodAffinity(Struct, frozen=True):
    """A pod's required affinity or anti-affinity to other pods; preferences exclude no node."""

    required: tuple[PodAffinityTerm, ...] = msgspec.field(
        default=(), name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class Affinity(Struct, frozen=True):
    """A pod's affinity."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class SpreadConstraint(Struct, frozen=True):
    """A topology spread constraint of a pod."""

    when_unsatisfiable: str = ""


class Toleration(Struct, frozen=True):
    """A pod's toleration of a taint."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""


class ClaimSource(Struct, frozen=True):
    """The source of a volume: a PersistentVolumeClaim."""

    claim_name: str = ""


class PodVolume(Struct, frozen=True):
    """A volume of a pod: a claim, or a kind of which kube-scheduler checks more than the plan models."""

    persistent_volume_claim: ClaimSource | None = None
    ephemeral: Present | None = None
    gce_persistent_disk: Present | None = None
    aws_elastic_block_store: Present | None = None
    azure_disk: Present | None = None
    iscsi: Present | None = None
    rbd: Present | None = None


class SchedulingGroup(Struct, frozen=True):
    """The PodGroup of Kubernetes' own with which a pod is scheduled."""

    pod_group_name: str = ""


class PodClaim(Struct, frozen=True):
    """A reference of a pod to a ResourceClaim, or to the template of one that is made for it."""

    name: str = ""
    resource_claim_name: str = ""
    resource_claim_template_name: str = ""


class PodSpec(Struct, frozen=True):
    """The specification of a pod."""

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
    topology_spread_constraints: tuple[SpreadConstraint, ...] = ()
    resource_claims: tuple[PodClaim, ...] = ()
    scheduler_name: str = ""
    scheduling_group: SchedulingGroup | None = None


class Terminated(Struct, frozen=True):
    """The state of a terminated container."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""
    finished_at: datetime | None = None


class Waiting(Struct, frozen=True):
    """The state of a waiting container."""

    reason: str = ""
    message: str = ""


class ContainerState(Struct, frozen=True):
    """The state of a container; both fields are None while it runs."""

    terminated: Terminated | None = None
    waiting: Waiting | None = None


class ResourceHealth(Struct, frozen=True):
    """The health of one device of a container: Healthy, Unhealthy or Unknown."""

    resource_id: str = msgspec.field(default="", name="resourceID")
    health: str = ""


class ResourceStatus(Struct, frozen=True):
    """The devices of one resource that a container has, as the kubelet reports them."""

    name: str = ""
    resources: tuple[ResourceHealth, ...] = ()


class ContainerStatus(Struct, frozen=True):
    """The status of a container."""

    name: str = ""
    state: ContainerState = ContainerState()
    container_id: str = msgspec.field(default="", name="containerID")
    allocated_resources_status: tuple[ResourceStatus, ...] = ()


class PodStatus(Struct, frozen=True):
    """The status of a pod."""

    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    start_time: datetime | None = None
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    resource_claim_statuses: tuple[PodClaim, ...] = ()  # with the names of the claims that were made for it


class Pod(Struct, frozen=True):
    """A pod. `problem` states why only a part of it could be decoded; it is never in JSON."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()
    problem: str = ""


class ClaimSpec(Struct, frozen=True):
    """The specification of a claim; `volume_name` is "" until it is bound."""

    volume_name: str = ""
    access_modes: tuple[str, ...] = ()


class PersistentVolumeClaim(Struct, frozen=True):
    """A PersistentVolumeClaim."""

    metadata: Metadata
    spec: ClaimSpec = ClaimSpec()


class VolumeSpec(Struct, frozen=True):
    """The specification of a PersistentVolume."""

    node_affinity: NodeAffinityOfVolume | None = None
    csi: Present | None = None


class PersistentVolume(Struct, frozen=True):
    """A PersistentVolume."""

    metadata: Metadata
    spec: VolumeSpec = VolumeSpec()


class Namespace(Struct, frozen=True):
    """A namespace."""

    metadata: Metadata


class LimitItem(Struct, frozen=True):
    """Default requests of a namespace's containers (or pods, or claims)."""

    type: str = ""
    default_request: dict[str, Any] = {}


class LimitRangeSpec(Struct, frozen=True):
    """The items of a LimitRange."""

    limits: tuple[LimitItem, ...] = ()


class LimitRange(Struct, frozen=True):
    """A LimitRange: defaults and bounds for a namespace's containers."""

    metadata: Metadata
    spec: LimitRangeSpec = LimitRangeSpec()


# Kinds of other projects


class Plugin(Struct, frozen=True):
    """A plugin of a Profile."""

    kind: str = ""
    spec: msgspec.Raw = msgspec.Raw(b"{}")


class ResourceQuotaSpec(Struct, frozen=True):
    """The ResourceQuota that a Profile requests."""

    hard: dict[str, str] = {}


class ProfileSpec(Struct, frozen=True):
    """The specification of a Profile."""

    plugins: tuple[Plugin, ...] | None = None
    resource_quota_spec: ResourceQuotaSpec | None = None


class Profile(Struct, frozen=True):
    """A Kubeflow Profile: a team and its namespace."""

    metadata: Metadata
    spec: ProfileSpec = ProfileSpec()


class Notebook(Struct, frozen=True):
    """A Kubeflow Notebook, of which the annotations are read."""

    metadata: Metadata


class LeaseSpec(Struct, frozen=True):
    """The specification of a Lease: its holder and duration."""

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
    """Metadata of a list."""

    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Page(msgspec.Struct, Generic[T], frozen=True):
    """One page of a list."""

    metadata: ListMetadata
    items: list[T] | None = None


class WatchLine(msgspec.Struct, frozen=True):
    """One event of a watch."""

    type: str
    object: msgspec.Raw
