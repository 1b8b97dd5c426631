"""Converts between `api` types and the API server's objects. Pure.

A job is converted to an object, and an object with its pods to the job that a client shows.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api import Job, Phase, Reason, ReasonCode, Worker, WorkerPhase
from kfp_gpuquota.api.quantity import as_number
from kfp_gpuquota.api.queue import Queued
from kfp_gpuquota.api.resources import plain_job, plain_node
from kfp_gpuquota.api.validation import check_no_runtime_env
from kfp_gpuquota.api.wire import NodeView, ProjectView, ResourceView
from kfp_gpuquota.cluster.kubernetes.convert import nodes
from kfp_gpuquota.cluster.kubernetes.convert.elastic_jobs import job_spec_of
from kfp_gpuquota.cluster.kubernetes.convert.known_gpus import counts_as, type_label
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.convert.pods import pod_job, pod_view
from kfp_gpuquota.cluster.kubernetes.convert.published_devices import with_amounts
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import gpus_of, resource_requests_of, whole_number
from kfp_gpuquota.cluster.kubernetes.elasticjob.status.size_history import (
    expected_start_of,
    seconds,
    status_of_object,
)
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJobSpec, GpuQuotaSpec
from kfp_gpuquota.cluster.kubernetes.objects.job_fields import JOB_FIELDS, as_written
from kfp_gpuquota.cluster.kubernetes.quota import quotas
from kfp_gpuquota.cluster.kubernetes.quota.workload_policies import set_by
from kfp_gpuquota.engine.records import Intent
from kfp_gpuquota.errors import ConflictError, InvalidFieldError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kfp_gpuquota.api import JobSpec, Project
    from kfp_gpuquota.api.wire import Lease, ShareView
    from kfp_gpuquota.cluster.kubernetes.convert.published_devices import Shown
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Node, Pod
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob, ElasticJobStatus, GpuQuota, GpuResource

Json = dict[str, Any]

MAIN: Final = "main"
CLAIM: Final = "gpuquota-gpus"
REQUEST_ID: Final = f"{labels.GROUP}/request-id"
_ONLY_IN_OBJECTS: Final = {
    field: name
    for field, name in zip(ElasticJobSpec.__struct_fields__, ElasticJobSpec.__struct_encode_fields__, strict=True)
    if name not in {*JOB_FIELDS, "template", "lease", "suspend"}
}
"""The fields of an ElasticJob's spec that say how it runs, and that a JobSpec does not have, with their JSON names."""
CANCELLED: Final = "gpuquota-cancel"
"""The holder of the lease of a job that its user has cancelled."""
_PERMANENT: Final = frozenset({Intent.CANCEL, Intent.FAIL, Intent.DELETE})


class _Container(msgspec.Struct, frozen=True):
    image: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()


class _Pod(msgspec.Struct, frozen=True):
    containers: tuple[_Container, ...] = (_Container(),)


class _Template(msgspec.Struct, frozen=True):
    """The fields of a pod template that a client shows."""

    spec: _Pod = _Pod()


_PHASES: Final = {"Pending": WorkerPhase.STARTING, "Running": WorkerPhase.RUNNING}


# To objects


def elastic_job(spec: JobSpec, template: Json, *, request_id: str, lease: Lease | None, now: float) -> Json:
    """Return the ElasticJob object to create. `template` is a pod template whose first container runs the job.

    Raises InvalidFieldError for a job without GPUs.
    """
    _check_gpus(spec)
    if spec.resource_claim_template:
        template = _with_claim(template, spec.resource_claim_template)
    asked: Json = {**as_written(spec), "template": template}
    if lease is not None:
        asked["lease"] = job_lease(lease, now)
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "ElasticJob",
        "metadata": {
            "name": spec.name,
            "namespace": spec.project,
            "labels": spec.labels,
            "annotations": {REQUEST_ID: request_id},
        },
        "spec": asked,
    }


