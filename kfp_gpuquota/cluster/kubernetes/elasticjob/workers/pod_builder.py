"""Builds the pod of a worker, and the Secret that it mounts, from a job's template. Pure.

The template is kept, except for the fields that make it a worker of this job: its node, its GPUs, its grace period, the
restart policy (Never: the membership must observe each process's exit), and the variables of docs/contracts.md.

Users write the template, but the pod is created with the controller's rights, so the webhook does not review it as a
user's pod. Therefore this project's labels and annotations are removed (a forged one could claim devices), and so are
GPUs of containers other than the first, which would not be counted.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api.affinity import GPU_PRODUCT
from kfp_gpuquota.api.annotations import SHARE_ANNOTATIONS, as_annotations
from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.api.resources import CountedJobSpec
from kfp_gpuquota.cluster.kubernetes.admission.device_visibility import hidden_in_template
from kfp_gpuquota.cluster.kubernetes.convert.owners import INDEX_ANNOTATION, JOB_LABEL, JOBSET_UID_LABEL
from kfp_gpuquota.cluster.kubernetes.convert.pods import pod_view
from kfp_gpuquota.cluster.kubernetes.convert.requests import PREFERRED, REQUIRED, node_term, outside_pools, preference
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import weights_text
from kfp_gpuquota.cluster.kubernetes.convert.stand_in_names import pool_of
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata, Pod, PodSpec
from kfp_gpuquota.errors import GpuQuotaError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kfp_gpuquota.api import JobSpec, Node, Worker
    from kfp_gpuquota.api.resources import Resources as Amounts
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob
    from kfp_gpuquota.engine.records import JobRecord

Body = dict[str, Any]

SECRET_DIRECTORY: Final = "/var/run/secrets/gpuquota.dev"  # noqa: S105 - a path
CHECKPOINT_DIRECTORY: Final = "/var/lib/gpuquota/checkpoints"
RUNTIME_DIRECTORY: Final = "/opt/gpuquota/runtime"
ISTIO_INJECT: Final = "sidecar.istio.io/inject"
# Readable by all users: the container's user is arbitrary, and no other container mounts this directory.
SECRET_MODE: Final = 0o444


class PodSettings(msgspec.Struct, kw_only=True):
    """Settings that apply to all workers. `authority` changes when the certificate authority is renewed.

    `coordinator` is the membership service's base URL for workers; with `shards` (base URLs) each job uses one of
    these. `runtime_image` contains `elastic_runtime` at RUNTIME_DIRECTORY, for training images without it; "" mounts
    nothing.
    """

    coordinator: str
    authority: bytes = b""
    key: bytes = b""
    runtime_image: str = ""
    shards: tuple[str, ...] = ()


def token_of(job_uid: str, key: bytes) -> str:
    """Return the job's token, derived from the controller's key, so that a restarted controller need not read it."""
    return hmac.new(key, job_uid.encode(), hashlib.sha256).hexdigest()


def secret_name(job: ElasticJob) -> str:
    """Return the name of the Secret that the job's workers mount; it is unique to the job."""
    return f"{job.metadata.name}-{job.metadata.uid[:8]}-membership"


def pod_name(job: str, index: int) -> str:
    """Return the name of a worker's pod."""
    return f"{job}-{index}"


def owner_of(job: ElasticJob) -> Body:
    """Return the owner reference to the job, with which its objects are deleted."""
    meta = job.metadata
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "ElasticJob",
        "name": meta.name,
        "uid": meta.uid,
        "controller": True,
    }


def membership_secret(job: ElasticJob, settings: PodSettings) -> Body:
    """Return the job's Secret: its token, and the CA of the membership service."""
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
    """Return a digest of the content of a job's Secret, which does not reveal the content."""
    content = token_of(job_uid, settings.key).encode() + settings.authority
    return hashlib.sha256(content).hexdigest()[:16]


