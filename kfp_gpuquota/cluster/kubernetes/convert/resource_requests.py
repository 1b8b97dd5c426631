"""Sums up a pod's resource requests as kube-scheduler does. Pure.

The rule is that of `PodRequests` in k8s.io/component-helpers: the maximum of all containers with the sidecars, and of
each init container with the sidecars started before it; plus the overhead of the runtime class. Pod-level resources
(`spec.resources`) replace those of the containers.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, floor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kfp_gpuquota.api.quantity import MIB, parse_quantity
from kfp_gpuquota.api.validation import MAX_COUNT, MAX_MIB
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Container, PodSpec

MILLI: Final = 1000
MAX_DEVICES: Final = 4096  # of one pod or node: more than any machine has, also in slices
_LONGEST: Final = 18  # digits: a number that a label or an annotation may hold


class ResourceRequests(NamedTuple):
    """CPU in thousandths of a core, and memory in bytes."""

    cpu: int = 0
    memory: int = 0

    def constraints(self) -> dict[str, Any]:
        """Return the requests as fields of a JobSpec, rounded up, and capped at more than any node has."""
        cpu, memory = min(self.cpu / MILLI, MAX_COUNT), min(-(-self.memory // MIB), MAX_MIB)
        return {"cpu": cpu or None, "memory_mib": memory or None}


def resource_requests_of(spec: PodSpec) -> ResourceRequests:
    """Return the CPU and memory that kube-scheduler reserves for the pod."""
    whole = spec.resources.requests or spec.resources.limits
    if not (whole or spec.overhead or any(c.resources.requests or c.resources.limits for c in _containers(spec))):
        return NOTHING
    return ResourceRequests(_needed(spec, "cpu", millicores), _needed(spec, "memory", whole_bytes))


NOTHING: Final = ResourceRequests()


def gpus_of(spec: PodSpec) -> int:
    """Return the number of devices that the pod's containers request, at most MAX_DEVICES."""
    asked = total(spec, lambda container: device_count(str(container.resources.limits.get(labels.GPU_RESOURCE, 0))))
    return min(asked, MAX_DEVICES)


@lru_cache(4096)
def device_count(quantity: str) -> int:
    """Return a quantity of devices as a number, at most MAX_DEVICES ("1k" is 1000); 0 for an invalid quantity."""
    try:
        return max(0, min(MAX_DEVICES, ceil(parse_quantity(labels.GPU_RESOURCE, quantity))))
    except InvalidFieldError:
        return 0


def bounded_number(text: str, largest: int = MAX_COUNT) -> int | None:
    """Return a whole number of ASCII digits, from 0 to `largest`; None for any other text."""
    if not text.isascii() or not text.isdecimal() or len(text) > _LONGEST:
        return None
    return number if (number := int(text)) <= largest else None


def total(spec: PodSpec, amount: Callable[[Container], int]) -> int:
    """Return the maximum amount that the pod's containers use at the same time."""
    sidecars = largest = 0
    for container in spec.init_containers:
        if container.restart_policy == "Always":
            sidecars += amount(container)
            largest = max(largest, sidecars)
        else:
            largest = max(largest, sidecars + amount(container))
    return max(sidecars + sum(map(amount, spec.containers)), largest)


def _containers(spec: PodSpec) -> tuple[Container, ...]:
    return (*spec.containers, *spec.init_containers)


def _needed(spec: PodSpec, resource: str, read: Callable[[str], int]) -> int:
    whole = requested(spec.resources.requests, spec.resources.limits, resource)
    needed = total(
        spec, lambda container: read(requested(container.resources.requests, container.resources.limits, resource))
    )
    return (read(whole) if whole != "0" else needed) + read(str(spec.overhead.get(resource, 0)))


def requested(requests: Mapping[str, Any], limits: Mapping[str, Any], resource: str) -> str:
    """Return the request, by default the limit: the API server adds that default to pods, but not to templates."""
    return str(requests.get(resource) or limits.get(resource) or 0)


@lru_cache(4096)
def millicores(quantity: str) -> int:
    """Return a CPU quantity in thousandths of a core, rounded up; 0 for an invalid quantity."""
    try:
        return max(0, ceil(parse_quantity("cpu", quantity) * MILLI))
    except InvalidFieldError:
        return 0


@lru_cache(4096)
def whole_bytes(quantity: str) -> int:
    """Return a memory quantity in bytes, rounded up; 0 for an invalid quantity."""
    try:
        return max(0, ceil(parse_quantity("memory", quantity)))
    except InvalidFieldError:
        return 0


def mebibytes_left(size: int) -> int:
    """Return bytes as MiB, rounded down, at least 0."""
    return max(0, floor(size / MIB))
