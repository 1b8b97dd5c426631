"""Converts pods to the scheduler's types. Pure.

A pod becomes a `PodView`, and the decoded object is dropped at once. For its invariant the constraints are read from
every pod, and the part of them that the admission added (the pin to a node, the pool of a stand-in) is left out.
Rejected: constraints of waiting pods only, as "the others have a node". A restarted controller then moved pods to nodes
that they exclude.
"""

from __future__ import annotations

import logging
import re
from copy import copy
from functools import lru_cache
from sys import intern
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api import JobSpec, Kind
from kfp_gpuquota.api.annotations import asks_for_share, share_of_pod
from kfp_gpuquota.api.job import COMMAND_OF_PODS
from kfp_gpuquota.api.resources import CountedJobSpec
from kfp_gpuquota.api.resources import Resources as Amounts
from kfp_gpuquota.api.validation import MAX_PRIORITY
from kfp_gpuquota.cluster.kubernetes.convert.gang_notes import MAX_GROUP, gang_note
from kfp_gpuquota.cluster.kubernetes.convert.owners import owner_kind, owner_of
from kfp_gpuquota.cluster.kubernetes.convert.pod_placement import (
    GateShape,
    gate_of,
    opened_on,
    own_constraints,
    reserved_node,
    sent_to,
)
from kfp_gpuquota.cluster.kubernetes.convert.pod_repulsion import repulsions_of
from kfp_gpuquota.cluster.kubernetes.convert.pod_status import (
    ended_at,
    exit_code_of,
    last_error,
    lost_with,
    rejected_with,
    trouble_of,
    unhealthy_gpu,
)
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import DeviceClaim, PodView, Stage
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import (
    MAX_DEVICES,
    MOST_ENTRIES,
    NOTHING,
    ResourceRequests,
    bounded_number,
    check_length,
    gpus_of,
    resource_requests_of,
    weights_in,
)
from kfp_gpuquota.cluster.kubernetes.convert.unmodelled import DEFAULT_SCHEDULER, unmodelled_in
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.errors import GpuQuotaError, InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sized

    from kfp_gpuquota.cluster.kubernetes.convert.node_constraints import NodeConstraints
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata, OwnerReference, Pod, PodSpec

RAY_NODE_TYPE: Final = "ray.io/node-type"
RAY_GROUP: Final = "ray.io/group"
MAX_TIME_S: Final = 10**12
_LONGEST_DEVICES: Final = 5 * MAX_DEVICES
log = logging.getLogger(__name__)


def counted_view(pod: Pod) -> PodView:
    """Return the view of `pod`; never raises.

    If it cannot be planned (an invalid annotation, values out of range), `problem` states why, and its devices are
    counted by its plain GPU request: a pod that holds devices is never left out of the count.
    """
    if pod.problem:
        return _plain_view(pod, pod.problem)
    try:
        view = pod_view(pod)
        if (view.counted or view.device_claims) and not view.job_uid:
            pod_job(view)  # checks that it can be converted for the scheduler
    except GpuQuotaError as error:
        return _plain_view(pod, error.message)
    except Exception as error:
        log.exception("pod %s/%s cannot be converted", pod.metadata.namespace, pod.metadata.name)
        return _plain_view(pod, f"{type(error).__name__}: {error}")
    return view


def _plain_view(pod: Pod, problem: str) -> PodView:
    """Return a view with the pod's node and its plain request of GPUs, or of what counts as GPUs.

    Without a node it is not planned.
    """
    meta, spec = pod.metadata, pod.spec
    requested, owner = gpus_of(spec), elastic_owner(meta)
    annotated = (meta.annotations or {}).get(labels.DEVICES, "")  # for shared GPUs, which no container requests
    gpus = requested or (min(annotated.count(",") + 1, MAX_DEVICES) if annotated else 0)
    node = spec.node_name or ("" if gate_of(pod) else sent_to(pod))
    stage = _stage(pod, node, None)
    needs, weights = (NOTHING, ()) if gpus or owner is not None else _plain_needs(pod)
    device_claims = device_claims_of(pod)[:MOST_ENTRIES]
    counted = gpus or weights or owner is not None or device_claims
    return PodView(
        uid=meta.uid,
        namespace=intern(meta.namespace),
        name=meta.name,
        stage=stage if counted or stage is Stage.ENDED else Stage.OUTSIDE,
        gpus=gpus,
        gpu_weights=weights,
        needs=needs,
        device_claims=device_claims,
        created=meta.creation_timestamp.timestamp() if meta.creation_timestamp else 0.0,
        node=intern(node),
        bound=bool(spec.node_name),
        running=pod.status.phase == "Running",
        started=pod.status.start_time.timestamp() if pod.status.start_time else 0.0,
        devices=_devices(annotated, gpus),
        job_uid=owner.uid if owner is not None else "",
        index=bounded_number(meta.labels.get(labels.WORKER, "")) or 0,
        attempt=bounded_number(meta.labels.get(labels.ATTEMPT, "")) or 0,
        exit_code=exit_code_of(pod),
        requested=requested,
        problem=problem[:300],
    )