def worker_pod(
    job: ElasticJob, record: JobRecord, worker: Worker, settings: PodSettings, classes: Sequence[str] = ()
) -> Body:
    """Return the worker's pod; `located` determines its node."""
    template: Body = msgspec.json.decode(job.spec.template)
    spec: Body = dict(template.get("spec") or {})
    containers = [dict(container) for container in spec.get("containers") or []]
    main = containers[0]
    _mount(spec, main, job, settings)
    for container in (*containers[1:], *(spec.get("initContainers") or [])):
        container["resources"] = _without_devices(container.get("resources") or {})
    main.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    main["env"] = _environment(main.get("env") or [], job, record, worker, settings)
    if not record.spec.shared and not _weights(record):
        main["resources"] = _resources(main.get("resources") or {}, record.spec.worker_gpus)
    spec.pop("nodeName", None)
    if gates := spec.pop("schedulingGates", None):  # ours would never be taken off
        spec["schedulingGates"] = [gate for gate in gates if gate.get("name") != labels.QUOTA_GATE]
    spec |= {
        "containers": [main, *(hidden_in_template(one) for one in containers[1:])],
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": max(1, int(record.spec.grace_period_s)),
    }
    if spec.get("initContainers"):
        spec["initContainers"] = [hidden_in_template(one) for one in spec["initContainers"]]
    metadata = _metadata(template, job, record, worker, classes)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _metadata(template: Body, job: ElasticJob, record: JobRecord, worker: Worker, classes: Sequence[str]) -> Body:
    given = template.get("metadata") or {}
    given_labels = given.get("labels") or {}
    index = {INDEX_ANNOTATION: str(worker.index)} if JOB_LABEL in given_labels else {}  # as clients of Jobs read it
    reason = record.status.reason.message if record.status.reason else ""
    return {
        "name": pod_name(job.metadata.name, worker.index),
        "namespace": job.metadata.namespace,
        "labels": {
            **_of_others(given_labels),
            **index,
            labels.JOB: job.metadata.name,
            labels.WORKER: str(worker.index),
            labels.ATTEMPT: str(record.attempt),
            ISTIO_INJECT: "false",  # a sidecar would intercept collectives, and would outlive the training
        },
        "annotations": {
            **_of_others(given.get("annotations") or {}),
            **index,
            **as_annotations(record.spec),  # what it holds while it exits, also after its job was deleted
            labels.DEVICES: ",".join(map(str, worker.devices)),
            labels.REASON: reason,
            **({labels.GPU_WEIGHTS: weights_text(weights)} if (weights := _weights(record)) else {}),
            **({labels.CLAIMED: ",".join(classes)} if classes else {}),
            ISTIO_INJECT: "false",
        },
        "ownerReferences": [owner_of(job)],
    }


def _weights(record: JobRecord) -> Amounts:
    """Return the resources that count as GPUs and that each worker has instead of nvidia.com/gpu."""
    return record.spec.gpu_weights if isinstance(record.spec, CountedJobSpec) else ()


def _of_others(given: Body) -> Body:
    """Return a template's labels or annotations without those of this project, which the job's fields determine."""
    return {
        name: text
        for name, text in given.items()
        if name.partition("/")[0] != labels.GROUP and name not in SHARE_ANNOTATIONS
    }


