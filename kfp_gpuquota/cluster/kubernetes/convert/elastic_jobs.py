"""Converts ElasticJobs to the scheduler's jobs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kfp_gpuquota.api.job import COMMAND_OF_PODS
from kfp_gpuquota.api.resources import GPU_PART_PREFIX, WHOLE_GPU, CountedJobSpec, part_weights
from kfp_gpuquota.cluster.kubernetes.convert.limit_ranges import completed
from kfp_gpuquota.cluster.kubernetes.convert.node_constraints import constraints_of
from kfp_gpuquota.cluster.kubernetes.convert.pods import check_lengths, claims_of, kept_labels, short_name
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import gpus_of, resource_requests_of
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import PodSpec
from kfp_gpuquota.cluster.kubernetes.objects.job_fields import as_read
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.api.affinity import NodeTerm
    from kfp_gpuquota.api.resources import Resources as Amounts
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob


class _Template(msgspec.Struct, frozen=True):
    spec: PodSpec = PodSpec()


class CountedOf(Protocol):
    """Finds what a job's pods request of resources that count as GPUs, by its containers and its claims."""

    def __call__(self, job: ElasticJob, template: PodSpec, others: Amounts, /) -> tuple[Amounts, Amounts]:
        """Return `others`, which the containers request, with what is claimed, and the weights of what counts as GPUs.

        Raises InvalidFieldError.
        """


def uncounted(_job: ElasticJob, _template: PodSpec, others: Amounts, /) -> tuple[Amounts, Amounts]:
    """Return the requests alone: a user's client does not read the table of what counts."""
    return others, ()


def template_of(job: ElasticJob) -> PodSpec:
    """Return the specification of the job's pods. Raises InvalidFieldError."""
    try:
        return msgspec.json.decode(job.spec.template, type=_Template).spec
    except msgspec.DecodeError as error:
        raise InvalidFieldError("template", "of pods", str(error)) from None


def claims_devices(job: ElasticJob) -> bool:
    """Return whether the job's pods claim devices."""
    try:
        return bool(template_of(job).resource_claims)
    except InvalidFieldError:
        return False


def job_spec_of(
    job: ElasticJob,
    requests: Mapping[str, Any] | None = None,
    volume_terms: Callable[[str, tuple[str, ...]], tuple[NodeTerm, ...]] = lambda _namespace, _claims: (),
    counted: CountedOf = uncounted,
) -> CountedJobSpec:
    """Return the ElasticJob as the scheduler's job. Raises InvalidFieldError.

    `requests` are the namespace's default requests, `volume_terms(namespace, claims)` are the terms of the nodes on
    which the claims' volumes can be mounted.
    """
    spec, template = job.spec, completed(template_of(job), requests or {})
    kept = () if spec.checkpoint is None else (spec.checkpoint.claim_name,)
    claims = (*claims_of(template), *kept)
    constraints = constraints_of(template).bounded().within(volume_terms(job.metadata.namespace, claims))
    needs = resource_requests_of(template)
    check_lengths(claims, template.resource_claims, needs)
    resources, weights = counted(job, template, needs.others)
    chosen = {
        **as_read(spec),
        **needs.constraints(),
        "resources": resources,
        "gpu_weights": weights,
        **constraints.constraints(),
    }
    named = {
        "name": short_name(job.metadata.name),
        "project": job.metadata.namespace,
        "command": COMMAND_OF_PODS,
        "labels": kept_labels(job.metadata.labels),
    }
    try:
        found = msgspec.convert({**named, **chosen}, CountedJobSpec, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidFieldError("spec", chosen, str(error)) from None
    if weights:
        _check_counted(found, template)
    return found


def _check_counted(spec: CountedJobSpec, template: PodSpec) -> None:
    """Check a job whose workers have resources that count as GPUs instead of nvidia.com/gpu."""
    requested, names = dict(spec.resources), [name for name, _ in spec.gpu_weights]
    shown = ", ".join(name.replace(GPU_PART_PREFIX, "GPUs of ") for name in names)
    if spec.shared or gpus_of(template):
        other = "a share of a GPU" if spec.shared else labels.GPU_RESOURCE
        raise InvalidFieldError("template", shown, f"the job requests {other} as well", hint="leave out one of the two")
    parts = dict(part_weights(names))
    devices = sum(requested[name] // (WHOLE_GPU if name in parts else 1) for name in names)
    if spec.worker_gpus != devices:
        rule = f"each pod of its template requests {devices} of {shown}"
        raise InvalidFieldError("gpusPerWorker", spec.worker_gpus, rule, hint=f"set gpusPerWorker to {devices}")
