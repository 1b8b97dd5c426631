"""A share of GPUs: a request that is guaranteed, and a limit up to which what is idle may be used, as Kubernetes has
them for CPU. The same words wherever a share is asked for: command line, API, decorator, annotations.
"""

from __future__ import annotations

from decimal import Decimal
from math import ceil
from typing import TYPE_CHECKING, Any, Final, Protocol

from kfp_gpuquota.api.quantity import MIB, exact_text, show_mib
from kfp_gpuquota.api.validation import MAX_MIB, check_count
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from kfp_gpuquota.api.job import JobSpec

_WHOLE = ("min_gpus", "max_gpus", "gpus_per_worker")
SHARE_FIELDS: Final = ("gpu_fraction", "gpu_fraction_limit", "gpu_memory_mib", "gpu_memory_limit_mib")


SMALLEST_FRACTION: Final = 0.001
"""The smallest share of a device that an administrator can allow; far less would count as nothing."""

DEFAULT_SMALLEST_SHARE: Final = 0.01
"""Of each device; less would not cover a process's own memory on it."""

COMPUTE_VARIABLE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""NVIDIA's MPS gives a process no more than this percentage of a device's threads."""


class Asked(Protocol):
    """A share as it is asked for: a fraction of each device, or MiB; without a limit the request is one."""

    @property
    def gpu_fraction(self) -> float | None:
        """The part that is guaranteed."""

    @property
    def gpu_fraction_limit(self) -> float | None:
        """The largest part that may be used."""

    @property
    def gpu_memory_mib(self) -> int | None:
        """MiB that are guaranteed."""

    @property
    def gpu_memory_limit_mib(self) -> int | None:
        """The most MiB that may be used."""


def share_fields(asked: Asked) -> dict[str, Any]:
    """The fields of a share that are given, by name."""
    return {field: value for field in SHARE_FIELDS if (value := getattr(asked, field)) is not None}


def request_mib(asked: Asked, total_mib: int) -> int:
    """Return the guaranteed memory on a device of this size."""
    return asked.gpu_memory_mib or int((asked.gpu_fraction or 0.0) * total_mib)


def limit_mib(asked: Asked, total_mib: int) -> int:
    """The most that may be used of such a device."""
    if asked.gpu_memory_mib is not None:
        return asked.gpu_memory_limit_mib or asked.gpu_memory_mib
    return int((asked.gpu_fraction_limit or asked.gpu_fraction or 0.0) * total_mib)


def limit_text(asked: Asked) -> str:
    """For RUNAI_GPU_MEMORY_LIMIT: a part where a fraction is asked for, bytes where memory is."""
    if asked.gpu_memory_mib is not None:
        return str((asked.gpu_memory_limit_mib or asked.gpu_memory_mib) * MIB)
    return exact_text(asked.gpu_fraction_limit or asked.gpu_fraction or 0.0)


def compute_variables(compute: float | None) -> dict[str, str]:
    """Return the environment variables that limit a process to a part of each device's computing power."""
    return {} if compute is None else {COMPUTE_VARIABLE: f"{Decimal(repr(compute)) * 100:f}"}


def check_share(spec: JobSpec) -> None:
    """Raises InvalidFieldError where the job's share is malformed, or mixed with another kind of request."""
    for field in ("gpu_fraction", "gpu_fraction_limit", "gpu_compute"):
        _check_number(field, getattr(spec, field))
    _check_fractions(spec.gpu_fraction, spec.gpu_fraction_limit)
    _check_memory(spec.gpu_memory_mib, spec.gpu_memory_limit_mib)
    if spec.gpu_fraction is not None and spec.gpu_memory_mib is not None:
        raise InvalidFieldError(
            "gpu_memory_mib", spec.gpu_memory_mib, f"the job already asks for gpu_fraction {spec.gpu_fraction:g}",
            hint="ask for a fraction or for memory",
        )  # fmt: skip
    if not spec.shared:
        _refuse_without_share(spec)
        return
    if spec.gpu_compute is not None and not 0 < spec.gpu_compute < 1:
        raise InvalidFieldError("gpu_compute", spec.gpu_compute, "it must be more than 0 and less than 1")
    if spec.gpu_devices is not None:
        check_count("gpu_devices", spec.gpu_devices, 1)
    _refuse_whole(spec)