def _without_devices(given: Body) -> Body:
    """Return the resources without NVIDIA's extended resources."""
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
    """Return the template's variables and those of a worker, which take precedence: they identify it."""
    values = {
        "JOB_NAME": job.metadata.name,
        "JOB_UUID": job.metadata.uid,
        "POD_INDEX": str(worker.index),
        "RUNAI_NUM_OF_GPUS": str(record.spec.worker_gpus),
        "ELASTIC_COORDINATOR": join(f"{settings.coordinator.rstrip('/')}/v1/membership", job.metadata.uid),
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
    """Append the runtime to PYTHONPATH; an image's own `elastic_runtime` takes precedence."""
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
    # The default of 64 MiB is too small for data loaders with several workers.
    add("gpuquota-shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})  # noqa: S108 - of the container
    if job.spec.checkpoint is not None:
        claim = {"persistentVolumeClaim": {"claimName": job.spec.checkpoint.claim_name}}
        add("gpuquota-checkpoints", CHECKPOINT_DIRECTORY, claim, subPath=checkpoint_folder(job))
    if settings.runtime_image:
        add("gpuquota-runtime", RUNTIME_DIRECTORY, {"emptyDir": {}}, readOnly=True)
        spec["initContainers"] = [_runtime_copy(settings.runtime_image), *(spec.get("initContainers") or [])]
    spec["volumes"], main["volumeMounts"] = volumes, mounts


def checkpoint_folder(job: ElasticJob) -> str:
    """Return the folder of the job's checkpoints in its claim.

    That of a Job is the Job's, so that another ElasticJob of it continues. Below a JobSet it is one for all Jobs of
    this name, of which the JobSet makes one after another.
    """
    meta = job.metadata
    owner = job.owning_job
    if owner is None:
        return meta.uid
    above = meta.labels.get(JOBSET_UID_LABEL)
    return f"{above}-{meta.name}" if above else owner.uid


def _runtime_copy(image: str) -> Body:
    return {
        "name": "gpuquota-runtime",
        "image": image,
        "command": ["cp", "-r", f"{RUNTIME_DIRECTORY}/.", "/copy"],
        "volumeMounts": [{"name": "gpuquota-runtime", "mountPath": "/copy"}],
        "securityContext": {  # required by the pod security level `restricted`
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def view_of(body: Body, worker: Worker) -> PodView:
    """Return what of a worker's pod decides whether it is pinned; its uid is the worker's id.

    The API server refuses a pod whose fields have other types, so it does not matter what is returned for it.
    """
    try:
        view = pod_view(msgspec.convert(body, Pod))
    except (msgspec.ValidationError, GpuQuotaError):
        view = pod_view(Pod(metadata=Metadata(name=body["metadata"]["name"]), spec=PodSpec()))
    return msgspec.structs.replace(view, uid=worker.id)


def selector_of(spec: JobSpec, node: Node | None) -> dict[str, str]:
    """Return the labels of the planned node that every node of the job's workers has.

    They are its pool, its type of GPUs, its required domain and that of its segment.
    """
    pool = {labels.POOL: spec.node_pool} if spec.node_pool else {}
    levels = (GPU_PRODUCT if spec.gpu_types else None, spec.required_topology, spec.segment_topology)
    found = {} if node is None else {key: node.labels.get(key) for key in levels if key is not None}
    return {**pool, **{key: value for key, value in found.items() if value is not None}}


def located(body: Body, node: str, *, pinned: bool, selector: dict[str, str]) -> Body:
    """Return the pod with its node, or its autoscaled pool.

    If it is not `pinned`, it only prefers that node, among those of the `selector`.
    """
    meta, spec = body["metadata"], body["spec"]
    affinity = spec.get("affinity") or {}
    notes = {}
    if pool := pool_of(node):
        spec = {**spec, "nodeSelector": {**(spec.get("nodeSelector") or {}), labels.POOL: pool}}
        notes = {labels.OPENED: node}
    elif pinned:
        spec = {**spec, "affinity": _pinned(affinity, node)}
    else:
        selects = {**(spec.get("nodeSelector") or {}), **selector}
        spec = {
            **spec,
            "affinity": _preferring(affinity, node, within_pool=labels.POOL in selector),
            **({"nodeSelector": selects} if selects else {}),
        }
        notes = {labels.RESERVED_ON: node}
    return {**body, "metadata": {**meta, "annotations": {**meta["annotations"], **notes}}, "spec": spec}


def _pinned(affinity: Body, node: str) -> Body:
    """Return the affinity with the node in every required term; terms are alternatives."""
    node_affinity = affinity.get("nodeAffinity") or {}
    terms = (node_affinity.get(REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    pinned = [{**term, "matchFields": [*(term.get("matchFields") or []), node_term(node)]} for term in terms]
    return {**affinity, "nodeAffinity": {**node_affinity, REQUIRED: {"nodeSelectorTerms": pinned}}}


def _preferring(affinity: Body, node: str, *, within_pool: bool) -> Body:
    """Return the affinity with the node as the most preferred one; other nodes are in the same pool, or in none."""
    node_affinity = affinity.get("nodeAffinity") or {}
    preferred = {PREFERRED: [*(node_affinity.get(PREFERRED) or []), preference(node)]}
    if within_pool:
        return {**affinity, "nodeAffinity": {**node_affinity, **preferred}}
    terms = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or []), outside_pools()]}
        for term in (node_affinity.get(REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    ]
    return {**affinity, "nodeAffinity": {**node_affinity, **preferred, REQUIRED: {"nodeSelectorTerms": terms}}}
