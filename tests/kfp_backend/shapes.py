"""Objects as KFP 2.17 and Argo 4.0 create them. Pure; the recordings are the measure (test_shapes.py)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

Json = dict[str, Any]

API_VERSION: Final = "argoproj.io/v1alpha1"
RETRY_LIMIT: Final = 2
# What KFP ships in the ConfigMap workflow-controller-configmap.
TEMPLATE_DEFAULTS: Final = {
    "inputs": {},
    "metadata": {},
    "outputs": {},
    "retryStrategy": {"limit": str(RETRY_LIMIT), "retryPolicy": "OnError"},
}
TTL_S: Final = 3600
EXECUTOR: Final = "system-container-impl"
RETRY_EXECUTOR: Final = "retry-system-container-impl"
SCRATCH: Final = ("gcs", "s3", "minio", "dot-local", "dot-cache", "dot-config")
_EMISSARY: Final = (
    "/var/run/argo/argoexec",
    "emissary",
    "--loglevel",
    "info",
    "--log-format",
    "text",
    "--gloglevel",
    "0",
)
_UNPRIVILEGED: Final = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
_ARGOEXEC_USER: Final = {**_UNPRIVILEGED, "runAsNonRoot": True, "runAsUser": 65532}
_SECRET: Final = "mlpipeline-minio-artifact"


@dataclass(frozen=True)
class Step:
    """A task of a pipeline: its compiled container, and the executor input that KFP's driver makes for it."""

    name: str
    container: Json
    executor_input: Json = field(default_factory=dict)
    retries: int | None = None  # set_retry
    timeout_s: int | None = None  # set_timeout


def node_id(workflow: str, name: str) -> str:
    """Argo's: the workflow's name and the 32-bit FNV-1a hash of the node's name."""
    digest = 0x811C9DC5
    for byte in name.encode():
        digest = (digest ^ byte) * 0x01000193 & 0xFFFFFFFF
    return workflow if name == workflow else f"{workflow}-{digest}"


def pod_name(workflow: str, name: str, template: str) -> str:
    """Format v2: the template stands between the workflow's name and the hash."""
    return f"{workflow}-{template}-{node_id(workflow, name).rpartition('-')[2]}"


def moment(at: float) -> str:
    """Kubernetes' Time."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def workflow(name: str, run_id: str, *, defaults: bool = True) -> Json:
    """A run's Workflow as KFP's API server creates it; `defaults`: Argo has KFP's templateDefaults."""
    v2 = {"pipelines.kubeflow.org/v2_component": "true"}
    return {
        "apiVersion": API_VERSION,
        "kind": "Workflow",
        "metadata": {
            "name": name,
            "generateName": f"{name.rpartition('-')[0]}-",
            "annotations": {
                "pipelines.kubeflow.org/run_name": name,
                "workflows.argoproj.io/pod-name-format": "v2",
            },
            "labels": {"pipeline/runid": run_id},
        },
        "spec": {
            "entrypoint": "entrypoint",
            "podMetadata": {"annotations": v2, "labels": {"pipeline/runid": run_id, **v2}},
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "serviceAccountName": "pipeline-runner",
            **({"templateDefaults": TEMPLATE_DEFAULTS} if defaults else {}),
            "ttlStrategy": dict.fromkeys(
                ("secondsAfterCompletion", "secondsAfterFailure", "secondsAfterSuccess"), TTL_S
            ),
        },
    }


def executor_pod(made_by: Json, node: str, step: Step, *, template: str = EXECUTOR) -> Json:
    """The pod of one attempt of a step, as Argo creates it of KFP's template and the driver's patch."""
    meta = made_by["metadata"]
    identifier = node_id(meta["name"], node)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(meta["name"], node, template),
            "annotations": {
                "kubectl.kubernetes.io/default-container": "main",
                "pipelines.kubeflow.org/runtime-role": "launcher",
                "pipelines.kubeflow.org/v2_component": "true",
                "sidecar.istio.io/inject": "false",
                "workflows.argoproj.io/node-id": identifier,
                "workflows.argoproj.io/node-name": node,
            },
            "labels": {
                **made_by["spec"]["podMetadata"]["labels"],
                "workflows.argoproj.io/completed": "false",
                "workflows.argoproj.io/workflow": meta["name"],
            },
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": "Workflow",
                    "name": meta["name"],
                    "uid": meta["uid"],
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {
            **({"activeDeadlineSeconds": step.timeout_s} if step.timeout_s else {}),
            "containers": [_wait(identifier), _main(made_by, identifier, step)],
            "initContainers": [_init(identifier), _launcher_copy(identifier)],
            "restartPolicy": "Never",
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "serviceAccountName": made_by["spec"]["serviceAccountName"],
            "volumes": [
                *({"name": name, "emptyDir": {}} for name in ("var-run-argo", "tmp-dir-argo", "kfp-launcher")),
                *({"name": f"{name}-scratch", "emptyDir": {}} for name in SCRATCH),
                {"name": _SECRET, "secret": {"secretName": _SECRET}},
            ],
        },
    }


