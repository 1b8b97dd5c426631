"""Builds the reservation pod that holds a shared GPU, so that the device plugin and schedulers count it as used. Pure.

It has no service account token and no rights. Its init container gets the device that the main container keeps (the
kubelet passes an init container's devices on), and writes the device's UUID as its termination message, which the
kubelet copies to the pod's status for the controller's watch. Rejected: a service account that may patch pods, since it
could patch other reservations too; a ConfigMap, for the same reason; the log, which needs the right to read logs.

Its annotations contain the sharers of the GPU (written by the controller), and those that may start (written by the
node's agent). No other client may write in its namespace, so both are trusted.

Its name is derived from the node and the device's index, so that there is at most one reservation for each GPU.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import JSON_PATCH
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane, Write, pods_path
from kfp_gpuquota.cluster.kubernetes.convert.requests import REQUIRED, deletion, escape_json_pointer, node_term
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import MAX_DEVICES, bounded_number
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.version import __version__

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod

NAMESPACE: Final = "gpuquota-reservations"
AGENTS_NAMESPACE: Final = "gpuquota-node-agents"
IMAGE: Final = f"kfp-gpuquota/reservation:{__version__}"
USER: Final = 65532
MAX_GRACE_S: Final = 1.0
# A device plugin puts the device's UUID into the variable, unless it is configured otherwise; then nvidia-smi, which
# the NVIDIA runtime adds to every container with a GPU, returns it. Without a UUID the container fails and restarts.
REPORT: Final = """\
gpu="$NVIDIA_VISIBLE_DEVICES"
case "$gpu" in
  "" | all | none | void | [0-9] | [0-9][0-9] | *,* | /*) gpu="$(nvidia-smi --query-gpu=uuid --format=csv,noheader)" ;;
esac
test -n "$gpu" && printf %s "$gpu" > /dev/termination-log
"""
HOLD: Final = "trap 'exit 0' TERM; while :; do sleep 86400 & wait; done"


class ReservationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of reservation pods. `image` needs only a shell. `agents`: namespace of the node agents."""

    namespace: str = NAMESPACE
    agents: str = AGENTS_NAMESPACE
    image: str = IMAGE
    runtime_class: str = ""
    priority_class: str = ""


class ReservationView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tracked state of a reservation pod. `gpu` is the reported UUID; `ready` are the tickets that may start."""

    uid: str
    name: str
    node: str
    device: int
    gpu: str = ""
    sharers: str = ""
    ready: frozenset[str] = frozenset()
    leaving: bool = False
    over: bool = False
    start_failure: str = ""


def name_of(node: str, device: int) -> str:
    """Return the name of a device's reservation pod; a hash is used because nodes' names may be too long."""
    digest = hashlib.sha256(node.encode()).hexdigest()[:8]
    return f"gpu-{node[:40].strip('.-')}-{digest}-{device}"


def creation(node: str, device: int, settings: ReservationSettings, simulated: str = "") -> Write:
    """Return the creation of a device's reservation pod. `simulated`: the device's name on nodes without real GPUs."""
    about = f"{settings.namespace}/{name_of(node, device)}"
    body = _body(node, device, settings, simulated)
    return Write(verb="POST", path=pods_path(settings.namespace), about=about, lane=Lane.CREATE, body=body)


def removal(view: ReservationView, settings: ReservationSettings) -> Write:
    """Return the deletion of this reservation pod, and of no other with its name."""
    return deletion(settings.namespace, view.name, view.uid, MAX_GRACE_S)


def annotation(view: ReservationView, settings: ReservationSettings, sharers: str) -> Write:
    """Return the patch that annotates the GPU's sharers, for the node's agent and a restarted controller."""
    path = join(pods_path(settings.namespace), view.name)
    operations = [
        {"op": "test", "path": "/metadata/uid", "value": view.uid},
        {"op": "add", "path": f"/metadata/annotations/{escape_json_pointer(labels.SHARERS)}", "value": sharers},
    ]
    about = f"{settings.namespace}/{view.name}"
    return Write(verb="PATCH", path=path, about=about, body=operations, content_type=JSON_PATCH)


def view_of(pod: Pod) -> ReservationView | None:
    """Return the view of a reservation pod; None for any other pod."""
    meta, notes = pod.metadata, pod.metadata.annotations or {}
    node, device = notes.get(labels.RESERVES_ON, ""), bounded_number(meta.labels.get(labels.RESERVES, ""), MAX_DEVICES)
    if not node or device is None:
        return None
    return ReservationView(
        uid=meta.uid,
        name=meta.name,
        node=node,
        device=device,
        gpu=_reported(pod),
        sharers=notes.get(labels.SHARERS, ""),
        ready=frozenset(filter(None, notes.get(labels.READY, "").split(","))),
        leaving=meta.deletion_timestamp is not None,
        over=pod.status.phase in {"Succeeded", "Failed"},
        start_failure=_trouble(pod),
    )


def _reported(pod: Pod) -> str:
    """Return the reported UUID when the container that holds the device runs; "" before."""
    if pod.status.phase != "Running":
        return ""
    ended = [status.state.terminated for status in pod.status.init_container_statuses]
    return next((one.message.strip() for one in ended if one is not None and one.exit_code == 0), "")


def _trouble(pod: Pod) -> str:
    for status in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        if (waiting := status.state.waiting) is not None and waiting.message:
            return f"{waiting.reason}: {waiting.message}"[:300]
    conditions = (c for c in pod.status.conditions if c.type == "PodScheduled" and c.status == "False")
    return next((f"{condition.reason}: {condition.message}"[:300] for condition in conditions), "")


def _body(node: str, device: int, settings: ReservationSettings, simulated: str) -> dict[str, Any]:
    variables = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": simulated}] if simulated else []
    term = {"matchFields": [node_term(node)]}
    spec = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(MAX_GRACE_S),
        "restartPolicy": "Always",
        "affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term]}}},
        # it must run on its sharers' node, whatever they tolerate; the controller decides when it is deleted
        "tolerations": [{"operator": "Exists"}],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [_container("report", REPORT, settings.image, variables)],
        "containers": [_container("hold", HOLD, settings.image, variables)],
    }
    if settings.runtime_class:
        spec["runtimeClassName"] = settings.runtime_class
    if settings.priority_class:
        spec["priorityClassName"] = settings.priority_class
    metadata = {
        "name": name_of(node, device),
        "labels": {
            "app.kubernetes.io/name": "gpuquota-reservation",
            "app.kubernetes.io/part-of": "gpuquota",
            "sidecar.istio.io/inject": "false",
            labels.RESERVES: str(device),
        },
        # only the sharers, not this pod, may prevent an autoscaler from removing the node
        "annotations": {labels.RESERVES_ON: node, "cluster-autoscaler.kubernetes.io/safe-to-evict": "true"},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _container(name: str, script: str, image: str, variables: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "name": name,
        "image": image,
        "command": ["sh", "-c", script],
        "env": variables,
        "resources": {
            "requests": {"cpu": "1m", "memory": "8Mi"},
            "limits": {labels.GPU_RESOURCE: "1", "memory": "32Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