def pod_template(spec: JobSpec, image: str) -> Json:
    """Return a pod template for a command in an image, with the job's other pod fields.

    Raises UsageError without an image, InvalidFieldError for what pods do not have.
    """
    _check_gpus(spec)
    if not image:
        raise UsageError("a job on Kubernetes runs in an image; name it: gpuquota submit -i IMAGE ...")
    check_no_runtime_env(spec.runtime_env, instead="use an image (-i) that has what the job needs")
    container: Json = {"name": MAIN, "image": image, "command": list(spec.command)}
    if spec.environment:
        container["env"] = [{"name": name, "value": value} for name, value in sorted(spec.environment.items())]
    if spec.working_directory:
        container["workingDir"] = spec.working_directory
    amounts = {"requests": (spec.cpu, spec.memory_mib), "limits": (spec.cpu_limit, spec.memory_limit_mib)}
    if resources := {kind: given for kind, amount in amounts.items() if (given := _quantities(*amount))}:
        container["resources"] = resources
    pod: Json = {"containers": [container], "restartPolicy": "Never"}
    if spec.node is not None:
        pod["nodeSelector"] = {"kubernetes.io/hostname": spec.node}
    if spec.node_selector:
        pod["nodeSelector"] = {**pod.get("nodeSelector", {}), **spec.node_selector}
    if spec.node_affinity:
        terms = [{"matchExpressions": msgspec.to_builtins(term)["requirements"]} for term in spec.node_affinity]
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        pod["affinity"] = {"nodeAffinity": required}
    if spec.tolerations:
        pod["tolerations"] = [msgspec.to_builtins(toleration) for toleration in spec.tolerations]
    return {"spec": pod}


def _check_gpus(spec: JobSpec) -> None:
    if not spec.gpus:
        raise InvalidFieldError(
            "gpus", 0, "on Kubernetes work without GPUs needs no quota", hint="use a Job: kubectl create job"
        )


def elastic_job_like(stored: ElasticJob, spec: JobSpec, image: str, *, request_id: str, now: float) -> Json:
    """Return the object of a job that has from another one what its spec does not name, such as the checkpoint claim.

    The maximum run time that the other one has from its project is not the new one's own.
    """
    if stored.spec.max_runtime_seconds is None:
        spec = msgspec.structs.replace(spec, max_runtime_s=None)
    template = _template_like(stored, spec.command, image)
    made = elastic_job(spec, template, request_id=request_id, lease=None, now=now)
    kept = msgspec.to_builtins({name: getattr(stored.spec, field) for field, name in _ONLY_IN_OBJECTS.items()})
    given = {name: value for name, value in kept.items() if value is not None}
    return {**made, "spec": {**given, **made["spec"]}}


def _template_like(stored: ElasticJob, command: Sequence[str], image: str) -> Json:
    """Return the pod template of a job with another command, and another image if one is given."""
    template: Json = msgspec.json.decode(stored.spec.template)
    container = template["spec"]["containers"][0]
    if tuple(command) != _command(stored):
        container.pop("args", None)
        container["command"] = list(command)
    if image:
        container["image"] = image
    return template


def quota_patch(stored: GpuQuota, project: Project) -> Json:
    """Return the merge patch that replaces a quota. Raises ConflictError if a Profile defines it."""
    if found := profile_of(stored):
        raise ConflictError(found)
    cleared = dict.fromkeys(GpuQuotaSpec.__struct_encode_fields__)
    return {"spec": {**cleared, **quotas.quota_spec(project)}}


def profile_of(stored: GpuQuota) -> str:
    """Return that a Profile defines the quota, and how to change it there; "" if none does."""
    if stored.metadata.labels.get(labels.SOURCE) != "profile":
        return ""
    name = stored.metadata.name
    return (
        f"the quota of {name!r} is defined in its Profile; change it there: kubectl edit profile {name} "
        "(spec.plugins, kind GpuQuota)"
    )


def _with_claim(template: Json, name: str) -> Json:
    """Return the pod template whose first container uses a claim of the ResourceClaimTemplate."""
    pod = template["spec"]
    main, *others = pod["containers"]
    resources = main.get("resources") or {}
    claims = [*(resources.get("claims") or []), {"name": CLAIM}]
    main = {**main, "resources": {**resources, "claims": claims}}
    claimed = [*(pod.get("resourceClaims") or []), {"name": CLAIM, "resourceClaimTemplateName": name}]
    return {**template, "spec": {**pod, "containers": [main, *others], "resourceClaims": claimed}}


def _quantities(cpu: float | None, memory_mib: int | None) -> dict[str, str]:
    given = {"cpu": None if cpu is None else str(cpu), "memory": None if memory_mib is None else f"{memory_mib}Mi"}
    return {name: quantity for name, quantity in given.items() if quantity is not None}


def job_lease(lease: Lease, now: float) -> Json:
    """Return the lease as a spec field, renewed at `now`."""
    why = {"reason": lease.reason} if lease.reason else {}
    return {"holder": lease.holder, "durationSeconds": lease.duration_s, "renewTime": timestamp(now), **why}


def gpu_quota(project: Project) -> Json:
    """Return the object of a project's quota."""
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "GpuQuota",
        "metadata": {"name": project.name},
        "spec": quotas.quota_spec(project),
    }


