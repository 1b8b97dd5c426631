"""From Kubernetes' objects to the vocabulary, and nothing else: pure.

A pod becomes a `PodView`, which holds what decisions need and is kept for as long as the pod exists; the object itself
is dropped at once.
"""

from __future__ import annotations

import logging
import re
from copy import copy
from enum import IntEnum
from functools import lru_cache
from sys import intern
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api import JobSpec, Kind
from kfp_gpuquota.api.annotations import asks_for_share, share_of_pod
from kfp_gpuquota.api.quantity import parse_mib
from kfp_gpuquota.api.validation import MAX_PRIORITY
from kfp_gpuquota.cluster.kubernetes.convert.limit_ranges import completed
from kfp_gpuquota.cluster.kubernetes.convert.node_constraints import Place, place_of
from kfp_gpuquota.cluster.kubernetes.convert.owners import Owner, owner_kind, owner_of
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import (
    MAX_DEVICES,
    Needs,
    bounded_number,
    gpus_of,
    needs_of,
)
from kfp_gpuquota.cluster.kubernetes.convert.stand_in_names import pool_of
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Container, Metadata, Pod, PodSpec, PodStatus, Resources
from kfp_gpuquota.errors import GpuQuotaError, InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.api.affinity import NodeTerm
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import NodeSelectorTerm, OwnerReference
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob

NODE_NAME_FIELD: Final = "metadata.name"
RAY_NODE_TYPE: Final = "ray.io/node-type"
MAX_TIME_S: Final = 10**12
MAX_GROUP: Final = 10_000  # pods that start together
_LONGEST_DEVICES: Final = 5 * MAX_DEVICES
KILLED: Final = 137  # 128 + SIGKILL: what a shell says of a process that was killed
log = logging.getLogger(__name__)

_TROUBLE: Final = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "CrashLoopBackOff",
    }
)


class Stage(IntEnum):
    """Where a pod stands, as far as GPUs go."""

    OUTSIDE = 0  # asks for none, or neither waits for us nor has a node
    WAITING = 1  # our gate is on
    HELD = 2  # it has a node, or was sent to one
    LEAVING = 3  # it was told to go, and still holds its devices
    OVER = 4  # it has ended


class GateShape(msgspec.Struct, frozen=True, gc=False):
    """What the patch that takes the gate off must know of the pod: see writes.admission.

    `terms`: for each required node selector term whether it has matchFields already; None where no term is required.
    `affinity`: how much of /spec/affinity exists: 0 none, 1 an affinity, 2 a nodeAffinity. `selects`: there is a
    /spec/nodeSelector.
    """

    index: int
    affinity: int = 0
    terms: tuple[bool, ...] | None = None
    annotated: bool = False
    selects: bool = False