def _plain_needs(pod: Pod) -> tuple[ResourceRequests, Amounts]:
    """Return what the pod requests of resources that count as GPUs, and their weights; nothing if these are invalid."""
    try:
        needs = resource_requests_of(pod.spec)
        weights = _gpu_weights(pod, needs, gate_of(pod))
    except GpuQuotaError:
        return NOTHING, ()
    names = {name for name, _ in weights}
    return ResourceRequests(0, 0, tuple(row for row in needs.others if row[0] in names)), weights


def elastic_owner(meta: Metadata) -> OwnerReference | None:
    """Return the owner reference to this project's ElasticJob, if any; other projects have that kind, too."""
    owner = next((o for o in meta.owner_references if o.controller), None)
    if owner is None or owner.kind != "ElasticJob" or owner.api_version.partition("/")[0] != labels.GROUP:
        return None
    return owner


def pod_view(pod: Pod) -> PodView:
    """Return the view of `pod`. Raises InvalidFieldError for invalid annotations."""
    meta, spec = pod.metadata, pod.spec
    gate = gate_of(pod)
    stand_in = "" if gate else opened_on(meta.annotations or {})
    reserved_on = "" if gate else reserved_node(meta.annotations or {})
    node = spec.node_name or reserved_on or ("" if gate else sent_to(pod) or stand_in)
    moved = bool(reserved_on) and node != reserved_on  # its annotation names devices of another node
    share = _share(pod)
    requested, annotated = gpus_of(spec), (meta.annotations or {}).get(labels.DEVICES, "")
    gpus = min(dict(share).get("gpu_devices", 1), MAX_DEVICES) if share else requested
    owner = next((o for o in meta.owner_references if o.controller), None)
    elastic = elastic_owner(meta) is not None
    if elastic and not gpus and labels.GPU_WEIGHTS not in (meta.annotations or {}):
        gpus = min(annotated.count(",") + 1, MAX_DEVICES)  # a worker that shares GPUs requests none of them
    needs = resource_requests_of(spec)
    weights = () if gpus else _gpu_weights(pod, needs, gate)
    device_claims = device_claims_of(pod)
    if not gpus and not weights and not device_claims:
        return _non_gpu_view(pod)
    claims, given = claims_of(spec), meta.labels if gate else kept_labels(meta.labels)
    check_length("labels", len(given))
    check_lengths(claims, device_claims, needs)
    return PodView(
        uid=meta.uid,
        namespace=intern(meta.namespace),
        name=meta.name,
        stage=_stage(pod, node, gate),
        gpus=gpus,
        gpu_weights=weights,
        created=meta.creation_timestamp.timestamp() if meta.creation_timestamp else 0.0,
        node=intern(node),
        bound=bool(spec.node_name),
        running=pod.status.phase == "Running",
        started=pod.status.start_time.timestamp() if pod.status.start_time else 0.0,
        devices=None if moved else _devices(annotated, gpus),
        gate=gate,
        controller_uid=intern(owner.uid) if owner is not None else "",
        controller_kind=_maker_kind(owner, meta.labels) if owner is not None else "",
        job_uid=owner.uid if owner is not None and elastic else "",
        exit_code=exit_code_of(pod),
        ended_at=ended_at(pod),
        lost=lost_with(pod),
        rejected=rejected_with(pod),
        error=last_error(pod) if elastic else "",
        start_failure=trouble_of(pod),
        prepared=any(c.type == "PodReadyToStartContainers" and c.status == "True" for c in pod.status.conditions),
        share=share,
        constraints=own_constraints(pod, gate),
        claims=claims,
        needs=needs,
        device_claims=device_claims,
        claimed=_claimed(meta, gate),
        owner=None if elastic else owner_of(pod),
        requested=requested,
        grace_s=int(spec.termination_grace_period_seconds),
        ends_at=meta.deletion_timestamp.timestamp() if meta.deletion_timestamp else 0.0,
        stand_in=stand_in,
        ray_group=intern(meta.labels.get(RAY_GROUP, "")),
        reclaimed_at=_seconds((meta.annotations or {}).get(labels.RECLAIMED_AT, "")),
        unmodelled=unmodelled_in(spec),
        reserved_on=reserved_on,
        repels=repulsions_of(spec, meta.namespace),
        labels=given,
        other_gate=next((one.name for one in spec.scheduling_gates if one.name != labels.QUOTA_GATE), ""),
        scheduler="" if spec.scheduler_name == DEFAULT_SCHEDULER else spec.scheduler_name,
        unhealthy_gpu=unhealthy_gpu(pod),
        **{**_options(meta.labels, meta.annotations or {}), **(_gang(pod) if gate is None and not elastic else {})},
    )


