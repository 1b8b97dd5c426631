"""The pod template of a step's workers: a copy of the step's own pod with another command. Pure.

KFP sets the author's settings on the step's pod (environment, and by kfp-kubernetes volumes, secrets, tolerations, node
selectors, labels, pull secrets), and admission adds the namespace admin's. The workers do the step's work, so they get
all of these. Removed is exactly what Argo and the API server, and KFP for its own executor, add for the launcher
itself, by name. A rule by prefix was rejected: it would match names that users choose (KFP names the volume of a PVC
after its claim: `kfp-data`). The lists below were taken from pods of KFP 2.17 and Argo 4.0 (docs/pipelines.md describes
how).

The workers' image may have nothing but the step's command. So an init container copies the program that moves the
step's files and runs its command (`images/launcher/worker`) out of the image of the step's own pod, which is the
launcher's, as Argo and KFP copy theirs. It has the security context and the resources of the step's own container,
which was admitted with them in this namespace and runs in this image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.cluster.kubernetes.admission.device_visibility import NO_DEVICES
from kfp_gpuquota.dsl.spec.pod_volumes import NO_VOLUMES
from kfp_gpuquota.dsl.worker.start import POD_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Json = dict[str, Any]

MAIN: Final = "main"
MOUNT: Final = "/var/run/gpuquota/relay"
VOLUME: Final = "gpuquota-relay"
PROGRAM: Final = "/opt/gpuquota/bin/gpuquota-worker"
"""Where the launcher's image has the workers' program."""
PROGRAM_MOUNT: Final = "/var/run/gpuquota/program"
_PROGRAM_VOLUME: Final = "gpuquota-program"
_FOLDERS_VOLUME: Final = "gpuquota-folders"
LAUNCHER_PREFIX: Final = "GPUQUOTA_"
# Domains of labels and annotations by which Argo and KFP find the pods that they have created: with these a worker's
# pod would be treated as a pod of the Workflow.
LAUNCHER_DOMAINS: Final = frozenset({"workflows.argoproj.io", "pipelines.kubeflow.org", "pipeline"})

# Fields of a pod's spec that the API server, the scheduler or KFP fill in for this one pod. The controller sets a
# worker's node, grace period and restart policy; its time limit is the job's (`max_runtime`).
_LAUNCHERS_SPEC: Final = frozenset({
    "activeDeadlineSeconds", "containers", "ephemeralContainers", "hostname", "initContainers", "nodeName", "overhead",
    "preemptionPolicy", "priority", "resources", "restartPolicy", "schedulingGates", "schedulingGroup",
    "serviceAccount", "shareProcessNamespace", "subdomain", "terminationGracePeriodSeconds", "volumes", "workloadRef",
})  # fmt: skip
_LAUNCHERS_CONTAINER: Final = frozenset({
    "args", "command", "env", "envFrom", "image", "livenessProbe", "name", "readinessProbe", "resources",
    "resizePolicy", "startupProbe", "volumeMounts",
})  # fmt: skip
_LAUNCHERS_VARIABLES: Final = frozenset({
    "ARGO_CONTAINER_NAME", "ARGO_DEADLINE", "ARGO_INCLUDE_SCRIPT_OUTPUT", "ARGO_NODE_ID", "ARGO_POD_NAME",
    "ARGO_POD_UID", "ARGO_PROGRESS_FILE", "ARGO_PROGRESS_FILE_TICK_DURATION", "ARGO_PROGRESS_PATCH_TICK_DURATION",
    "ARGO_TEMPLATE", "ARGO_WORKFLOW_NAME", "ARGO_WORKFLOW_UID",
})  # fmt: skip
# Empty volumes through which Argo's and KFP's executors reach the step's container. All other empty volumes are kept:
# each worker gets its own (KFP mounts artifacts' paths as such, so that images without root can write there).
_LAUNCHERS_EMPTY_VOLUMES: Final = frozenset({"kfp-launcher", "tmp-dir-argo", "var-run-argo"})
_SERVICE_ACCOUNT_PATH: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
# KFP's launcher sets these for its child at run time, where the backend has a CA bundle for the object store.
_CA_VARIABLES: Final = ("AWS_CA_BUNDLE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE")


def worker_template(
    step_pod: Json,
    image: str,
    secret: str,
    *,
    resources: Json | None = None,
    volumes: Json = NO_VOLUMES,
    environment: Mapping[str, str] | None = None,
    folders: Iterable[str] = (),
) -> Json:
    """Return a pod template for workers in `image` ("": the step's own) that find their relay in the Secret `secret`.

    `resources` are those of a worker (None: those of the step's own pod), and `volumes` those that only workers mount.
    `environment` is the launcher's own, from which CA bundles on mounted volumes are passed on. `folders` are those
    that the step's files need; they are volumes unless they are on one, because an image may have no folder that its
    user may write to.
    """
    spec = step_pod.get("spec", {})
    own = _container(spec)
    mounts = [mount for mount in own.get("volumeMounts", []) if mount["mountPath"] != _SERVICE_ACCOUNT_PATH]
    shared = _volumes(spec, {mount["name"] for mount in mounts})
    names = {volume["name"] for volume in shared}
    mounts = [*(mount for mount in mounts if mount["name"] in names), *volumes["mounts"]]
    folder_mounts = _folder_mounts(folders, mounts)
    resources = own.get("resources", {}) if resources is None else resources
    container = {
        **{field: value for field, value in own.items() if field not in _LAUNCHERS_CONTAINER},
        "name": MAIN,
        "image": image or own.get("image", ""),
        "command": [f"{PROGRAM_MOUNT}/{PROGRAM.rpartition('/')[2]}", "run", MOUNT],
        "env": [
            *(entry for entry in own.get("env", []) if _is_authors(entry)),
            *_ca_bundles(own, mounts, environment or {}),
            {"name": POD_NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        "volumeMounts": [
            *mounts,
            *folder_mounts,
            {"name": VOLUME, "mountPath": MOUNT, "readOnly": True},
            {"name": _PROGRAM_VOLUME, "mountPath": PROGRAM_MOUNT, "readOnly": True},
        ],
    }
    if sources := own.get("envFrom"):
        container["envFrom"] = sources
    if resources:
        container["resources"] = resources
    return {
        "metadata": _metadata(step_pod.get("metadata", {})),
        "spec": {
            **{field: value for field, value in spec.items() if field not in _LAUNCHERS_SPEC},
            "initContainers": [_program_copy(own)],
            "containers": [container],
            "restartPolicy": "Never",
            "volumes": [
                *shared,
                *volumes["volumes"],
                *([{"name": _FOLDERS_VOLUME, "emptyDir": {}}] if folder_mounts else []),
                {"name": VOLUME, "secret": {"secretName": secret, "defaultMode": 0o444}},
                {"name": _PROGRAM_VOLUME, "emptyDir": {}},
            ],
        },
    }


def _program_copy(own: Json) -> Json:
    kept = ("image", "imagePullPolicy", "resources", "securityContext")
    return {
        **{field: own[field] for field in kept if field in own},
        "name": _PROGRAM_VOLUME,
        "command": [PROGRAM, "install", PROGRAM_MOUNT],
        "volumeMounts": [{"name": _PROGRAM_VOLUME, "mountPath": PROGRAM_MOUNT}],
    }


def _folder_mounts(folders: Iterable[str], mounts: list[Json]) -> list[Json]:
    """Return mounts of one empty volume at the folders that are on no volume; a folder includes those below it."""
    found: list[str] = []
    for folder in sorted(set(folders)):
        if not any(_is_below(folder, each) for each in (*found, *(mount["mountPath"] for mount in mounts))):
            found.append(folder)
    return [
        {"name": _FOLDERS_VOLUME, "mountPath": folder, "subPath": str(number)} for number, folder in enumerate(found)
    ]


def _container(spec: Json) -> Json:
    """Return the container that runs the user's code, which KFP names "main"."""
    containers: list[Json] = spec.get("containers", [])
    return next((each for each in containers if each["name"] == MAIN), containers[0] if containers else {})


def _metadata(own: Json) -> Json:
    def kept(part: str) -> Json:
        given: Json = own.get(part) or {}
        return {name: text for name, text in given.items() if name.partition("/")[0] not in LAUNCHER_DOMAINS}

    return {part: found for part in ("labels", "annotations") if (found := kept(part))}


def _volumes(spec: Json, mounted: set[str]) -> list[Json]:
    """Return the volumes that the step's container mounts, except those of Argo's and KFP's executors."""
    return [
        volume
        for volume in spec.get("volumes", [])
        if volume["name"] in mounted and not ("emptyDir" in volume and volume["name"] in _LAUNCHERS_EMPTY_VOLUMES)
    ]


def _is_authors(entry: Json) -> bool:
    """Return whether the author set the variable: not the launcher, and not admission for pods without GPUs."""
    return (
        entry != NO_DEVICES
        and entry["name"] not in _LAUNCHERS_VARIABLES
        and not entry["name"].startswith(LAUNCHER_PREFIX)
    )


def _ca_bundles(own: Json, mounts: list[Json], environment: Mapping[str, str]) -> list[Json]:
    """Return the CA bundle variables that KFP sets at run time, where the workers mount the same file."""
    given = {entry["name"] for entry in own.get("env", [])}
    return [
        {"name": name, "value": environment[name]}
        for name in _CA_VARIABLES
        if name not in given and any(_is_below(environment.get(name, ""), mount["mountPath"]) for mount in mounts)
    ]


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