def timestamp(at: float) -> str:
    """Return the time `at`, in seconds since 1970, as a Kubernetes MicroTime."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# From objects


def job_of(stored: ElasticJob, pods: Sequence[Pod] = ()) -> Job:
    """Return the job with its pods as workers. Raises InvalidFieldError for an invalid one."""
    status = stored.status
    ranks = {index: rank for rank, index in enumerate(status.ranks)}
    each = status.gpus / max(1, status.workers)
    known = (worker_of(pod, stored.metadata.uid, each) for pod in pods)
    workers = sorted((_ranked(worker, ranks) for worker in known), key=lambda worker: worker.index)
    found, spec = status_of_object(stored), plain_job(job_spec_of(stored))
    longest = status.default_runtime_seconds if spec.max_runtime_s is None else spec.max_runtime_s
    return Job(
        uid=stored.metadata.uid,
        spec=msgspec.structs.replace(spec, command=_command(stored), max_runtime_s=longest),
        status=msgspec.structs.replace(
            found,
            reason=_trouble(status) or found.reason,
            gpus=as_number(status.gpus),
            generation=status.generation,
            workers=tuple(workers),
            set_by=set_by(stored.metadata.annotations),
            page=status.page or "",
            expected_start=expected_start_of(status.expected_start),
        ),
    )


def is_over(stored: ElasticJob) -> bool:
    """Return whether the job has ended or is being stopped permanently, so that no change of it has an effect."""
    held = stored.spec.lease
    cancelled = held is not None and (held.holder == CANCELLED or held.duration_seconds == 0)
    ending = Phase(stored.status.phase).final or stored.status.intent in _PERMANENT
    return cancelled or ending or stored.metadata.deletion_timestamp is not None


def _command(stored: ElasticJob) -> tuple[str, ...]:
    """Return the first container's command; its image if the command is the image's entry point."""
    container = msgspec.json.decode(stored.spec.template, type=_Template).spec.containers[0]
    return (*container.command, *container.args) or (container.image or "pod",)


def _trouble(status: ElasticJobStatus) -> Reason | None:
    """Return why the job's pods do not start, which is more specific than the status message."""
    if Phase(status.phase or Phase.PENDING).final:
        return None
    found = (c.message for c in status.conditions if c.type == "WorkersReady" and c.status == "False" and c.message)
    message = next(found, "")
    return Reason(code=ReasonCode.PODS_NOT_READY, message=message) if message else None


def worker_of(pod: Pod, job_uid: str, other_gpus: float = 0.0) -> Worker:
    """Return the worker of a job's pod; its id is the pod's name. `other_gpus` as in Worker, of one that has such."""
    notes = pod.metadata.annotations or {}
    phase = _PHASES.get(pod.status.phase, WorkerPhase.GONE)
    if phase is not WorkerPhase.GONE and pod.metadata.deletion_timestamp is not None:
        phase = WorkerPhase.LEAVING
    index = pod.metadata.labels.get(labels.WORKER, "0")
    ended = next((c.state.terminated for c in pod.status.container_statuses if c.state.terminated), None)
    return Worker(
        id=pod.metadata.name,
        job_uid=job_uid,
        index=int(index) if index.isdecimal() else 0,
        node=pod.spec.node_name,
        devices=tuple(int(part) for part in notes.get(labels.DEVICES, "").split(",") if part.isdecimal()),
        other_gpus=other_gpus if labels.GPU_WEIGHTS in notes else 0.0,
        phase=phase,
        started_at=seconds(pod.metadata.creation_timestamp) or 0.0,
        exit_code=ended.exit_code if ended else None,
    )


def _ranked(worker: Worker, ranks: dict[int, int]) -> Worker:
    rank = None if worker.phase is WorkerPhase.GONE else ranks.get(worker.index)
    return worker if rank is None else msgspec.structs.replace(worker, rank=rank)


def queued_pods(pods: Iterable[Pod]) -> list[Queued]:
    """Return the gated pods as jobs, one for each group or owner; invalid ones are left out."""
    found: dict[str, Queued] = {}
    for pod in pods:
        with suppress(InvalidFieldError):
            view = pod_view(pod)
            if view.stage is Stage.WAITING:
                owner, each = view.group or view.controller_uid or view.uid, _queued_pod(pod, view)
                found[owner] = min(found.get(owner, each), each, key=lambda one: one.key)
    return list(found.values())


