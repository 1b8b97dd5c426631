"""The fields that a JobSpec and an ElasticJob's spec have in common, derived from the two structs.

A field of JobSpec has its unit in its name, as `grace_period_s` and `gpu_memory_mib`; an ElasticJob names durations as
Kubernetes does (`gracePeriodSeconds`), has amounts of memory as quantities (`gpuMemory: 4Gi`) and times as in RFC 3339
(`begin`). To add a field, add it to both structs, and to `manifests/crds/crds.yaml`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from kfp_gpuquota.api import JobSpec
from kfp_gpuquota.api.quantity import parse_mib
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJobSpec
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.api.wire import JobUpdate

_UNITS: Final = {"_s": "_seconds", "_mib": "", "_at": ""}


class JobField(NamedTuple):
    """A field: its name in JobSpec, its attribute of ElasticJobSpec, its JSON name, and JobSpec's default."""

    name: str
    attribute: str
    wire: str
    default: object

    @property
    def is_memory(self) -> bool:
        """Return whether it is a quantity of memory in the object, and MiB in the JobSpec."""
        return self.name.endswith("_mib")

    @property
    def is_time(self) -> bool:
        """Return whether it is a time in the object, and seconds since the epoch in the JobSpec."""
        return self.name.endswith("_at")


def _common() -> Iterator[JobField]:
    wires = dict(zip(ElasticJobSpec.__struct_fields__, ElasticJobSpec.__struct_encode_fields__, strict=True))
    for field in msgspec.structs.fields(JobSpec):
        unit = next((unit for unit in _UNITS if field.name.endswith(unit)), "")
        attribute = field.name.removesuffix(unit) + _UNITS.get(unit, "")
        if attribute in wires:
            default = None if field.default is msgspec.NODEFAULT else field.default
            yield JobField(field.name, attribute, wires[attribute], default)


JOB_FIELDS: Final = {field.wire: field for field in _common()}
"""All fields by their JSON names."""


def as_written(spec: JobSpec) -> dict[str, Any]:
    """Return the fields of an ElasticJob's spec that differ from the defaults, and `kind` and `gpus` always."""
    found: dict[str, Any] = {}
    for field in JOB_FIELDS.values():
        value = getattr(spec, field.name)
        if value is not None and (value != field.default or field.name in {"kind", "gpus"}):
            found[field.wire] = _written(field, value)
    if spec.shared:
        del found["gpus"]  # it is gpuDevices
    return found


def updated_fields(spec: JobSpec, changed: JobUpdate) -> dict[str, Any]:
    """Return the fields of an ElasticJob's spec that the update changes: what is as before may not have been given."""
    before = {"min_gpus": spec.smallest, "max_gpus": spec.largest, "priority": spec.effective_priority}
    fields = {field.name: field.wire for field in JOB_FIELDS.values()}
    given = {name: getattr(changed, name) for name in before}
    return {fields[name]: value for name, value in given.items() if value not in {None, before[name]}}


def as_read(spec: ElasticJobSpec) -> dict[str, Any]:
    """Return the given fields under JobSpec's names. Raises InvalidFieldError for what is no quantity, or no time."""
    given = {field: getattr(spec, field.attribute) for field in JOB_FIELDS.values()}
    return {field.name: _read(field, value) for field, value in given.items() if value is not None}


def _written(field: JobField, value: Any) -> object:
    if field.is_memory:
        return f"{value}Mi"
    return msgspec.to_builtins(datetime.fromtimestamp(value, UTC) if field.is_time else value)


def _read(field: JobField, value: object) -> object:
    if field.is_memory:
        return parse_mib(field.wire, str(value))
    return _seconds(field.wire, value) if field.is_time else value


def _seconds(field: str, text: object) -> float:
    try:
        at = msgspec.convert(text, datetime)
    except msgspec.ValidationError:
        at = None
    if at is None or at.tzinfo is None:
        raise InvalidFieldError(field, text, "it must be a time of RFC 3339", hint="for example 2027-01-31T22:00:00Z")
    return at.timestamp()
