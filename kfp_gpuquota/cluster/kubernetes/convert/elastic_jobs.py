"""Converts ElasticJobs to the scheduler's jobs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota.api.resources import CountedJobSpec
from kfp_gpuquota.cluster.kubernetes.convert.limit_ranges import completed
from kfp_gpuquota.cluster.kubernetes.convert.node_constraints import constraints_of
from kfp_gpuquota.cluster.kubernetes.convert.pods import claims_of, short_name
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import resource_requests_of
from kfp_gpuquota.cluster.kubernetes.objects.core_types import PodSpec
from kfp_gpuquota.cluster.kubernetes.objects.job_fields import as_read
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.api.affinity import NodeTerm
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob


class _Template(msgspec.Struct, frozen=True):
    spec: PodSpec = PodSpec()


def _template_of(job: ElasticJob) -> PodSpec:
    try:
        return msgspec.json.decode(job.spec.template, type=_Template).spec
    except msgspec.DecodeError as error:
        raise InvalidFieldError("template", "of pods", str(error)) from None


def job_spec_of(
    job: ElasticJob,
    requests: Mapping[str, Any] | None = None,
    volume_terms: Callable[[str, tuple[str, ...]], tuple[NodeTerm, ...]] = lambda _namespace, _claims: (),
) -> CountedJobSpec:
    """Return the ElasticJob as the scheduler's job. Raises InvalidFieldError.

    `requests` are the namespace's default requests, `volume_terms(namespace, claims)` are the terms of the nodes on
    which the claims' volumes can be mounted.
    """
    spec, template = job.spec, completed(_template_of(job), requests or {})
    kept = () if spec.checkpoint is None else (spec.checkpoint.claim_name,)
    constraints = constraints_of(template).within(volume_terms(job.metadata.namespace, (*claims_of(template), *kept)))
    chosen = {
        **as_read(spec),
        **resource_requests_of(template).constraints(),
        **constraints.constraints(),
    }
    named = {
        "name": short_name(job.metadata.name),
        "project": job.metadata.namespace,
        "command": ("pod",),
        "labels": job.metadata.labels,
    }
    try:
        return msgspec.convert({**named, **chosen}, CountedJobSpec, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidFieldError("spec", chosen, str(error)) from None