def _queued_pod(pod: Pod, view: PodView) -> Queued:
    owner = next((o for o in pod.metadata.owner_references if o.controller), None)
    spec = pod_job(view)
    return Queued(
        name=view.group or (owner.name if owner is not None else view.name),
        uid=view.uid,
        priority=spec.effective_priority,
        submitted_at=view.created,
        pool=view.pool,
    )


def project_view(quota: GpuQuota) -> ProjectView:
    """Return a quota and its team's usage. Raises InvalidFieldError for an invalid one."""
    return ProjectView(
        project=quotas.project_of(quota),
        allocated=as_number(quota.status.gpus),
        over_quota=as_number(quota.status.borrowed),
        requested=as_number(quota.status.requested),
    )


def node_view(
    node: Node,
    pods: Iterable[Pod],
    shares: Sequence[ShareView] = (),
    table: Iterable[GpuResource] = (),
    published: Mapping[str, Shown] | None = None,
) -> NodeView:
    """Return a node and the pods that hold its devices, and what counts as GPUs by `table`, also outside the quota.

    The devices of those are recorded by the kubelet only: the first unassigned ones are shown for them. `published` are
    the devices that DRA drivers publish, by resource, with the pods that kube-scheduler has allocated them to.
    """
    by_driver = {name: one for name, one in (published or {}).items() if _is_absent(node, name)}
    node = with_amounts(node, {name: one.count for name, one in by_driver.items()})
    here = [pod for pod in pods if pod.spec.node_name == node.metadata.name and holds_devices(pod)]
    shown, held = plain_node(nodes.node_of(node)), dict[int, tuple[str, ...]]()
    for pod in here:
        for device in devices_of(pod):
            held[device] = (*held.get(device, ()), pod.metadata.name)
    for holder, number in _foreign(here, held, by_driver.get(labels.GPU_RESOURCE)):
        free = [device.index for device in shown.devices if device.index not in held]
        held.update((index, (holder,) if holder else ()) for index in free[:number])
    rows = (row for row in table if row.name in node.status.allocatable)
    resources = tuple(_resource_view(row, node, here, by_driver.get(row.name)) for row in rows)
    return NodeView(node=shown, held=held, used=_used(held, shares), shares=tuple(shares), resources=resources)


def _is_absent(node: Node, resource: str) -> bool:
    """Return whether no device plugin has announced the resource: else kube-scheduler counts that one's devices."""
    return node.status.allocatable.get(resource, "0") == "0"


def _foreign(
    pods: Iterable[Pod], held: Mapping[int, Sequence[str]], published: Shown | None
) -> Iterator[tuple[str, int]]:
    """Yield the pods that hold devices, and how many, of which it is not recorded which ones they are."""
    if published is None:
        yield from ((pod.metadata.name, gpus_of(pod.spec)) for pod in pods if not devices_of(pod))
        return
    recorded = Counter(holder for holders in held.values() for holder in holders)
    yield from ((holder, max(0, int(number) - recorded[holder])) for holder, number in published.held.items())


def _resource_view(row: GpuResource, node: Node, pods: Iterable[Pod], published: Shown | None) -> ResourceView:
    held: dict[str, float] = dict(published.held) if published is not None else {}
    for pod in pods if published is None else ():
        if amount := dict(resource_requests_of(pod.spec).others).get(row.name, 0):
            held[pod.metadata.name] = held.get(pod.metadata.name, 0) + amount
    return ResourceView(
        name=row.name,
        count=whole_number(node.status.allocatable[row.name]),
        counts_as=counts_as(row),
        type=node.metadata.labels.get(type_label(row), ""),
        held=held,
    )


def devices_of(pod: Pod) -> tuple[int, ...]:
    """Return the pod's annotated devices, or the device that a reservation pod holds."""
    from kfp_gpuquota.cluster.kubernetes.sharing import reservation_pods  # noqa: PLC0415 (it imports aiohttp)

    reserved = reservation_pods.view_of(pod)
    return worker_of(pod, "").devices if reserved is None else (reserved.device,)


def holds_devices(pod: Pod) -> bool:
    """Return whether the pod, if it has devices, still holds them."""
    return pod.status.phase not in {"Succeeded", "Failed"}


def _used(held: Iterable[int], shares: Iterable[ShareView]) -> dict[int, float]:
    """Return the held part of each device: for a shared device the sum of its sharers' requests."""
    parts: dict[int, float] = {}
    for share in shares:
        parts[share.device] = parts.get(share.device, 0.0) + share.request_mib / (share.total_mib or 1)
    return {device: min(1.0, round(parts.get(device, 1.0), 2)) for device in held}
