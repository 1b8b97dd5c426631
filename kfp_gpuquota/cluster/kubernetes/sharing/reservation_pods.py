"""The small pod that holds a GPU which several pods share, so that device plugin and schedulers see it as taken: pure.

It runs nothing of ours, has no token and no rights. Its first container, which gets the device that the second one
keeps (the kubelet gives an init container's devices to the ones after it), writes the device's UUID as its termination
message: the kubelet carries that into the pod's status, where the controller's watch sees it. Rejected: a service
account that may patch pods, which could then patch other reservations too; a ConfigMap, for the same reason; the log,
which only who may read logs can see.

What it is for stands on it, too: who shares the GPU (written by the controller), who of them may start (written by the
node's agent). Nobody else may write in its namespace, so both can be believed.

Its name is made from the node and the device's number there, so that there is never a second one for the same GPU.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.client.async_client import JSON_PATCH
from kfp_gpuquota.cluster.kubernetes.client.request import Lane, Write, pods_path
from kfp_gpuquota.cluster.kubernetes.convert.requests import REQUIRED, deletion, escape_json_pointer, node_term
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import MAX_DEVICES, bounded_number
from kfp_gpuquota.cluster.kubernetes.objects import labels

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod

NAMESPACE: Final = "gpuquota-reservations"
AGENTS_NAMESPACE: Final = "gpuquota-node-agents"
IMAGE: Final = "kfp-gpuquota/reservation:0.1.0"
USER: Final = 65532
MAX_GRACE_S: Final = 1.0
# A device plugin names the device in the variable, by its UUID unless it is set up otherwise; then NVIDIA's tool, which
# its runtime puts into every container with a GPU, is asked. What is no name of a device fails, and is tried again.
REPORT: Final = """\
gpu="$NVIDIA_VISIBLE_DEVICES"
case "$gpu" in
  "" | all | none | void | [0-9] | [0-9][0-9] | *,* | /*) gpu="$(nvidia-smi --query-gpu=uuid --format=csv,noheader)" ;;
esac
test -n "$gpu" && printf %s "$gpu" > /dev/termination-log
"""
HOLD: Final = "trap 'exit 0' TERM; while :; do sleep 86400 & wait; done"


class ReservationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How reservation pods are made. `image` needs a shell and no more. `agents`: where the nodes' agents run."""

    namespace: str = NAMESPACE
    agents: str = AGENTS_NAMESPACE
    image: str = IMAGE
    runtime_class: str = ""
    priority_class: str = ""


class ReservationView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is kept of one. `gpu` is the UUID that it has reported; `ready` are tickets, as the node's agent says."""

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
    """One name for each device of each node; nodes' names may be longer than a pod's may."""
    digest = hashlib.sha256(node.encode()).hexdigest()[:8]
    return f"gpu-{node[:40].strip('.-')}-{digest}-{device}"


def creation(node: str, device: int, settings: ReservationSettings, simulated: str = "") -> Write:
    """Make the one for a node's device. `simulated`: the device's name where a node's GPUs exist by name only."""
    about = f"{settings.namespace}/{name_of(node, device)}"
    body = _body(node, device, settings, simulated)
    return Write(verb="POST", path=pods_path(settings.namespace), about=about, lane=Lane.CREATE, body=body)


def removal(view: ReservationView, settings: ReservationSettings) -> Write:
    """Take that one away, and no other one of its name."""
    return deletion(settings.namespace, view.name, view.uid, MAX_GRACE_S)


def annotation(view: ReservationView, settings: ReservationSettings, sharers: str) -> Write:
    """Note who shares the GPU, for the node's agent and for a controller that is started anew."""
    path = f"{pods_path(settings.namespace)}/{view.name}"
    operations = [
        {"op": "test", "path": "/metadata/uid", "value": view.uid},
        {"op": "add", "path": f"/metadata/annotations/{escape_json_pointer(labels.SHARERS)}", "value": sharers},
    ]
    about = f"{settings.namespace}/{view.name}"
    return Write(verb="PATCH", path=path, about=about, body=operations, content_type=JSON_PATCH)


def view_of(pod: Pod) -> ReservationView | None:
    """What is kept of a reservation pod; None for any other one."""
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
    """The UUID, once the container that holds the device runs."""
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
        # it goes where its sharers go, whatever they tolerate; how long it stays is the controller's to say
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
        # an autoscaler that would remove the node asks its sharers, and not this
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
