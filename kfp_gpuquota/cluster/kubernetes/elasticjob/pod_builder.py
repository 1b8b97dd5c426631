"""The pod of one worker, and what it mounts, made from a job's template: pure.

What the template says stands, but for what makes it a worker of this job: its node, its GPUs, its grace period, that
nothing restarts it in place (the membership must see each process's end), and the variables of docs/contracts.md.

Users write the template, and the pod is made with the controller's rights, so it is not reviewed as a user's pod is:
labels and annotations of ours are taken off it (a forged one would say which devices the pod holds), and GPUs of other
containers than the first, which nobody would count.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api.annotations import SHARE_ANNOTATIONS
from kfp_gpuquota.cluster.kubernetes.admission.device_visibility import hidden_in_template
from kfp_gpuquota.cluster.kubernetes.convert.requests import REQUIRED, node_term
from kfp_gpuquota.cluster.kubernetes.convert.stand_in_names import pool_of
from kfp_gpuquota.cluster.kubernetes.objects import labels

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.api import Worker
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob
    from kfp_gpuquota.cluster.records import JobRecord

Body = dict[str, Any]

SECRET_DIRECTORY: Final = "/var/run/secrets/gpuquota.dev"  # noqa: S105 - a path
CHECKPOINT_DIRECTORY: Final = "/var/lib/gpuquota/checkpoints"
RUNTIME_DIRECTORY: Final = "/opt/gpuquota/runtime"
ISTIO_INJECT: Final = "sidecar.istio.io/inject"
# Readable by all in the container: its user may be any, and no other process sees this directory.
SECRET_MODE: Final = 0o444


class PodSettings(msgspec.Struct, kw_only=True):
    """What the controller adds to all workers. `authority` changes when the certificate authority is renewed.

    `coordinator` is the membership service's base URL, as workers reach it; with `shards` (base URLs of processes of
    its own) each job has one of these. `runtime_image` holds `elastic_runtime` at RUNTIME_DIRECTORY, for training
    images that lack it; "" mounts nothing.
    """

    coordinator: str
    authority: bytes = b""
    key: bytes = b""
    runtime_image: str = ""
    shards: tuple[str, ...] = ()


def token_of(job_uid: str, key: bytes) -> str:
    """The job's token, derived from the controller's key: a restarted controller need not read it back."""
    return hmac.new(key, job_uid.encode(), hashlib.sha256).hexdigest()


def secret_name(job: ElasticJob) -> str:
    """The Secret that the job's workers mount. Its name is that of no other job, so it is made and never read back."""
    return f"{job.metadata.name}-{job.metadata.uid[:8]}-membership"


def pod_name(job: str, index: int) -> str:
    """A worker's pod."""
    return f"{job}-{index}"


def owner_of(job: ElasticJob) -> Body:
    """What belongs to a job goes with it."""
    meta = job.metadata
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "ElasticJob",
        "name": meta.name,
        "uid": meta.uid,
        "controller": True,
    }


def membership_secret(job: ElasticJob, settings: PodSettings) -> Body:
    """Its token, and who vouches for the service."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(job),
            "namespace": job.metadata.namespace,
            "labels": {labels.JOB: job.metadata.name},
            "ownerReferences": [owner_of(job)],
        },
        "type": "Opaque",
        "stringData": {"token": token_of(job.metadata.uid, settings.key), "ca.crt": settings.authority.decode()},
    }


def secret_digest(job_uid: str, settings: PodSettings) -> str:
    """Return what identifies the content of a job's Secret, which is never read back. It reveals nothing of it."""
    content = token_of(job_uid, settings.key).encode() + settings.authority
    return hashlib.sha256(content).hexdigest()[:16]


def worker_pod(job: ElasticJob, record: JobRecord, worker: Worker, settings: PodSettings) -> Body:
    """The worker's pod, sent to its node."""
    template: Body = msgspec.json.decode(job.spec.template)
    spec: Body = dict(template.get("spec") or {})
    containers = [dict(container) for container in spec.get("containers") or []]
    main = containers[0]
    _mount(spec, main, job, settings)
    for container in (*containers[1:], *(spec.get("initContainers") or [])):
        container["resources"] = _without_devices(container.get("resources") or {})
    main["env"] = _environment(main.get("env") or [], job, record, worker, settings)
    if not record.spec.shared:
        main["resources"] = _resources(main.get("resources") or {}, record.spec.worker_gpus)
    spec.pop("nodeName", None)
    spec |= {
        "containers": [main, *(hidden_in_template(one) for one in containers[1:])],
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": max(1, int(record.spec.grace_period_s)),
        **_located(spec, worker.node),
    }
    if spec.get("initContainers"):
        spec["initContainers"] = [hidden_in_template(one) for one in spec["initContainers"]]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _metadata(template, job, record, worker), "spec": spec}


def _metadata(template: Body, job: ElasticJob, record: JobRecord, worker: Worker) -> Body:
    given = template.get("metadata") or {}
    reason = record.status.reason.message if record.status.reason else ""
    return {
        "name": pod_name(job.metadata.name, worker.index),
        "namespace": job.metadata.namespace,
        "labels": {
            **_of_others(given.get("labels") or {}),
            labels.JOB: job.metadata.name,
            labels.WORKER: str(worker.index),
            labels.ATTEMPT: str(record.attempt),
            ISTIO_INJECT: "false",  # a sidecar would stand between collectives, and would outlive the training
        },
        "annotations": {
            **_of_others(given.get("annotations") or {}),
            labels.DEVICES: ",".join(map(str, worker.devices)),
            labels.REASON: reason,
            ISTIO_INJECT: "false",
            **({labels.OPENED: worker.node} if pool_of(worker.node) else {}),
        },
        "ownerReferences": [owner_of(job)],
    }


