"""CEL rules on two or more fields of an ElasticJob's spec, with the messages of `api`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Kind
from kfp_gpuquota.cluster.kubernetes.crd.structural import rule

if TYPE_CHECKING:
    from collections.abc import Container

    from kfp_gpuquota.cluster.kubernetes.crd.structural import Schema

_GPUS: Final = "(has(self.gpus) ? self.gpus : 1)"
_SMALLEST: Final = f"(has(self.minGpus) ? self.minGpus : {_GPUS})"
_LARGEST: Final = f"(has(self.maxGpus) ? self.maxGpus : {_GPUS})"
_SHARED: Final = "(has(self.gpuFraction) || has(self.gpuMemory))"

# (condition, message if it is false, expressions for the message's %s)
_WHOLE: Final = tuple(
    (
        f"!has(self.{field}) || !{_SHARED}",
        f"{field} is %s, but it counts whole GPUs, and the job asks for a share of them; leave it out; for the same"
        " share of several GPUs of a node give gpuDevices",
        f"self.{field}",
    )
    for field in ("gpus", "minGpus", "maxGpus", "gpusPerWorker")
)
_MULTIPLES: Final = tuple(
    (
        f"!has(self.{field}) || !has(self.gpusPerWorker) || self.{field} % self.gpusPerWorker == 0",
        f"{field} is %s, but it must be a multiple of gpusPerWorker, which is %s",
        f"self.{field}",
        "self.gpusPerWorker",
    )
    for field in ("gpus", "minGpus", "maxGpus")
)
_SIZES: Final = (
    (
        f"!has(self.minGpus) || self.minGpus <= {_GPUS}",
        "minGpus is %s, but it cannot exceed the requested %s GPUs",
        "self.minGpus",
        _GPUS,
    ),
    (
        f"!has(self.maxGpus) || self.maxGpus >= {_GPUS}",
        "maxGpus is %s, but it cannot be below the requested %s GPUs",
        "self.maxGpus",
        _GPUS,
    ),
    (
        "has(self.gpus) || !has(self.gpusPerWorker) || self.gpusPerWorker == 1",
        "gpus is 1, but it must be a multiple of gpusPerWorker, which is %s",
        "self.gpusPerWorker",
    ),
    (
        f"self.kind != '{Kind.BUILD}' || {_SMALLEST} == {_LARGEST}",
        "kind is 'build', but an interactive session has one size; leave out minGpus and maxGpus",
    ),
)
_SHARES: Final = (
    (
        "!has(self.gpuFraction) || self.gpuFraction < 1.0",
        "gpuFraction is %s, but it must be more than 0 and less than 1; ask for whole GPUs with gpus",
        "self.gpuFraction",
    ),
    (
        "!has(self.gpuFraction) || !has(self.gpuMemory)",
        "gpuMemory is '%s', but the job already asks for gpuFraction %s; ask for a fraction or for memory",
        "self.gpuMemory",
        "self.gpuFraction",
    ),
    (
        "!has(self.gpuFractionLimit) || has(self.gpuFraction)",
        "gpuFractionLimit is %s, but there is no gpuFraction of which it is the limit",
        "self.gpuFractionLimit",
    ),
    (
        "!has(self.gpuFractionLimit) || !has(self.gpuFraction) || self.gpuFractionLimit >= self.gpuFraction",
        "gpuFractionLimit is %s, but it must be between gpuFraction, which is %s, and 1",
        "self.gpuFractionLimit",
        "self.gpuFraction",
    ),
    (
        "!has(self.gpuMemoryLimit) || has(self.gpuMemory)",
        "gpuMemoryLimit is '%s', but there is no gpuMemory of which it is the limit",
        "self.gpuMemoryLimit",
    ),
    (
        "!has(self.gpuMemoryLimit) || !has(self.gpuMemory) || !isQuantity(self.gpuMemoryLimit)"
        " || !isQuantity(self.gpuMemory)"
        " || quantity(self.gpuMemoryLimit).compareTo(quantity(self.gpuMemory)) >= 0",
        "gpuMemoryLimit is '%s', but it must be at least gpuMemory, which is %s",
        "self.gpuMemoryLimit",
        "self.gpuMemory",
    ),
    (
        "!has(self.gpuCompute) || self.gpuCompute < 1.0",
        "gpuCompute is %s, but it must be more than 0 and less than 1",
        "self.gpuCompute",
    ),
    (
        f"!has(self.gpuCompute) || {_SHARED}",
        "gpuCompute is %s, but it limits a job's share of a GPU, and there is none; add gpuFraction or"
        " gpuMemory, or ask for whole GPUs with gpus",
        "self.gpuCompute",
    ),
    (
        f"!has(self.gpuDevices) || {_SHARED}",
        "gpuDevices is %s, but it counts the GPUs of which a job holds a share, and there is none; add gpuFraction or"
        " gpuMemory, or ask for whole GPUs with gpus",
        "self.gpuDevices",
    ),
)
# Fields that cannot change while workers run; fields of scheduling policy can.
_FIXED: Final = (
    "kind",
    "gpus",
    "minGpus",
    "maxGpus",
    "gpusPerWorker",
    "gpuFraction",
    "gpuFractionLimit",
    "gpuMemory",
    "gpuMemoryLimit",
    "gpuCompute",
    "gpuDevices",
    "nodePool",
    "requiredTopology",
    "preferredTopology",
    "spread",
)


def job_rules(fields: Container[str]) -> list[Schema]:
    """Return the rules of a spec with these fields."""
    rules = [rule(*one) for one in (*_MULTIPLES, *_SIZES, *_WHOLE, *_SHARES)]
    return rules + [_fixed(field) for field in _FIXED if field in fields]


def _fixed(field: str) -> Schema:
    same = f"(has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field}))"
    return rule(same, f"{field} cannot be changed; create another job")