def kept_labels(given: dict[str, str]) -> dict[str, str]:
    """Return the labels of an object that has started: of too many those that its user cannot change.

    Rejected: an error, since a running pod would count otherwise as soon as its user adds labels.
    """
    if len(given) <= MOST_ENTRIES:
        return given
    return {key: value for key, value in given.items() if key.startswith(f"{labels.GROUP}/")}


def check_lengths(claims: Sized, device_claims: Sized, needs: ResourceRequests) -> None:
    """Raise InvalidFieldError if a pod or a template has more of something than the plan considers."""
    check_length("volumes.persistentVolumeClaim", len(claims))
    check_length("resourceClaims", len(device_claims))
    check_length("resources and host ports", len(needs.others))


def _maker_kind(owner: OwnerReference, given: Mapping[str, str]) -> str:
    """Return the owner's group and kind; a Ray head has a kind of its own, since all work is lost with it."""
    head = " head" if given.get(RAY_NODE_TYPE) == "head" else ""
    return intern(owner_kind(owner.api_version, owner.kind) + head)


def _seconds(noted: str) -> float:
    """Return an annotated time in seconds since 1970; 0 if it is invalid."""
    return float(bounded_number(noted, MAX_TIME_S) or 0)


def _non_gpu_view(pod: Pod) -> PodView:
    """Return the view of a pod without GPUs: its node and its requests, which count until it has ended."""
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
        needs=resource_requests_of(pod.spec) if there and pod.spec.node_name else NOTHING,
        repels=repulsions_of(pod.spec, meta.namespace) if there else (),
    )


def _claimed(meta: Metadata, gate: GateShape | None) -> tuple[str, ...] | None:
    """Return the annotated DeviceClasses of a pod that was released with claims; None of one by an earlier version."""
    noted = (meta.annotations or {}).get(labels.CLAIMED)
    return None if gate is not None or noted is None else tuple(noted.split(","))


def _gpu_weights(pod: Pod, needs: ResourceRequests, gate: GateShape | None) -> Amounts:
    """Return the annotated resources that count as GPUs and that the pod requests, of a pod of the quota."""
    notes, requested = pod.metadata.annotations or {}, dict(needs.others)
    if labels.GPU_WEIGHTS not in notes or (gate is None and labels.DEVICES not in notes):
        return ()
    return tuple(row for row in weights_in(notes[labels.GPU_WEIGHTS]) if row[0] in requested)


def _stage(pod: Pod, node: str, gate: GateShape | None) -> Stage:
    if pod.status.phase in {"Succeeded", "Failed"}:
        return Stage.ENDED
    leaving = pod.metadata.deletion_timestamp is not None
    if node:
        return Stage.TERMINATING if leaving else Stage.ASSIGNED
    if leaving:
        return Stage.ENDED
    return Stage.WAITING if gate is not None else Stage.OUTSIDE


def _share(pod: Pod) -> tuple[tuple[str, Any], ...]:
    """Return the share of devices that the annotations request; of a worker its job specifies the same."""
    annotations = pod.metadata.annotations
    if not annotations or not asks_for_share(annotations):
        return ()
    return tuple(sorted(share_of_pod(annotations, {}).items()))