def _main(made_by: Json, identifier: str, step: Step) -> Json:
    labels = made_by["spec"]["podMetadata"]["labels"]
    launch = [
        "/kfp-launcher/launch",
        *("--pipeline_name", made_by["metadata"]["generateName"].rstrip("-")),
        *("--run_id", labels["pipeline/runid"]),
        *("--execution_id", "4"),
        *("--executor_input", json.dumps(step.executor_input)),
        *("--component_spec", "{}"),
        *("--pod_name", "$(KFP_POD_NAME)"),
        *("--pod_uid", "$(KFP_POD_UID)"),
        *("--ml_pipeline_server_address", "ml-pipeline.kubeflow.svc.cluster.local"),
        *("--ml_pipeline_server_port", "8887"),
        *("--mlmd_server_address", "metadata-grpc-service.kubeflow.svc.cluster.local"),
        *("--mlmd_server_port", "8080"),
        *("--publish_logs", "true"),
        *("--publish_logs", "true"),
        "--",
    ]
    return {
        "name": "main",
        "image": step.container["image"],
        "imagePullPolicy": "IfNotPresent",
        "command": [*_EMISSARY, "--", *launch],
        "args": [*step.container.get("command", []), *step.container.get("args", [])],
        "env": [
            *step.container.get("env", []),
            *_own_name("KFP"),
            {"name": "ARGO_CONTAINER_NAME", "value": "main"},
            *_argo_environment(identifier),
        ],
        "envFrom": [{"configMapRef": {"name": "metadata-grpc-configmap", "optional": True}}],
        "resources": kubernetes_resources(step.container.get("resources", {})),
        "securityContext": dict(_UNPRIVILEGED),
        "volumeMounts": [
            {"name": "kfp-launcher", "mountPath": "/kfp-launcher"},
            *({"name": f"{name}-scratch", "mountPath": f"/{name.replace('dot-', '.')}"} for name in SCRATCH),
            {"name": "var-run-argo", "mountPath": "/var/run/argo"},
        ],
    }


def kubernetes_resources(given: Json) -> Json:
    """A container's resources, of a compiled container's fields as KFP's driver reads them, or of a pod's."""
    found: Json = {part: given[part] for part in ("limits", "requests") if part in given}
    for name in ("cpu", "memory"):
        for part in ("limit", "request"):
            if amount := given.get(f"resource{name.title()}{part.title()}"):
                found.setdefault(f"{part}s", {})[name] = amount
    return found


def _wait(identifier: str) -> Json:
    logging = ["--loglevel", "info", "--log-format", "text", "--gloglevel", "0"]
    scratch = [{"name": f"{name}-scratch", "mountPath": f"/mainctrfs/{name.replace('dot-', '.')}"} for name in SCRATCH]
    return {
        "name": "wait",
        "image": "localhost/argoexec:1",
        "imagePullPolicy": "IfNotPresent",
        "command": ["argoexec", "wait", *logging],
        "env": [*_own_name("ARGO"), {"name": "ARGO_CONTAINER_NAME", "value": "wait"}, *_argo_environment(identifier)],
        "resources": {},
        "securityContext": dict(_ARGOEXEC_USER),
        "volumeMounts": [
            {"name": _SECRET, "mountPath": f"/argo/secret/{_SECRET}", "readOnly": True},
            {"name": "kfp-launcher", "mountPath": "/mainctrfs/kfp-launcher"},
            *scratch,
            {"name": "tmp-dir-argo", "mountPath": "/tmp", "subPath": "0"},
            {"name": "var-run-argo", "mountPath": "/var/run/argo"},
        ],
    }


def _init(identifier: str) -> Json:
    logging = ["--loglevel", "info", "--log-format", "text", "--gloglevel", "0"]
    return {
        "name": "init",
        "image": "localhost/argoexec:1",
        "command": ["argoexec", "init", *logging],
        "env": [*_own_name("ARGO"), {"name": "ARGO_CONTAINER_NAME", "value": "init"}, *_argo_environment(identifier)],
        "resources": {},
        "securityContext": dict(_ARGOEXEC_USER),
        "volumeMounts": [
            {"name": _SECRET, "mountPath": f"/argo/secret/{_SECRET}", "readOnly": True},
            {"name": "var-run-argo", "mountPath": "/var/run/argo"},
        ],
    }


def _launcher_copy(identifier: str) -> Json:
    return {
        "name": "kfp-launcher",
        "image": "localhost/kfp-launcher:1",
        "command": ["launcher-v2"],
        "args": ["--copy", "/kfp-launcher/launch", "--log_level", "1", "--publish_logs", "true"],
        "env": [{"name": "ARGO_CONTAINER_NAME", "value": "kfp-launcher"}, *_argo_environment(identifier)],
        "resources": {
            "limits": {"cpu": "500m", "memory": "256Mi"},
            "requests": {"cpu": "100m", "memory": "256Mi"},
        },
        "securityContext": {**_UNPRIVILEGED, "runAsNonRoot": True},
        "volumeMounts": [
            {"name": "kfp-launcher", "mountPath": "/kfp-launcher"},
            {"name": "var-run-argo", "mountPath": "/var/run/argo"},
        ],
    }


def _own_name(prefix: str) -> list[Json]:
    fields = {"NAME": "metadata.name", "UID": "metadata.uid"}
    return [
        {"name": f"{prefix}_POD_{suffix}", "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for suffix, path in fields.items()
    ]


def _argo_environment(identifier: str) -> list[Json]:
    values = {
        "ARGO_NODE_ID": identifier,
        "ARGO_INCLUDE_SCRIPT_OUTPUT": "false",
        "ARGO_DEADLINE": "0001-01-01T00:00:00Z",
        "ARGO_PROGRESS_FILE": "/var/run/argo/progress",
        "ARGO_PROGRESS_PATCH_TICK_DURATION": "1m0s",
        "ARGO_PROGRESS_FILE_TICK_DURATION": "3s",
    }
    return [{"name": name, "value": value} for name, value in values.items()]