def _of_others(given: Body) -> Body:
    """Labels or annotations of a template without those that this project reads: the job's own fields say it."""
    return {
        name: text
        for name, text in given.items()
        if name.partition("/")[0] != labels.GROUP and name not in SHARE_ANNOTATIONS
    }


def _without_devices(given: Body) -> Body:
    """Resources without NVIDIA's extended resources."""
    return {
        part: {name: amount for name, amount in amounts.items() if not name.startswith(f"{labels.VENDOR}/")}
        if part in {"limits", "requests"} and isinstance(amounts, dict)
        else amounts
        for part, amounts in given.items()
    }


def _resources(given: Body, gpus: int) -> Body:
    count = {labels.GPU_RESOURCE: str(gpus)}
    return {
        **given,
        "limits": {**(given.get("limits") or {}), **count},
        "requests": {**(given.get("requests") or {}), **count},
    }


def _environment(
    given: Iterable[Body], job: ElasticJob, record: JobRecord, worker: Worker, settings: PodSettings
) -> list[Body]:
    """The job's own variables, and those of a worker, which win: they say who it is."""
    values = {
        "JOB_NAME": job.metadata.name,
        "JOB_UUID": job.metadata.uid,
        "POD_INDEX": str(worker.index),
        "RUNAI_NUM_OF_GPUS": str(record.spec.worker_gpus),
        "ELASTIC_COORDINATOR": f"{settings.coordinator.rstrip('/')}/v1/membership/{job.metadata.uid}",
        "ELASTIC_TOKEN_FILE": f"{SECRET_DIRECTORY}/token",
        "ELASTIC_CA_FILE": f"{SECRET_DIRECTORY}/ca.crt",
        "ELASTIC_WORKER_ID": worker.id,
    }
    if job.spec.checkpoint is not None:
        values["ELASTIC_CHECKPOINT_DIR"] = CHECKPOINT_DIRECTORY
    kept = [variable for variable in given if variable.get("name") not in values]
    if settings.runtime_image:
        kept = _with_runtime(kept)
    return [*kept, *({"name": name, "value": value} for name, value in values.items())]


def _with_runtime(variables: list[Body]) -> list[Body]:
    """Behind what the image brings: a training image that has its own `elastic_runtime` uses that one."""
    own = next((v.get("value", "") for v in variables if v.get("name") == "PYTHONPATH"), "")
    others = [v for v in variables if v.get("name") != "PYTHONPATH"]
    return [*others, {"name": "PYTHONPATH", "value": f"{own}:{RUNTIME_DIRECTORY}" if own else RUNTIME_DIRECTORY}]


def _mount(spec: Body, main: Body, job: ElasticJob, settings: PodSettings) -> None:
    volumes, mounts = list(spec.get("volumes") or []), list(main.get("volumeMounts") or [])

    def add(name: str, path: str, source: Body, **more: Any) -> None:
        if all(mount.get("mountPath") != path for mount in mounts):
            volumes.append({"name": name, **source})
            mounts.append({"name": name, "mountPath": path, **more})

    secret = {"secretName": secret_name(job), "defaultMode": SECRET_MODE}
    add("gpuquota-membership", SECRET_DIRECTORY, {"secret": secret}, readOnly=True)
    # The default of 64 MiB is less than what data loaders with a few workers put there.
    add("gpuquota-shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})  # noqa: S108 - of the container
    if job.spec.checkpoint is not None:
        claim = {"persistentVolumeClaim": {"claimName": job.spec.checkpoint.claim_name}}
        add("gpuquota-checkpoints", CHECKPOINT_DIRECTORY, claim, subPath=job.metadata.uid)
    if settings.runtime_image:
        add("gpuquota-runtime", RUNTIME_DIRECTORY, {"emptyDir": {}}, readOnly=True)
        spec["initContainers"] = [_runtime_copy(settings.runtime_image), *(spec.get("initContainers") or [])]
    spec["volumes"], main["volumeMounts"] = volumes, mounts


def _runtime_copy(image: str) -> Body:
    return {
        "name": "gpuquota-runtime",
        "image": image,
        "command": ["cp", "-r", f"{RUNTIME_DIRECTORY}/.", "/copy"],
        "volumeMounts": [{"name": "gpuquota-runtime", "mountPath": "/copy"}],
        "securityContext": {  # as pod security `restricted` wants it
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _located(spec: Body, node: str) -> Body:
    """The fields that send the pod to its node, or into its autoscaled pool."""
    if pool := pool_of(node):
        return {"nodeSelector": {**(spec.get("nodeSelector") or {}), labels.POOL: pool}}
    return {"affinity": _pinned(spec.get("affinity") or {}, node)}


def _pinned(affinity: Body, node: str) -> Body:
    """The affinity with the node in every required term; terms are alternatives."""
    node_affinity = affinity.get("nodeAffinity") or {}
    terms = (node_affinity.get(REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    pinned = [{**term, "matchFields": [*(term.get("matchFields") or []), node_term(node)]} for term in terms]
    return {**affinity, "nodeAffinity": {**node_affinity, REQUIRED: {"nodeSelectorTerms": pinned}}}
