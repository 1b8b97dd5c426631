"""What is tracked of a pod: a `PodView` holds what decisions need, as long as the pod exists.

Invariant: the view is a function of the object alone, and what a pod requests is the same at every stage of its life:
a controller that starts later sees what one that admitted the pod saw.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from kfp_gpuquota.api import Kind
from kfp_gpuquota.api.affinity import NodeTerm
from kfp_gpuquota.api.resources import Resources as Amounts
from kfp_gpuquota.cluster.kubernetes.convert.node_constraints import NodeConstraints
from kfp_gpuquota.cluster.kubernetes.convert.owners import Owner, Rest
from kfp_gpuquota.cluster.kubernetes.convert.pod_placement import GateShape
from kfp_gpuquota.cluster.kubernetes.convert.pod_repulsion import Repulsion
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import ResourceRequests
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Subject


class Stage(IntEnum):
    """The stage of a pod's life with regard to GPUs."""

    OUTSIDE = 0  # requests no GPU, or has neither the quota's scheduling gate nor a node
    WAITING = 1  # has the quota's scheduling gate
    ASSIGNED = 2  # has a node, or was admitted to one
    TERMINATING = 3  # is being deleted, and still holds its devices
    ENDED = 4  # has succeeded or failed


class DeviceClaim(NamedTuple):
    """A claim of a pod for devices (DRA): by name, by the template that one is made of, or by both when it exists."""

    claim: str
    template: str


class PodView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The tracked state of a pod. Times are in seconds since 1970."""

    uid: str
    namespace: str
    name: str
    stage: Stage
    created: float
    labels: dict[str, str] = {}  # by which another pod's anti-affinity keeps it away
    problem: str = ""  # why it cannot be planned; then it is counted by `requested`

    # What it requests
    gpus: int  # devices; with a `share` it holds a part of each
    requested: int = 0  # devices that its containers request: the most it can hold, whatever its annotations claim
    share: tuple[tuple[str, Any], ...] = ()  # of each device, as fields of a JobSpec
    needs: ResourceRequests = ResourceRequests()  # CPU, memory and other resources
    gpu_weights: Amounts = ()  # those of its `needs` that count as GPUs, as annotated when it was created
    device_claims: tuple[DeviceClaim, ...] = ()  # whose devices device_claims.py adds to its `needs`
    claimed: tuple[str, ...] | None = None  # DeviceClasses of these, of a released pod as annotated then
    kind: Kind = Kind.TRAIN
    priority: int | None = None
    preemptible: bool | None = None
    grace_s: int = 30  # its grace period

    # Where it may run, and where it is
    pool: str = ""  # the requested node pool
    constraints: NodeConstraints = NodeConstraints()
    claims: tuple[str, ...] = ()  # PersistentVolumeClaims of its volumes
    volume_terms: tuple[NodeTerm, ...] = ()  # the nodes on which its volumes can be mounted
    excluded_nodes: tuple[str, ...] = ()  # on which another pod of its owner did not fit
    repels: tuple[Repulsion, ...] = ()  # the pods that its anti-affinity keeps away
    unmodelled: tuple[str, ...] = ()  # its constraints that only kube-scheduler checks
    gate: GateShape | None = None
    other_gate: str = ""  # a scheduling gate of another controller
    scheduler: str = ""  # another scheduler that must bind it
    node: str = ""
    bound: bool = False
    devices: tuple[int, ...] | None = None
    reserved_on: str = ""  # where it holds devices until it is bound, if it was released without a pin (unpinned.py)
    stand_in: str = ""  # the stand-in of an autoscaled pool whose devices it holds (autoscaled_pools.py)

    # Its owner, and the pods that start with it
    controller_uid: str = ""  # of its managing owner
    controller_kind: str = ""  # that owner's API group and kind: whether it creates another pod (quota_policy.py)
    owner: Owner | None = None  # determines its gang size
    group: str = ""
    group_size: int = 0
    rest: tuple[Rest, ...] = ()  # of its gang, pods that do not exist yet
    ray_group: str = ""  # of its Ray cluster
    job_uid: str = ""  # of its ElasticJob, as which worker
    index: int = 0
    attempt: int = 0

    # What became of it
    running: bool = False
    started: float = 0.0  # when its kubelet took it; 0 if none has
    prepared: bool = False  # its volumes and network are ready: only image pulls and init containers remain
    start_failure: str = ""
    rejected: str = ""  # why its kubelet did not take it
    lost: str = ""  # why its node or the cluster ended it
    error: str = ""  # what ended a worker's script
    exit_code: int | None = None
    ended_at: float | None = None  # when its first container ended, by its kubelet's clock
    ends_at: float = 0.0  # when the grace period of its deletion ends; 0 if it is not deleted
    reclaimed_at: float = 0.0  # when an earlier controller began to reclaim its GPUs; 0 if none did
    unhealthy_gpu: str = ""  # one of its devices that has failed, as its kubelet reports

    @property
    def subject(self) -> Subject:
        """Return the pod as the object that an event refers to."""
        return Subject("Pod", self.name, self.namespace, self.uid)

    @property
    def counted(self) -> bool:
        """Return whether the pod requests GPUs, or resources that count as GPUs."""
        return self.gpus > 0 or bool(self.gpu_weights)

    @property
    def holds(self) -> bool:
        """Return whether the pod holds devices."""
        return self.stage in {Stage.ASSIGNED, Stage.TERMINATING}

    @property
    def located(self) -> str:
        """Return the node on which its devices count from now on; "" if they stay where they are."""
        return self.node if self.bound or self.stage is Stage.ASSIGNED else ""

    @property
    def chosen_node(self) -> str:
        """Return the node that the pod is bound or pinned to; "" while kube-scheduler may choose another one."""
        return "" if self.reserved_on and not self.bound else self.node

    @property
    def leaving(self) -> bool:
        """Return whether the pod is being deleted, also where its containers have ended."""
        return self.stage is Stage.TERMINATING or (self.stage is Stage.ENDED and self.ends_at > 0)