class PodView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is kept of a pod. `job_uid` is its ElasticJob's, `index` and `attempt` are those of a worker.

    `requested` counts the devices that its containers ask the kubelet for, which is what it can really hold, whatever
    its annotations say. `problem`: why it cannot be planned; it is counted by `requested` then.

    `gpus` counts devices; with a `share` (fields of a JobSpec) the pod holds a part of each. `needs` is what it takes
    of its node beside these, `pool` the node pool that it asks for, `owner` who may say how many start together.
    `prepared`: its volumes and its network are there, so what still takes time are images and init containers.
    `maker` is the uid of its controlling owner, `maker_kind` that owner's API group and kind, of which quota_policy.py
    says whether it creates another pod, `avoids` are nodes on which there was no room for another of its pods.
    `grace_s` is its own grace period, `ends_at` when that of its deletion is over, `reclaimed_at` since when an earlier
    controller has reclaimed its GPUs; 0 where it was not deleted, or not reclaimed. `opened` is the stand-in whose
    devices it holds, of an autoscaled pool (autoscaled.py).
    """

    uid: str
    namespace: str
    name: str
    stage: Stage
    gpus: int
    created: float
    node: str = ""
    bound: bool = False
    running: bool = False
    devices: tuple[int, ...] | None = None
    gate: GateShape | None = None
    kind: Kind = Kind.TRAIN
    priority: int | None = None
    preemptible: bool | None = None
    group: str = ""
    group_size: int = 0
    maker: str = ""
    maker_kind: str = ""
    job_uid: str = ""
    index: int = 0
    attempt: int = 0
    exit_code: int | None = None
    trouble: str = ""
    prepared: bool = False
    place: Place = Place()
    share: tuple[tuple[str, Any], ...] = ()
    needs: Needs = Needs()
    pool: str = ""
    owner: Owner | None = None
    avoids: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    requested: int = 0
    problem: str = ""
    grace_s: int = 30
    ends_at: float = 0.0
    reclaimed_at: float = 0.0
    opened: str = ""

    @property
    def holds(self) -> bool:
        """It occupies devices."""
        return self.stage in {Stage.HELD, Stage.LEAVING}


def counted_view(pod: Pod) -> PodView:
    """What is kept of `pod`; never raises.

    Where it cannot be planned (an annotation that cannot be read, values out of range) the view says so in `problem`,
    and counts what the pod holds by its plain GPU request: what holds devices is never left out of the count.
    """
    if pod.problem:
        return _plain_view(pod, pod.problem)
    try:
        view = pod_view(pod)
        if view.gpus and not view.job_uid:
            pod_job(view)  # what the scheduler would be given
    except GpuQuotaError as error:
        return _plain_view(pod, error.message)
    except Exception as error:
        log.exception("pod %s/%s cannot be read", pod.metadata.namespace, pod.metadata.name)
        return _plain_view(pod, f"{type(error).__name__}: {error}")
    return view


def _plain_view(pod: Pod, problem: str) -> PodView:
    """The pod by its node and its plain request. Without a node it waits for nothing: it is not planned."""
    meta, spec = pod.metadata, pod.spec
    requested, owner = gpus_of(spec), elastic_owner(meta)
    noted = (meta.annotations or {}).get(labels.DEVICES, "")  # of a part of a GPU: no container asks for one
    gpus = requested or (min(noted.count(",") + 1, MAX_DEVICES) if noted else 0)
    node = spec.node_name or ("" if _gate(pod) else _sent_to(pod))
    stage = _stage(pod, gpus, node, None)
    return PodView(
        uid=meta.uid,
        namespace=intern(meta.namespace),
        name=meta.name,
        stage=Stage.OUTSIDE if stage is not Stage.OVER and not gpus and owner is None else stage,
        gpus=gpus,
        created=meta.creation_timestamp.timestamp() if meta.creation_timestamp else 0.0,
        node=intern(node),
        bound=bool(spec.node_name),
        running=pod.status.phase == "Running",
        devices=_devices(noted, gpus),
        job_uid=owner.uid if owner is not None else "",
        index=bounded_number(meta.labels.get(labels.WORKER, "")) or 0,
        attempt=bounded_number(meta.labels.get(labels.ATTEMPT, "")) or 0,
        exit_code=_exit_code(pod),
        requested=requested,
        problem=problem[:300],
    )


def elastic_owner(meta: Metadata) -> OwnerReference | None:
    """The ElasticJob of ours that controls the object; other projects have a kind of that name, too."""
    owner = next((o for o in meta.owner_references if o.controller), None)
    if owner is None or owner.kind != "ElasticJob" or owner.api_version.partition("/")[0] != labels.GROUP:
        return None
    return owner


def pod_view(pod: Pod) -> PodView:
    """What is kept of `pod`. Raises InvalidFieldError for annotations that cannot be read."""
    meta, spec = pod.metadata, pod.spec
    gate = _gate(pod)
    opened = "" if gate else _opened_on(meta.annotations or {})
    node = spec.node_name or ("" if gate else _sent_to(pod) or opened)
    share = _share(pod)
    requested = gpus_of(spec)
    gpus = min(dict(share).get("gpu_devices", 1), MAX_DEVICES) if share else requested
    owner = next((o for o in meta.owner_references if o.controller), None)
    elastic = elastic_owner(meta) is not None
    if not gpus and not elastic:
        return _bystander(pod)
    return PodView(
        uid=meta.uid,
        namespace=intern(meta.namespace),
        name=meta.name,
        stage=_stage(pod, gpus, node, gate),
        gpus=gpus,
        created=meta.creation_timestamp.timestamp() if meta.creation_timestamp else 0.0,
        node=intern(node),
        bound=bool(spec.node_name),
        running=pod.status.phase == "Running",
        devices=_devices((meta.annotations or {}).get(labels.DEVICES, ""), gpus),
        gate=gate,
        maker=intern(owner.uid) if owner is not None else "",
        maker_kind=_maker_kind(owner, meta.labels) if owner is not None else "",
        job_uid=owner.uid if owner is not None and elastic else "",
        exit_code=_exit_code(pod),
        trouble=_trouble(pod),
        prepared=any(c.type == "PodReadyToStartContainers" and c.status == "True" for c in pod.status.conditions),
        share=share,
        place=place_of(spec) if gate is not None else Place(),
        claims=claims_of(spec) if gate is not None else (),
        needs=needs_of(spec),
        owner=None if elastic else owner_of(pod),
        requested=requested,
        grace_s=int(spec.termination_grace_period_seconds),
        ends_at=meta.deletion_timestamp.timestamp() if meta.deletion_timestamp else 0.0,
        opened=opened,
        reclaimed_at=_seconds((meta.annotations or {}).get(labels.RECLAIMED_AT, "")),
        **_wishes(meta.labels, meta.annotations or {}),
    )


def _maker_kind(owner: OwnerReference, given: Mapping[str, str]) -> str:
    """Return the owner's group and kind; that of a Ray head is one of its own, since all work is lost with it."""
    head = " head" if given.get(RAY_NODE_TYPE) == "head" else ""
    return intern(owner_kind(owner.api_version, owner.kind) + head)