def _devices(text: str, gpus: int) -> tuple[int, ...] | None:
    """Return the devices in the format of the admission patch; None for any other text."""
    if not text or len(text) > _LONGEST_DEVICES:
        return None
    parts = [bounded_number(part, MAX_DEVICES) for part in text.split(",")]
    devices = tuple(part for part in parts if part is not None)
    return devices if len(set(devices)) == len(parts) == gpus else None


def _options(given: Mapping[str, str], annotations: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields from the pod's labels; invalid values are left out, since admission has refused them."""
    kind = given.get(labels.KIND, Kind.TRAIN if labels.SESSIONS.isdisjoint(given) else Kind.BUILD)
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


def _gang(pod: Pod) -> dict[str, Any]:
    """Return the fields of the gang with which an admitted pod was admitted, as annotated."""
    meta, owner = pod.metadata, owner_of(pod)
    note = gang_note((meta.annotations or {}).get(labels.GANG, ""))
    if not note.size:
        return {}
    group = meta.labels.get(labels.POD_GROUP, "") or (owner.group if owner is not None else "")
    return {"group": group, "group_size": note.size, "rest": note.rest}


def _group_size(text: str) -> int:
    size = bounded_number(text, MAX_GROUP)
    if size is None:
        raise InvalidFieldError(labels.POD_GROUP_SIZE, text, f"it must be a whole number, at most {MAX_GROUP}")
    return size


# Jobs for the scheduler


_NOT_IN_NAMES: Final = re.compile(r"[^a-z0-9-]+")


def short_name(name: str) -> str:
    """Return the name as used in the scheduler's messages: pods may have longer names, and dots."""
    return _NOT_IN_NAMES.sub("-", name.lower())[:63].strip("-") or "pod"


def pod_job(view: PodView, pods: int = 1) -> JobSpec:
    """Return the job of one pod, or of a group of equal pods that start together.

    Pods of one template differ only in their names, so the expensive validation of their requests is cached.
    """
    quality = view.kind, view.priority, view.preemptible, view.pool
    constraints = view.constraints.within(view.volume_terms) if view.volume_terms else view.constraints
    constraints = constraints.excluding(view.excluded_nodes) if view.excluded_nodes else constraints
    request = view.gpus, view.share, view.needs, view.gpu_weights
    spec = copy(_unnamed(view.namespace, pods, request, constraints, quality))
    msgspec.structs.force_setattr(spec, "name", short_name(view.group.partition("/")[2] or view.group or view.name))
    return spec


@lru_cache(4096)
def _unnamed(
    namespace: str,
    pods: int,
    request: tuple[int, tuple[tuple[str, Any], ...], ResourceRequests, Amounts],
    constraints: NodeConstraints,
    quality: tuple[Kind, int | None, bool | None, str],
) -> JobSpec:
    kind, priority, preemptible, pool = quality
    gpus, share, needs, weights = request
    each = gpus or 1  # of a pod with weights: the scheduler gives it no devices
    return CountedJobSpec(
        name="pod",
        project=namespace,
        command=COMMAND_OF_PODS,
        **(dict(share) if share else {"gpus": each * pods, "gpus_per_worker": each}),
        gpu_weights=weights,
        kind=kind,
        priority=priority,
        preemptible=preemptible,
        cool_down_s=0.0,
        node_pool=pool,
        **needs.constraints(),
        **constraints.constraints(),
    )


def device_claims_of(pod: Pod) -> tuple[DeviceClaim, ...]:
    """Return the pod's claims for devices; the name of a claim that is made for the pod is in its status."""
    return claims_in(pod.spec, {one.name: one.resource_claim_name for one in pod.status.resource_claim_statuses})


def claims_in(spec: PodSpec, made: Mapping[str, str]) -> tuple[DeviceClaim, ...]:
    """Return the claims of a pod or template for devices; `made` are the names of those made of templates."""
    return tuple(
        DeviceClaim(one.resource_claim_name or made.get(one.name, ""), one.resource_claim_template_name)
        for one in spec.resource_claims
    )


def claims_of(spec: PodSpec) -> tuple[str, ...]:
    """Return the PersistentVolumeClaims that the pod's volumes refer to."""
    return tuple(v.persistent_volume_claim.claim_name for v in spec.volumes if v.persistent_volume_claim is not None)
