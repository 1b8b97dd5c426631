"""Patches of RayClusters and RayJobs. Pure.

Each tests what it was decided from: a change by the user, or by Ray's autoscaler, in the meantime makes it fail, and
the size is decided again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import JSON_PATCH, MERGE_PATCH
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane, Write
from kfp_gpuquota.cluster.kubernetes.convert.requests import escape_json_pointer
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.ray_types import API_VERSION

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.kuberay.specs import SizeNote
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata
    from kfp_gpuquota.cluster.kubernetes.objects.ray_types import RayCluster, RayJob


def resize(
    cluster: RayCluster, index: int, replicas: int, workers_to_delete: tuple[str, ...], notes: dict[str, SizeNote]
) -> Write:
    """Return the patch that sets a group's `replicas`, and the pods that KubeRay deletes for it."""
    group = cluster.spec.worker_group_specs[index]
    path = f"/spec/workerGroupSpecs/{index}"
    operations: list[dict[str, Any]] = [
        {"op": "test", "path": f"{path}/groupName", "value": group.group_name},
        {"op": "test", "path": f"{path}/replicas", "value": group.replicas},
        {"op": "replace", "path": f"{path}/replicas", "value": replicas},
        {"op": "add", "path": f"{path}/scaleStrategy", "value": {"workersToDelete": list(workers_to_delete)}},
    ]
    return _cluster_patch(cluster, operations, notes, Lane.RELEASE if replicas < group.replicas else Lane.CREATE)


def bound(cluster: RayCluster, index: int, most: int, notes: dict[str, SizeNote]) -> Write:
    """Return the patch that sets a group's `maxReplicas`, to which Ray's autoscaler shrinks it."""
    group = cluster.spec.worker_group_specs[index]
    path = f"/spec/workerGroupSpecs/{index}"
    operations: list[dict[str, Any]] = [
        {"op": "test", "path": f"{path}/groupName", "value": group.group_name},
        {"op": "test", "path": f"{path}/maxReplicas", "value": group.max_replicas},
        {"op": "replace", "path": f"{path}/maxReplicas", "value": most},
    ]
    return _cluster_patch(cluster, operations, notes, Lane.RELEASE)


def suspension(job: RayJob, reason: str | None) -> Write:
    """Return the patch that suspends the RayJob for `reason`, or resumes it (None)."""
    meta = job.metadata
    body = {
        "metadata": {"uid": meta.uid, "annotations": {labels.SUSPENDED: reason}},
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