def _seconds(noted: str) -> float:
    """Return a noted time in seconds since 1970; 0 for what cannot be one."""
    return float(bounded_number(noted, MAX_TIME_S) or 0)


def _bystander(pod: Pod) -> PodView:
    """It asks for no GPU: all that matters is what it takes of its node while it is there."""
    meta = pod.metadata
    there = pod.status.phase not in {"Succeeded", "Failed"}
    return PodView(
        uid=meta.uid,
        namespace=intern(meta.namespace),
        name=meta.name,
        stage=Stage.OUTSIDE,
        gpus=0,
        created=0.0,
        node=intern(pod.spec.node_name) if there else "",
        needs=needs_of(pod.spec),
    )


def _stage(pod: Pod, gpus: int, node: str, gate: GateShape | None) -> Stage:
    if pod.status.phase in {"Succeeded", "Failed"}:
        return Stage.OVER
    leaving = pod.metadata.deletion_timestamp is not None
    if node:
        return Stage.LEAVING if leaving else Stage.HELD
    if leaving:
        return Stage.OVER
    return Stage.WAITING if gate is not None and gpus else Stage.OUTSIDE


def _share(pod: Pod) -> tuple[tuple[str, Any], ...]:
    """The part of devices that its annotations ask for; of an ElasticJob's worker the job says it."""
    annotations = pod.metadata.annotations
    if not annotations or not asks_for_share(annotations):
        return ()
    return tuple(sorted(share_of_pod(annotations, {}).items()))


def _gate(pod: Pod) -> GateShape | None:
    index = next((i for i, gate in enumerate(pod.spec.scheduling_gates) if gate.name == labels.QUOTA_GATE), None)
    if index is None:
        return None
    affinity = pod.spec.affinity
    depth = 0 if affinity is None else 1 if affinity.node_affinity is None else 2
    terms = _terms(pod)
    shape = None if terms is None else tuple(bool(term.match_fields) for term in terms)
    return GateShape(
        index=index,
        affinity=depth,
        terms=shape,
        annotated=pod.metadata.annotations is not None,
        selects=bool(pod.spec.node_selector),
    )


def _terms(pod: Pod) -> tuple[NodeSelectorTerm, ...] | None:
    affinity = pod.spec.affinity
    if affinity is None or affinity.node_affinity is None or affinity.node_affinity.required is None:
        return None
    return affinity.node_affinity.required.node_selector_terms


def _sent_to(pod: Pod) -> str:
    """The one node that the pod was admitted to: it stands in all its terms."""
    terms = _terms(pod)
    if not terms or labels.DEVICES not in (pod.metadata.annotations or {}):
        return ""
    for match in terms[0].match_fields:
        if match.key == NODE_NAME_FIELD and match.operator == "In" and len(match.values) == 1:
            return match.values[0]
    return ""


