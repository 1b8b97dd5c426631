"""Which patch of a RayCluster or RayJob a unit needs, from what is observed. Pure.

Level-triggered: a patch follows from the difference between a unit's slots and the observed objects, so that a
restarted controller continues, and a change by anybody else is answered.

| unit | observed | patch |
|---|---|---|
| sized by the controller | workers leave | `replicas` minus their number, with their names in `workersToDelete` |
| sized by the controller | more slots than pods, and KubeRay creates no more | `replicas` for the slots |
| sized by Ray's autoscaler | workers leave | `maxReplicas`: the workers that stay |
| sized by Ray's autoscaler | none leaves, and `maxReplicas` is the controller's | `maxReplicas` of the user |
| RayJob | to be stopped, not suspended | `suspend`, with the reason |
| RayJob | suspended by the controller, and planned again | not `suspend` |

Each patch tests what it was decided from: a change by the user, or by Ray's autoscaler, in the meantime makes it fail,
and the size is decided again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import JSON_PATCH, MERGE_PATCH
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane, Write
from kfp_gpuquota.cluster.kubernetes.convert.requests import escape_json_pointer
from kfp_gpuquota.cluster.kubernetes.kuberay.owners import is_autoscaled, suspended_by_controller
from kfp_gpuquota.cluster.kubernetes.kuberay.specs import SizeNote, most_requested, notes_of, requested
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.ray_types import API_VERSION

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.kuberay.units import Slot, Unit
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata
    from kfp_gpuquota.cluster.kubernetes.objects.ray_types import RayCluster, RayJob, WorkerGroup


def resize(
    cluster: RayCluster, index: int, replicas: int, workers_to_delete: tuple[str, ...], notes: dict[str, SizeNote]
) -> Write:
    """Return the patch that sets a group's `replicas`, and the pods that KubeRay deletes for it."""
    group = cluster.spec.worker_group_specs[index]
    deleted = {"workersToDelete": list(workers_to_delete)}
    operations = [
        *_replaced(index, group, "replicas", group.replicas, replicas),
        {"op": "add", "path": f"/spec/workerGroupSpecs/{index}/scaleStrategy", "value": deleted},
    ]
    return _cluster_patch(cluster, operations, notes, Lane.RELEASE if replicas < group.replicas else Lane.CREATE)


def bound(cluster: RayCluster, index: int, most: int, notes: dict[str, SizeNote]) -> Write:
    """Return the patch that sets a group's `maxReplicas`, to which Ray's autoscaler shrinks it."""
    group = cluster.spec.worker_group_specs[index]
    operations = _replaced(index, group, "maxReplicas", group.max_replicas, most)
    return _cluster_patch(cluster, operations, notes, Lane.RELEASE)


def _replaced(index: int, group: WorkerGroup, field: str, before: object, after: object) -> list[dict[str, Any]]:
    """Return the operations that replace a field of a group, if it is still the same group with the same value."""
    path = f"/spec/workerGroupSpecs/{index}"
    return [
        {"op": "test", "path": f"{path}/groupName", "value": group.group_name},
        {"op": "test", "path": f"{path}/{field}", "value": before},
        {"op": "replace", "path": f"{path}/{field}", "value": after},
    ]


def suspension(job: RayJob, reason: str | None) -> Write:
    """Return the patch that suspends the RayJob for `reason`, or resumes it (None), unless it has changed since."""
    meta = job.metadata
    notes = {labels.SUSPENDED: reason}
    body = {
        "metadata": {"uid": meta.uid, "resourceVersion": meta.resource_version, "annotations": notes},
        "spec": {"suspend": reason is not None},
    }
    return Write(
        verb="PATCH",
        path=_path(meta, "rayjobs"),
        about=f"{meta.namespace}/{meta.name}",
        lane=Lane.ADMIT if reason is None else Lane.RELEASE,
        body=body,
        content_type=MERGE_PATCH,
    )


def _cluster_patch(
    cluster: RayCluster, operations: list[dict[str, Any]], notes: dict[str, SizeNote], lane: Lane
) -> Write:
    meta = cluster.metadata
    text = msgspec.json.encode(notes).decode()
    if meta.annotations is None:
        annotated = {"op": "add", "path": "/metadata/annotations", "value": {labels.RAY_GROUPS: text}}
    else:
        name = escape_json_pointer(labels.RAY_GROUPS)
        annotated = {"op": "add", "path": f"/metadata/annotations/{name}", "value": text}
    body = [{"op": "test", "path": "/metadata/uid", "value": meta.uid}, *operations, annotated]
    return Write(
        verb="PATCH",
        path=_path(meta, "rayclusters"),
        about=f"{meta.namespace}/{meta.name}",
        lane=lane,
        body=body,
        content_type=JSON_PATCH,
    )