def _refuse_without_share(spec: JobSpec) -> None:
    about = {
        "gpu_devices": "counts the GPUs of which a job holds a share",
        "gpu_compute": "limits a job's share of a GPU",
    }
    for field, what in about.items():
        if (value := getattr(spec, field)) is not None:
            raise InvalidFieldError(
                field, value, f"it {what}, and there is none",
                hint="add gpu_fraction or gpu_memory_mib, or ask for whole GPUs with gpus",
            )  # fmt: skip


def _check_number(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise InvalidFieldError(field, value, "it must be a number, such as 0.25")


def _check_fractions(request: float | None, limit: float | None) -> None:
    if request is not None and not 0 < request < 1:
        hint = "ask for whole GPUs with gpus" if request >= 1 else ""
        raise InvalidFieldError("gpu_fraction", request, "it must be more than 0 and less than 1", hint=hint)
    if request is not None and request < SMALLEST_FRACTION:
        rule = f"no cluster gives a share of a GPU below {SMALLEST_FRACTION:g}"
        raise InvalidFieldError("gpu_fraction", request, rule)
    if limit is None:
        return
    if request is None:
        raise InvalidFieldError("gpu_fraction_limit", limit, "there is no gpu_fraction of which it is the limit")
    if not request <= limit <= 1:
        rule = f"it must be between gpu_fraction, which is {request:g}, and 1"
        raise InvalidFieldError("gpu_fraction_limit", limit, rule)


def refuse_small_share(fraction: float | None, memory_mib: int | None, smallest: float, device_mib: int = 0) -> None:
    """Raise InvalidFieldError for a share below the administrator's `smallest`.

    `memory_mib` is compared on devices of `device_mib`, if their memory is known.
    """
    hint = "ask for more, or have the administrator lower the smallest share"
    if fraction is not None and fraction < smallest:
        raise InvalidFieldError(
            "gpu_fraction", fraction, f"the smallest share of a GPU is {smallest:g} here", hint=hint
        )
    least_mib = ceil(round(smallest * device_mib, 6))
    if memory_mib is not None and memory_mib < least_mib:
        rule = f"the smallest share of a GPU is {smallest:g} here, which is {least_mib} MiB"
        raise InvalidFieldError("gpu_memory_mib", memory_mib, rule, hint=hint)


def _check_memory(request: int | None, limit: int | None) -> None:
    if request is not None:
        check_count("gpu_memory_mib", request, 1, "MiB", MAX_MIB)
    if limit is None:
        return
    check_count("gpu_memory_limit_mib", limit, 1, "MiB", MAX_MIB)
    if request is None:
        raise InvalidFieldError("gpu_memory_limit_mib", limit, "there is no gpu_memory_mib of which it is the limit")
    if limit < request:
        rule = f"it must be at least gpu_memory_mib, which is {request} ({show_mib(request)})"
        raise InvalidFieldError("gpu_memory_limit_mib", limit, rule)


def _refuse_whole(spec: JobSpec) -> None:
    """A share and whole GPUs in one request. `gpus` at its default, or as this package itself writes it, is neither."""
    given = [(name, getattr(spec, name)) for name in _WHOLE if getattr(spec, name) is not None]
    if spec.gpus not in {1, spec.gpu_devices or 1}:
        given.insert(0, ("gpus", spec.gpus))
    for name, value in given:
        kind = "gpu_fraction" if spec.gpu_fraction is not None else "gpu_memory_mib"
        raise InvalidFieldError(
            name, value, f"it counts whole GPUs, and the job asks for a share of them ({kind})",
            hint="leave it out; for the same share of several GPUs of a node give gpu_devices",
        )  # fmt: skip