def _opened_on(annotations: Mapping[str, str]) -> str:
    """Return the stand-in that the pod was opened on; "" for one that was sent to a node."""
    stand_in = annotations.get(labels.OPENED, "")
    return intern(stand_in) if stand_in and labels.DEVICES in annotations and pool_of(stand_in) else ""


def _devices(text: str, gpus: int) -> tuple[int, ...] | None:
    """As our own patch wrote them; None for any other text."""
    if not text or len(text) > _LONGEST_DEVICES:
        return None
    parts = [bounded_number(part, MAX_DEVICES) for part in text.split(",")]
    devices = tuple(part for part in parts if part is not None)
    return devices if len(set(devices)) == len(parts) == gpus else None


def _wishes(given: Mapping[str, str], annotations: Mapping[str, str]) -> dict[str, Any]:
    """What its labels say; a value that cannot be is left out, as admission has refused it already."""
    notebook = labels.NOTEBOOK in given
    kind = given.get(labels.KIND, Kind.BUILD if notebook else Kind.TRAIN)
    priority, preemptible = given.get(labels.PRIORITY, ""), given.get(labels.PREEMPTIBLE, "")
    return {
        "kind": Kind.BUILD if kind == Kind.BUILD else Kind.TRAIN,
        "priority": bounded_number(priority, MAX_PRIORITY),
        "preemptible": {"true": True, "false": False}.get(preemptible),
        "group": given.get(labels.POD_GROUP, ""),
        "group_size": _group_size(annotations.get(labels.POD_GROUP_SIZE, "0")),
        "index": bounded_number(given.get(labels.WORKER, "")) or 0,
        "attempt": bounded_number(given.get(labels.ATTEMPT, "")) or 0,
        "pool": pool if (pool := given.get(labels.POOL, "")) == short_name(pool) else "",
    }


def _group_size(text: str) -> int:
    size = bounded_number(text, MAX_GROUP)
    if size is None:
        raise InvalidFieldError(labels.POD_GROUP_SIZE, text, f"it must be a whole number, at most {MAX_GROUP}")
    return size


def _exit_code(pod: Pod) -> int | None:
    """The first container's, as a shell says it; that of a killed process where others ended the pod."""
    if pod.status.phase not in {"Succeeded", "Failed"}:
        return None
    if any(c.type == "DisruptionTarget" and c.status == "True" for c in pod.status.conditions):
        return KILLED
    ended = next((s.state.terminated for s in pod.status.container_statuses if s.state.terminated), None)
    if ended is None:
        return 0 if pod.status.phase == "Succeeded" else KILLED
    return ended.exit_code


def _trouble(pod: Pod) -> str:
    """Why it does not get going, as kube-scheduler or the kubelet says it; "" where nothing is wrong."""
    for status in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        waiting = status.state.waiting
        if waiting is not None and waiting.reason in _TROUBLE:
            return f"{waiting.reason}: {waiting.message}"[:300]
    if pod.status.phase != "Pending" or pod.spec.node_name:
        return ""
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.reason == "Unschedulable":
            return f"Unschedulable: {condition.message}"[:300]
    return ""


def recovered_pod(raw: msgspec.Raw, problem: str) -> Pod:
    """A pod that cannot be read whole, by the fields that say what it holds; of the others the defaults."""
    given = msgspec.json.decode(raw)
    spec, status = _fields(given, "spec"), _fields(given, "status")
    limits = [_fields(_fields(one, "resources"), "limits") for one in _items(spec, "containers")]
    inits = [_fields(_fields(one, "resources"), "limits") for one in _items(spec, "initContainers")]
    return Pod(
        metadata=msgspec.convert(_fields(given, "metadata"), Metadata),
        spec=PodSpec(
            node_name=str(spec.get("nodeName") or ""),
            containers=tuple(Container(resources=Resources(limits=one)) for one in limits),
            init_containers=tuple(Container(resources=Resources(limits=one)) for one in inits),
        ),
        status=PodStatus(phase=str(status.get("phase") or "")),
        problem=problem,
    )


def _fields(given: object, name: str) -> dict[str, Any]:
    found = given.get(name) if isinstance(given, dict) else None
    return found if isinstance(found, dict) else {}


def _items(given: dict[str, Any], name: str) -> list[Any]:
    found = given.get(name)
    return found if isinstance(found, list) else []


# What the scheduler is told


_NOT_IN_NAMES: Final = re.compile(r"[^a-z0-9-]+")


