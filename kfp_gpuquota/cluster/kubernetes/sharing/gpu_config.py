"""Builds the GPU configuration of a pod with shared GPUs: a ConfigMap, since its GPUs are not known at creation. Pure.

Admission adds the references, the controller fills the ConfigMap before it removes the gate, and the kubelet starts no
container without it. The pod owns the ConfigMap. Values that are known at creation are in the variables themselves. All
of it is for the pod's first container, as RUNAI_GPU_MEMORY_LIMIT is.

| variable                                     | from                                                             |
|----------------------------------------------|------------------------------------------------------------------|
| NVIDIA_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES | the ConfigMap: UUIDs of the GPUs that its reservations hold      |
| ELASTIC_SIMULATED_DEVICES                    | the ConfigMap, on nodes with simulated devices                   |
| ELASTIC_MEMORY_DIR                           | a volume of the pod, where the node's agent writes its allowance |
| RUNAI_GPU_MEMORY_LIMIT                       | its limit, by default its request                                |
| CUDA_MPS_ACTIVE_THREAD_PERCENTAGE            | its part of the computing power, where it requests one           |

An ElasticJob's worker is created when its GPUs are known, so its variables hold them and there is no ConfigMap.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.api.annotations import LIMIT_VARIABLE
from kfp_gpuquota.api.request_paths import join, with_query
from kfp_gpuquota.api.share import compute_variables, limit_text
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import APPLY_PATCH
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane, Write
from kfp_gpuquota.cluster.kubernetes.objects import labels

if TYPE_CHECKING:
    from kfp_gpuquota.api import JobSpec
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.sharing.reservations import DeviceAssignment

VISIBLE: Final = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
SIMULATED: Final = "ELASTIC_SIMULATED_DEVICES"
MEMORY_VARIABLE: Final = "ELASTIC_MEMORY_DIR"
MEMORY_DIRECTORY: Final = "/var/run/gpuquota/memory"
MEMORY_VOLUME: Final = "gpuquota-memory"
_LENGTH: Final = 16
_NAME: Final = re.compile(rf"gpuquota-gpu-[0-9a-f]{{{_LENGTH}}}")


def name_for(review: str) -> str:
    """Return the ConfigMap's name, from the review's uid: a pod with a generateName has no name yet."""
    return f"gpuquota-gpu-{review.replace('-', '').lower().ljust(_LENGTH, '0')[:_LENGTH]}"


def is_name(name: str) -> bool:
    """Return whether the name is one of `name_for`; the controller writes no other ConfigMap, whatever a pod claims."""
    return _NAME.fullmatch(name) is not None


def variables(name: str, spec: JobSpec) -> list[dict[str, Any]]:
    """Return the variables that admission adds to the first container."""

    def reference(key: str, *, optional: bool = False) -> dict[str, Any]:
        source = {"name": name, "key": key, **({"optional": True} if optional else {})}
        return {"name": key, "valueFrom": {"configMapKeyRef": source}}

    return [
        *(reference(key) for key in VISIBLE),
        reference(SIMULATED, optional=True),
        {"name": MEMORY_VARIABLE, "value": MEMORY_DIRECTORY},
        {"name": LIMIT_VARIABLE, "value": limit_text(spec)},
        *({"name": name, "value": value} for name, value in compute_variables(spec.gpu_compute).items()),
    ]


def volume() -> dict[str, Any]:
    """Return the volume that the pod shares with its node's agent.

    It is not in memory: such a mount would be invisible to an agent that was started before it.
    """
    return {"name": MEMORY_VOLUME, "emptyDir": {"sizeLimit": "1Mi"}}


def mount() -> dict[str, Any]:
    """Return the first container's mount of the volume."""
    return {"name": MEMORY_VOLUME, "mountPath": MEMORY_DIRECTORY}


def config_map(pod: PodView, name: str, assignment: DeviceAssignment) -> Write:
    """Return the request that fills the pod's ConfigMap, or overwrites that of an earlier assignment."""
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": pod.namespace,
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}],
        },
        "data": _data(assignment),
    }
    path = join("/api/v1/namespaces", pod.namespace, "configmaps", name)
    path = with_query(path, fieldManager=labels.FIELD_MANAGER, force="true")
    about = f"{pod.namespace}/{name}"
    return Write(verb="PATCH", path=path, about=about, lane=Lane.ADMIT, body=body, content_type=APPLY_PATCH)


def with_assignment(body: dict[str, Any], spec: JobSpec, assignment: DeviceAssignment) -> dict[str, Any]:
    """Return the pod of an ElasticJob's worker with its shared GPUs."""
    pod = {**body["spec"]}
    main = {**pod["containers"][0]}
    values = {
        **_data(assignment),
        MEMORY_VARIABLE: MEMORY_DIRECTORY,
        LIMIT_VARIABLE: limit_text(spec),
        **compute_variables(spec.gpu_compute),
    }
    kept = [variable for variable in main.get("env") or [] if variable.get("name") not in values]
    main["env"] = [*kept, *({"name": name, "value": value} for name, value in values.items())]
    main["volumeMounts"] = [*(main.get("volumeMounts") or []), mount()]
    pod["volumes"] = [*(pod.get("volumes") or []), volume()]
    pod["containers"] = [main, *pod["containers"][1:]]
    notes = {**body["metadata"]["annotations"], labels.GPUS: ",".join(assignment.note.gpus)}
    return {**body, "metadata": {**body["metadata"], "annotations": notes}, "spec": pod}


def _data(assignment: DeviceAssignment) -> dict[str, str]:
    gpus = ",".join(assignment.note.gpus)
    simulated = {SIMULATED: ":".join(assignment.simulated)} if assignment.simulated else {}
    return {**dict.fromkeys(VISIBLE, gpus), **simulated}
