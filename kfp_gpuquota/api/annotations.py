"""A share of a GPU as a pod asks for it: by annotations, and by RUNAI_GPU_MEMORY_LIMIT on its first container.

| annotation                 | value                                                          |
|----------------------------|----------------------------------------------------------------|
| `gpu-fraction`             | the part of each device, more than 0 and less than 1           |
| `gpu-fraction-limit`       | the part it may use while it is idle, at most 1                |
| `gpu-memory`               | memory of each device, a whole number of MiB                   |
| `gpu-memory-limit`         | a Kubernetes quantity (500000000, 2500M, 4G, 4Gi)              |
| `gpu-compute`              | the part of each device's computing power, less than 1         |
| `gpu-fraction-num-devices` | of how many devices of one node it holds that share; default 1 |

Each with `gpuquota.dev/` in front or, as KAI has them, without. The variable holds a fraction where the request is one,
and a quantity where the request is memory; an annotation with the same meaning must have the same value.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api.quantity import exact_text, parse_mib
from kfp_gpuquota.api.share import share_fields
from kfp_gpuquota.api.validation import MAX_COUNT, MAX_MIB
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.api.job import JobSpec

PREFIX: Final = "gpuquota.dev/"
FRACTION: Final = "gpu-fraction"
FRACTION_LIMIT: Final = "gpu-fraction-limit"
MEMORY: Final = "gpu-memory"
MEMORY_LIMIT: Final = "gpu-memory-limit"
COMPUTE: Final = "gpu-compute"
DEVICES: Final = "gpu-fraction-num-devices"
SHARE_ANNOTATIONS: Final = (FRACTION, FRACTION_LIMIT, MEMORY, MEMORY_LIMIT, COMPUTE, DEVICES)
LIMIT_VARIABLE: Final = "RUNAI_GPU_MEMORY_LIMIT"

_LONGEST: Final = 40
_DECIMAL: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)", re.ASCII)


def share_of_pod(annotations: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a `JobSpec` for the share that the pod requests; empty if it requests none.

    `environment` is that of the first container. Raises InvalidFieldError for what cannot be read, or contradicts
    itself; what is out of range is refused where the `JobSpec` is made.
    """
    share = {field: value for field, value in _from_annotations(annotations).items() if value is not None}
    if (limit := environment.get(LIMIT_VARIABLE)) is not None and (
        "gpu_fraction" in share or "gpu_memory_mib" in share
    ):
        _add_variable(share, limit)
    return share


def as_annotations(spec: JobSpec) -> dict[str, str]:
    """Return the annotations from which `share_of_pod` reads the job's share; {} if it requests none."""
    devices = str(spec.worker_gpus) if spec.shared else None
    limit = None if spec.gpu_memory_limit_mib is None else f"{spec.gpu_memory_limit_mib}Mi"
    memory = None if spec.gpu_memory_mib is None else str(spec.gpu_memory_mib)
    given = {
        FRACTION: _decimal(spec.gpu_fraction),
        FRACTION_LIMIT: _decimal(spec.gpu_fraction_limit),
        MEMORY: memory,
        MEMORY_LIMIT: limit,
        COMPUTE: _decimal(spec.gpu_compute),
        DEVICES: devices,
    }
    return {PREFIX + name: text for name, text in given.items() if text is not None}


def with_limit_variable(spec: JobSpec) -> JobSpec:
    """Return the job with the limit that RUNAI_GPU_MEMORY_LIMIT in its environment gives, where it asks for a share.

    Raises InvalidFieldError for what cannot be read, contradicts the job's own limit, or is below its whole GPUs.
    """
    text = spec.environment.get(LIMIT_VARIABLE)
    if text is None or (not spec.shared and text == "1"):
        return spec
    if not spec.shared:
        raise InvalidFieldError(
            LIMIT_VARIABLE, text, "it limits a share of a GPU, and the job asks for whole ones",
            hint="leave it out, or ask for a share (gpu_fraction, gpu_memory)",
        )  # fmt: skip
    share = share_fields(spec)
    _add_variable(share, text)
    return msgspec.structs.replace(spec, **share)


def asks_for_share(annotations: Mapping[str, str]) -> bool:
    """Return whether any of the annotations is present, valid or not."""
    return any(name in annotations or PREFIX + name in annotations for name in SHARE_ANNOTATIONS)


def _from_annotations(annotations: Mapping[str, str]) -> dict[str, Any]:
    return {
        "gpu_fraction": _read(annotations, FRACTION, _fraction),
        "gpu_fraction_limit": _read(annotations, FRACTION_LIMIT, _fraction),
        "gpu_memory_mib": _read(annotations, MEMORY, _mebibytes),
        "gpu_memory_limit_mib": _read(annotations, MEMORY_LIMIT, parse_mib),
        "gpu_compute": _read(annotations, COMPUTE, _fraction),
        "gpu_devices": _read(annotations, DEVICES, _count),
    }


def _add_variable(share: dict[str, Any], text: str) -> None:
    """The limit of the kind that the request is of."""
    by_fraction = "gpu_fraction" in share
    field = "gpu_fraction_limit" if by_fraction else "gpu_memory_limit_mib"
    limit = _fraction(LIMIT_VARIABLE, text) if by_fraction else parse_mib(LIMIT_VARIABLE, text)
    if share.setdefault(field, limit) != limit:
        raise InvalidFieldError(
            LIMIT_VARIABLE, text, "the request itself gives another limit", hint="leave out one of the two"
        )


def _read(annotations: Mapping[str, str], name: str, parse: Callable[[str, str], Any]) -> Any:
    """The value of the annotation under either of its names."""
    own, plain = annotations.get(PREFIX + name), annotations.get(name)
    if own is not None and plain is not None and own != plain:
        raise InvalidFieldError(
            PREFIX + name, own, f"the annotation {name} says {plain!r}", hint="leave out one of the two"
        )
    text = plain if own is None else own
    return None if text is None else parse(name if own is None else PREFIX + name, text.strip())


def _decimal(value: float | None) -> str | None:
    return None if value is None else exact_text(value)


def _fraction(field: str, text: str) -> float:
    if len(text) > _LONGEST or not _DECIMAL.fullmatch(text):
        raise InvalidFieldError(field, text, "it must be a number, such as 0.25")
    value = float(text)
    if not 0 < value <= 1:
        raise InvalidFieldError(field, text, "it must be more than 0 and at most 1")
    return value


def _mebibytes(field: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > _LONGEST or int(text) > MAX_MIB:
        raise InvalidFieldError(
            field, text, f"it must be a whole number of MiB, at most {MAX_MIB}", hint="such as 4096"
        )
    return int(text)


def _count(field: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > _LONGEST or int(text) > MAX_COUNT:
        raise InvalidFieldError(field, text, f"it must be a whole number, at most {MAX_COUNT}", hint="for example 8")
    return int(text)