def short_name(name: str) -> str:
    """The name as the scheduler's messages show it: pods may have longer ones, with dots."""
    return _NOT_IN_NAMES.sub("-", name.lower())[:63].strip("-") or "pod"


def pod_job(view: PodView, pods: int = 1) -> JobSpec:
    """A job of one pod, or of a group of such pods that start together.

    Pods of one template differ in their names only: what they ask for is checked once, which is what it costs most.
    """
    quality = view.kind, view.priority, view.preemptible, view.pool
    place = view.place.avoiding(view.avoids) if view.avoids else view.place
    spec = copy(_unnamed(view.namespace, view.gpus, pods, view.share, view.needs, place, quality))
    msgspec.structs.force_setattr(spec, "name", short_name(view.group.partition("/")[2] or view.group or view.name))
    return spec


@lru_cache(4096)
def _unnamed(
    namespace: str,
    gpus: int,
    pods: int,
    share: tuple[tuple[str, Any], ...],
    needs: Needs,
    place: Place,
    quality: tuple[Kind, int | None, bool | None, str],
) -> JobSpec:
    kind, priority, preemptible, pool = quality
    return JobSpec(
        name="pod",
        project=namespace,
        command=("pod",),
        **(dict(share) if share else {"gpus": gpus * pods, "gpus_per_worker": gpus}),
        kind=kind,
        priority=priority,
        preemptible=preemptible,
        cool_down_s=0.0,
        node_pool=pool,
        **needs.constraints(),
        **place.constraints(),
    )


class _Template(msgspec.Struct, frozen=True):
    spec: PodSpec = PodSpec()


def _template_of(job: ElasticJob) -> PodSpec:
    try:
        return msgspec.json.decode(job.spec.template, type=_Template).spec
    except msgspec.DecodeError as error:
        raise InvalidFieldError("template", "of pods", str(error)) from None


def claims_of(spec: PodSpec) -> tuple[str, ...]:
    """The claims that the pod's volumes name."""
    return tuple(v.persistent_volume_claim.claim_name for v in spec.volumes if v.persistent_volume_claim is not None)


def elastic_job(
    job: ElasticJob,
    requests: Mapping[str, Any] | None = None,
    volume_terms: Callable[[str, tuple[str, ...]], tuple[NodeTerm, ...]] = lambda _namespace, _claims: (),
) -> JobSpec:
    """What its user asks for. `requests` are those of a container that says none, `volume_terms(namespace, claims)` the
    nodes on which these volumes can be mounted. Raises InvalidFieldError.
    """
    spec, template = job.spec, completed(_template_of(job), requests or {})
    kept = () if spec.checkpoint is None else (spec.checkpoint.claim_name,)
    place = place_of(template).within(volume_terms(job.metadata.namespace, (*claims_of(template), *kept)))
    given: dict[str, object] = {
        "gpus": spec.gpus,
        "min_gpus": spec.min_gpus,
        "max_gpus": spec.max_gpus,
        "gpus_per_worker": spec.gpus_per_worker,
        "kind": spec.kind,
        "priority": spec.priority,
        "preemptible": spec.preemptible,
        "grace_period_s": spec.grace_period_seconds,
        "max_restarts": spec.max_restarts,
        "cool_down_s": spec.cool_down_seconds,
        "min_run_time_s": spec.min_run_time_seconds,
        "gpu_fraction": spec.gpu_fraction,
        "gpu_fraction_limit": spec.gpu_fraction_limit,
        "gpu_memory_mib": None if spec.gpu_memory is None else parse_mib("gpuMemory", str(spec.gpu_memory)),
        "gpu_memory_limit_mib": None
        if spec.gpu_memory_limit is None
        else parse_mib("gpuMemoryLimit", str(spec.gpu_memory_limit)),
        "gpu_devices": spec.gpu_devices,
        "node_pool": spec.node_pool,
        "required_topology": spec.required_topology,
        "preferred_topology": spec.preferred_topology,
        "spread": spec.spread,
        **needs_of(template).constraints(),
        **place.constraints(),
    }
    named = {"name": short_name(job.metadata.name), "project": job.metadata.namespace, "command": ("pod",)}
    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        return msgspec.convert({**named, **chosen}, JobSpec, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidFieldError("spec", chosen, str(error)) from None
