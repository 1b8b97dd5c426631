"""Pods that share GPUs as admission leaves them, and the reservations that they lead to."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota.cluster.kubernetes.admission import pods, review_types
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.sharing import reservation_pods
from tests.kubernetes.test_admission import patched

if TYPE_CHECKING:
    from tests.kubernetes.controlled import Controlled

RESERVATIONS = f"/api/v1/namespaces/{reservation_pods.NAMESPACE}/pods"


def sharing_pod(name: str, share: dict[str, str], *, image: str = "none", **spec: Any) -> dict[str, Any]:
    """A pod with these annotations, reviewed: gated, and with the references by which it learns its GPUs."""
    container = {"name": "main", "image": image, **spec.pop("container", {})}
    body = {
        "metadata": {"name": name, "annotations": share},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": [container], **spec},
    }
    verdict = pods.review(msgspec.convert(body, review_types.Pod), uid=str(uuid.uuid4()))
    assert verdict.allowed, verdict.message
    return patched(body, list(verdict.patch))


def share(controlled: Controlled, team: str, name: str, fraction: float | str = 0.5, **more: Any) -> str:
    """Create a pod that asks for a part of a GPU; its path."""
    body = sharing_pod(name, {"gpu-fraction": str(fraction), **more.pop("notes", {})}, **more)
    controlled.cluster.api.create(f"/api/v1/namespaces/{team}/pods", body)
    return f"/api/v1/namespaces/{team}/pods/{name}"


def reservations(controlled: Controlled) -> dict[str, dict[str, Any]]:
    """Those of this test's nodes that are not on their way out, by name."""
    found = controlled.cluster.api.items(RESERVATIONS)
    nodes = set(controlled.nodes) or {"real-0"}
    return {
        pod["metadata"]["name"]: pod
        for pod in found
        if pod["metadata"]["annotations"][labels.RESERVES_ON] in nodes and "deletionTimestamp" not in pod["metadata"]
    }


def config_of(controlled: Controlled, path: str) -> dict[str, str]:
    """Return the content of the pod's ConfigMap."""
    pod = controlled.cluster.api.get(path)
    name = pod["metadata"]["annotations"][labels.GPU_CONFIG]
    found = controlled.cluster.api.get(f"/api/v1/namespaces/{pod['metadata']['namespace']}/configmaps/{name}")
    return dict(found["data"])