def _path(meta: Metadata, plural: str) -> str:
    return join(f"/apis/{API_VERSION}/namespaces", meta.namespace, plural, meta.name)


def suspension_of(unit: Unit, job: RayJob, stop: str) -> Write | None:
    """Return the patch that suspends the RayJob for the reason `stop`, or resumes it; None if it needs none."""
    if stop:
        return None if job.spec.suspend else suspension(job, stop)
    if not suspended_by_controller(job):
        return None
    resumed = not job.spec.suspend or bool(unit.missing())
    return suspension(job, None) if resumed else None


def size_of(unit: Unit, cluster: RayCluster, index: int) -> Write | None:
    """Return the patch of the unit's group; None if it needs none."""
    group = cluster.spec.worker_group_specs[index]
    if is_autoscaled(cluster):
        return _bounded(unit, cluster, index, group)
    return _shrunk(unit, cluster, index, group) or _expanded(unit, cluster, index, group)


def _shrunk(unit: Unit, cluster: RayCluster, index: int, group: WorkerGroup) -> Write | None:
    """Return the patch that releases the leaving workers which KubeRay does not delete yet."""
    named = set(group.scale_strategy.workers_to_delete)
    leaving = _leaving(unit, group)
    new = sorted(leaving - named)
    if not new:
        return None
    replicas = max(0, group.replicas - len(new))
    notes = _noted(cluster, group, SizeNote(replicas=requested(group, _note(cluster, group)), wrote=replicas))
    return resize(cluster, index, replicas, (*sorted(leaving & named), *new), notes)


def _expanded(unit: Unit, cluster: RayCluster, index: int, group: WorkerGroup) -> Write | None:
    """Return the patch that requests pods for slots beyond the replicas."""
    slots = [slot for slot in unit.slots.values() if not slot.leaving]
    needed = len(slots) + len(unit.waiting)
    if not unit.missing() or needed <= group.replicas:
        return None
    notes = _noted(cluster, group, SizeNote(replicas=requested(group, _note(cluster, group)), wrote=needed))
    return resize(cluster, index, needed, tuple(sorted(_leaving(unit, group))), notes)


def _bounded(unit: Unit, cluster: RayCluster, index: int, group: WorkerGroup) -> Write | None:
    """Return the patch that makes Ray's autoscaler shrink the group, or lifts that bound."""
    note = _note(cluster, group)
    ours = note.bound is not None and note.bound == group.max_replicas
    if any(_to_be_deleted(slot) for slot in unit.pods(group.group_name)):
        stay = sum(not slot.leaving for slot in unit.slots.values())
        most = max(stay, group.min_replicas)
        if most >= min(group.max_replicas, group.replicas):
            return None
        written = SizeNote(most=most_requested(group, note), bound=most)
        return bound(cluster, index, most, _noted(cluster, group, written))
    if ours and note.most is not None and not any(slot.leaving for slot in unit.slots.values()):
        return bound(cluster, index, note.most, _noted(cluster, group, None))
    return None


def _leaving(unit: Unit, group: WorkerGroup) -> set[str]:
    """Return the names of the group's pods that KubeRay is to delete."""
    return {slot.pod.name for slot in unit.pods(group.group_name) if slot.pod is not None and _to_be_deleted(slot)}


def _to_be_deleted(slot: Slot) -> bool:
    """Return whether KubeRay is to delete the slot's pod."""
    return slot.leaving and slot.by_kuberay and not slot.terminating


def _note(cluster: RayCluster, group: WorkerGroup) -> SizeNote:
    return notes_of(cluster.metadata).get(group.group_name, SizeNote())


def _noted(cluster: RayCluster, group: WorkerGroup, note: SizeNote | None) -> dict[str, SizeNote]:
    """Return the cluster's notes with the group's replaced, or removed (None)."""
    others = {name: one for name, one in notes_of(cluster.metadata).items() if name != group.group_name}
    return others if note is None else {**others, group.group_name: note}
