"""Builds the admission patches of workloads that share GPUs: limits from policies, and the GPU configuration.

Pure and idempotent: a pod may be reviewed again after another webhook has changed it. Existing values are compared, not
trusted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota.api import JobSpec, Kind
from kfp_gpuquota.api.annotations import FRACTION_LIMIT, MEMORY_LIMIT, PREFIX
from kfp_gpuquota.api.job import COMMAND_OF_PODS
from kfp_gpuquota.api.policy import admit
from kfp_gpuquota.api.quantity import parse_mib
from kfp_gpuquota.api.share import limit_text
from kfp_gpuquota.cluster.kubernetes.convert.requests import escape_json_pointer
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.sharing.gpu_config import (
    MEMORY_DIRECTORY,
    is_name,
    mount,
    name_for,
    variables,
    volume,
)
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kfp_gpuquota.api.policy import WorkloadPolicy
    from kfp_gpuquota.cluster.kubernetes.admission.review_types import Container, Pod, PodSpec

Operation = dict[str, Any]
_NOTES = "/metadata/annotations"


def of_pod(pod: Pod, spec: JobSpec, uid: str, policies: Iterable[WorkloadPolicy]) -> Iterator[Operation]:
    """Return the patch of a pod that requests `spec`. `uid` is the review's.

    Raises InvalidFieldError, naming the policy, for a limit that one does not allow.
    """
    notes = pod.metadata.annotations or {}
    spec, set_by = admit(spec, policies)
    yield from _noted(*_limit_of(spec), notes)
    name = notes.get(labels.GPU_CONFIG, "")
    if not is_name(name):
        name = name_for(uid)
        yield _add(f"{_NOTES}/{escape_json_pointer(labels.GPU_CONFIG)}", name)
        if labels.SET_BY in notes and not set_by:
            yield {"op": "remove", "path": f"{_NOTES}/{escape_json_pointer(labels.SET_BY)}"}
    written = msgspec.json.encode(set_by).decode()
    if set_by and notes.get(labels.SET_BY) != written:
        yield _add(f"{_NOTES}/{escape_json_pointer(labels.SET_BY)}", written)
    if pod.spec.containers:  # the API server refuses a pod that has none
        yield from _with_gpu_configuration(pod.spec, pod.spec.containers[0], name, spec)


def _with_gpu_configuration(pod: PodSpec, main: Container, name: str, spec: JobSpec) -> Iterator[Operation]:
    yield from _variables_set(main, variables(name, spec))
    if all(one.mount_path != MEMORY_DIRECTORY for one in main.volume_mounts or ()):
        yield _appended("/spec/containers/0/volumeMounts", main.volume_mounts, mount())
    if all(one.name != volume()["name"] for one in pod.volumes or ()):
        yield _appended("/spec/volumes", pod.volumes, volume())


def of_job(job: SharingJob, namespace: str, policies: Iterable[WorkloadPolicy]) -> Iterator[Operation]:
    """Return the patch of an ElasticJob. Invalid fields are left to the CRD's rules, which have messages for them."""
    requested = _spec_of(job, namespace)
    if requested is None:
        return
    spec, set_by = admit(requested, policies)
    if not set_by:
        return
    if "gpu_fraction_limit" in set_by:
        yield _add("/spec/gpuFractionLimit", spec.gpu_fraction_limit)
    if "gpu_memory_limit_mib" in set_by:
        yield _add("/spec/gpuMemoryLimit", f"{spec.gpu_memory_limit_mib}Mi")
    written = msgspec.json.encode(set_by).decode()
    if job.metadata.annotations is None:
        yield _add(_NOTES, {labels.SET_BY: written})
    else:
        yield _add(f"{_NOTES}/{escape_json_pointer(labels.SET_BY)}", written)


class JobMetadata(msgspec.Struct, frozen=True, gc=False):
    """The metadata of an ElasticJob."""

    annotations: dict[str, str] | None = None


class JobShare(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """The fields of an ElasticJob's spec that request shares."""

    kind: str = "train"
    gpu_fraction: float | None = None
    gpu_fraction_limit: float | None = None
    gpu_memory: str | None = None
    gpu_memory_limit: str | None = None
    gpu_devices: int | None = None
    node_pool: str | None = None


class SharingJob(msgspec.Struct, frozen=True, gc=False):
    """The ElasticJob to be created."""

    metadata: JobMetadata = JobMetadata()
    spec: JobShare = JobShare()


def _spec_of(job: SharingJob, namespace: str) -> JobSpec | None:
    requested = job.spec
    size, limit = requested.gpu_memory, requested.gpu_memory_limit
    try:
        return JobSpec(
            name="job",
            project=namespace,
            command=COMMAND_OF_PODS,
            kind=Kind(requested.kind),
            gpu_fraction=requested.gpu_fraction,
            gpu_fraction_limit=requested.gpu_fraction_limit,
            gpu_devices=requested.gpu_devices,
            gpu_memory_mib=None if size is None else parse_mib("gpuMemory", size),
            gpu_memory_limit_mib=None if limit is None else parse_mib("gpuMemoryLimit", limit),
        )
    except (InvalidFieldError, ValueError):
        return None


def _limit_of(spec: JobSpec) -> tuple[str, str]:
    """Return (annotation, value) of the limit, by default of the request; the controller reads no variables."""
    if spec.gpu_memory_mib is not None:
        return MEMORY_LIMIT, f"{spec.gpu_memory_limit_mib or spec.gpu_memory_mib}Mi"
    return FRACTION_LIMIT, limit_text(spec)


def _noted(name: str, value: str, notes: Mapping[str, str]) -> Iterator[Operation]:
    """Return operations that set annotations, creating the field if needed; unchanged ones are left out."""
    for own in [one for one in (name, PREFIX + name) if one in notes] or [PREFIX + name]:
        if notes.get(own) != value:
            yield _add(f"{_NOTES}/{escape_json_pointer(own)}", value)


def _variables_set(main: Container, values: list[dict[str, Any]]) -> Iterator[Operation]:
    """Return operations that replace items of the same name and append the others; unchanged ones are left out."""
    path, there = "/spec/containers/0/env", {one.name: (i, one) for i, one in enumerate(main.env or ())}
    if main.env is None:
        yield _add(path, [])
    for value in values:
        index, known = there.get(value["name"], (-1, None))
        if known is None:
            yield _add(f"{path}/-", value)
        elif (known.value, known.value_from) != (value.get("value"), value.get("valueFrom")):
            yield {"op": "replace", "path": f"{path}/{index}", "value": value}


def _appended(path: str, there: tuple[Any, ...] | None, value: Operation) -> Operation:
    return _add(f"{path}/-", value) if there else _add(path, [value])


def _add(path: str, value: Any) -> Operation:
    return {"op": "add", "path": path, "value": value}
