"""PersistentVolumeClaims and ephemeral volumes of a step: its workers mount them, its launcher does not. Pure.

KFP mounts the volumes of kfp-kubernetes on the step's own pod, which runs the launcher. A ReadWriteOnce volume that the
launcher holds can be mounted on no other node, so a worker that needs another node would wait for its own launcher
until the step is cancelled; a ReadWriteOncePod volume could never be mounted by a worker. So routing takes them off the
step's pod, and passes them to the launcher as an argument. Rejected: an environment variable, because KFP fills in
parameters only in commands and arguments, and leaves variables out of its cache key, which has the claims' names.

A claim's name may be a pipeline parameter or another task's output. Its reference has the form of a task's input, so it
becomes an input of the step's tasks, and KFP fills it into the argument.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Json = dict[str, Any]

ARGUMENT: Final = "--volumes="
INPUT: Final = "gpuquota-volume-"
MOVED: Final = ("pvcMount", "genericEphemeralVolume")
NO_VOLUMES: Final[Json] = {"volumes": [], "mounts": []}


def move_to_workers(container: Json, config: Json, tasks: Iterable[Json]) -> None:
    """Move the volumes of an executor's Kubernetes `config` to its routed `container`. All arguments are changed.

    `tasks` are the pipeline's tasks that use the executor.
    """
    found: Json = {"volumes": {}, "mounts": []}
    inputs: Json = {}
    for mount in config.pop("pvcMount", []):
        name = _claim_name(mount, inputs)
        found["volumes"][name] = {"name": name, "persistentVolumeClaim": {"claimName": name}}
        sub_path = {"subPath": mount["subPath"]} if mount.get("subPath") else {}
        found["mounts"].append({"name": name, "mountPath": mount["mountPath"], **sub_path})
    for volume in config.pop("genericEphemeralVolume", []):
        name = volume["volumeName"]
        found["volumes"][name] = {"name": name, "ephemeral": {"volumeClaimTemplate": _claim_template(volume)}}
        found["mounts"].append({"name": name, "mountPath": volume["mountPath"]})
    for task in tasks if inputs else ():
        task.setdefault("inputs", {}).setdefault("parameters", {}).update(inputs)
    text = json.dumps({"volumes": list(found["volumes"].values()), "mounts": found["mounts"]}, sort_keys=True)
    container["args"].insert(0, ARGUMENT + text)


def parsed(text: str | None) -> Json:
    """Return the workers' `volumes` and `mounts` in Kubernetes' format. Raises InvalidFieldError."""
    if not text:
        return NO_VOLUMES
    try:
        found = json.loads(text)
        if isinstance(found, dict) and all(isinstance(found.get(part), list) for part in NO_VOLUMES):
            # KFP may have filled in the same claim twice; a pod names each volume once.
            return {**found, "volumes": list({volume["name"]: volume for volume in found["volumes"]}.values())}
    except (KeyError, TypeError, ValueError):
        pass
    raise InvalidFieldError("--volumes", text, "it must be JSON with the lists 'volumes' and 'mounts'")


def tasks_of(spec: Json, label: str) -> Iterator[Json]:
    """Yield the tasks of a pipeline (KFP's PipelineSpec as JSON) that use this executor."""
    components: Json = spec.get("components", {})
    for dag in (part["dag"] for part in (spec.get("root", {}), *components.values()) if "dag" in part):
        for task in dag.get("tasks", {}).values():
            if components.get(task["componentRef"]["name"], {}).get("executorLabel") == label:
                yield task


def _claim_name(mount: Json, inputs: Json) -> str:
    """Return the claim's name, or the placeholder of a new one of `inputs` where its name is determined in the run."""
    given: Json = mount.get("pvcNameParameter") or mount  # compilers before kfp-kubernetes 2.13 write only the latter
    runtime: Json = given.get("runtimeValue") or given
    if constant := runtime.get("constant"):
        return str(constant)
    source = {field: given[field] for field in ("componentInputParameter", "taskOutputParameter") if field in given}
    name = next((each for each, reference in inputs.items() if reference == source), f"{INPUT}{len(inputs)}")
    inputs[name] = source
    return f"{{{{$.inputs.parameters['{name}']}}}}"


def _claim_template(volume: Json) -> Json:
    """Return the claim of an ephemeral volume as KFP's driver makes it."""
    spec: Json = {"accessModes": volume["accessModes"], "resources": {"requests": {"storage": volume["size"]}}}
    if not volume.get("defaultStorageClass"):
        spec["storageClassName"] = volume.get("storageClassName", "")
    metadata = {part: volume.get("metadata", {}).get(part) for part in ("labels", "annotations")}
    return {"metadata": {part: given for part, given in metadata.items() if given}, "spec": spec}
