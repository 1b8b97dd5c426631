"""Converts GpuQuotas and Profile plugins to projects, and back. Pure."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api import Order, Project, StopPolicy
from kfp_gpuquota.api.quantity import MIB, parse_cores, parse_quantity
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import GpuQuota, GpuQuotaSpec
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable


def _mib(field: str, text: str) -> int:
    return ceil(parse_quantity(field, text) / MIB)


# field of Project: (field of GpuQuotaSpec, parser of its quantity)
_QUANTITIES: Final[dict[str, tuple[str, Callable[[str, str], float]]]] = {
    "guaranteed_cpu": ("guaranteed_cpu", parse_cores),
    "limit_cpu": ("limit_cpu", parse_cores),
    "guaranteed_memory_mib": ("guaranteed_memory", _mib),
    "limit_memory_mib": ("limit_memory", _mib),
}
_AS_GIVEN: Final = ("guaranteed", "limit", "priority", "over_quota_weight", "parent", "pools", "stop_policy", "order")
_SECONDS: Final = {
    "default_runtime_s": "default_runtime_seconds",
    "max_runtime_s": "max_runtime_seconds",
    "min_runtime_s": "min_runtime_seconds",
    "reserve_after_s": "reserve_after_seconds",
}
_WIRE: Final = dict(zip(GpuQuotaSpec.__struct_fields__, GpuQuotaSpec.__struct_encode_fields__, strict=True))


def project_of(quota: GpuQuota) -> Project:
    """Return the quota as the scheduler's project. Raises InvalidFieldError, whose text becomes a condition."""
    spec = quota.spec
    given: dict[str, object] = {name: getattr(spec, name) for name in _AS_GIVEN}
    given |= {field: getattr(spec, name) for field, name in _SECONDS.items()}
    for field, (name, parse) in _QUANTITIES.items():
        text = getattr(spec, name)
        given[field] = None if text is None else parse(_WIRE[name], str(text))
    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        return msgspec.convert({**chosen, "name": quota.metadata.name}, Project)
    except msgspec.ValidationError as error:
        raise InvalidFieldError("spec", chosen, str(error)) from None


def project_of_plugin(name: str, spec: bytes) -> Project:
    """Return the project of a Profile's plugin. Raises InvalidFieldError."""
    try:
        return project_of(GpuQuota(metadata=Metadata(name=name), spec=msgspec.json.decode(spec, type=_Strict)))
    except msgspec.DecodeError as error:
        raise InvalidFieldError("plugins.GpuQuota.spec", spec.decode(errors="replace"), str(error)) from None


class _Strict(GpuQuotaSpec, frozen=True, forbid_unknown_fields=True):
    """Rejects unknown fields, since nothing else validates a Profile's plugins."""


def quota_spec(project: Project) -> dict[str, Any]:
    """Return the spec of the project's GpuQuota."""
    spec: dict[str, Any] = {_WIRE[name]: getattr(project, name) for name in _AS_GIVEN}
    spec |= {_WIRE[name]: getattr(project, field) for field, name in _SECONDS.items()}
    spec["stopPolicy"] = None if project.stop_policy is StopPolicy.NONE else project.stop_policy.value
    spec["order"] = None if project.order is Order.FAIR else project.order.value
    spec["pools"] = msgspec.to_builtins(project.pools) or None
    spec[_WIRE["guaranteed_cpu"]] = _cores(project.guaranteed_cpu)
    spec[_WIRE["limit_cpu"]] = _cores(project.limit_cpu)
    spec[_WIRE["guaranteed_memory"]] = _mebibytes(project.guaranteed_memory_mib)
    spec[_WIRE["limit_memory"]] = _mebibytes(project.limit_memory_mib)
    return without_nones(spec)


def has_spec(quota: GpuQuota, wanted: dict[str, Any]) -> bool:
    """Return whether the quota's spec equals one that `quota_spec` returned."""
    found = {wire: getattr(quota.spec, name) for name, wire in _WIRE.items()}
    return without_nones(found) == wanted


def without_nones(given: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping without None values, at any depth."""
    return {
        name: without_nones(value) if isinstance(value, dict) else value
        for name, value in given.items()
        if value is not None
    }


def _cores(cores: float | None) -> str | None:
    return None if cores is None else f"{cores:g}"


def _mebibytes(mib: int | None) -> str | None:
    return None if mib is None else f"{mib}Mi"
