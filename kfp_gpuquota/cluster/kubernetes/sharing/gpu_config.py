"""How a pod that shares GPUs learns which: from a ConfigMap, for nobody knows it when the pod is created. Pure.

Admission adds the references, the controller fills the ConfigMap before the gate opens, and the kubelet starts no
container without it. It belongs to the pod and goes with it. What is known at once stands in the variables themselves.
All of it is for the pod's first container, as RUNAI_GPU_MEMORY_LIMIT is.

| variable                                     | from                                                             |
|----------------------------------------------|------------------------------------------------------------------|
| NVIDIA_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES | the ConfigMap: UUIDs of the GPUs that its reservations hold      |
| ELASTIC_SIMULATED_DEVICES                    | the ConfigMap, on nodes with simulated devices                   |
| ELASTIC_MEMORY_DIR                           | a volume of the pod, where the node's agent says what it may use |
| RUNAI_GPU_MEMORY_LIMIT                       | its limit, or its request where it has none                      |

An ElasticJob's worker is created when its GPUs are known, so its variables hold them and there is no ConfigMap.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.api.annotations import LIMIT_VARIABLE
from kfp_gpuquota.api.share import limit_text
from kfp_gpuquota.cluster.kubernetes.client.async_client import APPLY_PATCH
from kfp_gpuquota.cluster.kubernetes.client.request import Lane, Write
from kfp_gpuquota.cluster.kubernetes.objects import labels

if TYPE_CHECKING:
    from kfp_gpuquota.api import JobSpec
    from kfp_gpuquota.cluster.kubernetes.convert.pods import PodView
    from kfp_gpuquota.cluster.kubernetes.sharing.reservations import DeviceAssignment

VISIBLE: Final = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
SIMULATED: Final = "ELASTIC_SIMULATED_DEVICES"
MEMORY_VARIABLE: Final = "ELASTIC_MEMORY_DIR"
MEMORY_DIRECTORY: Final = "/var/run/gpuquota/memory"
MEMORY_VOLUME: Final = "gpuquota-memory"
_LENGTH: Final = 16
_NAME: Final = re.compile(rf"gpuquota-gpu-[0-9a-f]{{{_LENGTH}}}")


def name_for(review: str) -> str:
    """The ConfigMap's name, from the review's uid: a pod that is named by a prefix has no name of its own yet."""
    return f"gpuquota-gpu-{review.replace('-', '').lower().ljust(_LENGTH, '0')[:_LENGTH]}"


def is_name(name: str) -> bool:
    """Whether it can be one of ours. The controller writes no ConfigMap of another name, whatever a pod says."""
    return _NAME.fullmatch(name) is not None


def variables(name: str, spec: JobSpec) -> list[dict[str, Any]]:
    """What admission gives the first container."""

    def reference(key: str, *, optional: bool = False) -> dict[str, Any]:
        source = {"name": name, "key": key, **({"optional": True} if optional else {})}
        return {"name": key, "valueFrom": {"configMapKeyRef": source}}

    return [
        *(reference(key) for key in VISIBLE),
        reference(SIMULATED, optional=True),
        {"name": MEMORY_VARIABLE, "value": MEMORY_DIRECTORY},
        {"name": LIMIT_VARIABLE, "value": limit_text(spec)},
    ]


def volume() -> dict[str, Any]:
    """A folder that the pod and its node's agent share. Not in memory: a mount of its own would be hidden from an agent
    that was there before it.
    """
    return {"name": MEMORY_VOLUME, "emptyDir": {"sizeLimit": "1Mi"}}


def mount() -> dict[str, Any]:
    """Where the first container finds it."""
    return {"name": MEMORY_VOLUME, "mountPath": MEMORY_DIRECTORY}


def config_map(pod: PodView, name: str, assignment: DeviceAssignment) -> Write:
    """Fill the pod's ConfigMap, or say anew what one holds that was filled for another place."""
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
    path = f"/api/v1/namespaces/{pod.namespace}/configmaps/{name}?fieldManager={labels.FIELD_MANAGER}&force=true"
    about = f"{pod.namespace}/{name}"
    return Write(verb="PATCH", path=path, about=about, lane=Lane.ADMIT, body=body, content_type=APPLY_PATCH)


def with_assignment(body: dict[str, Any], spec: JobSpec, assignment: DeviceAssignment) -> dict[str, Any]:
    """The pod of an ElasticJob's worker, with the GPUs that it shares."""
    pod = {**body["spec"]}
    main = {**pod["containers"][0]}
    values = {**_data(assignment), MEMORY_VARIABLE: MEMORY_DIRECTORY, LIMIT_VARIABLE: limit_text(spec)}
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
