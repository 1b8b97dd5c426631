"""What a pod takes of a node, added up as kube-scheduler does: pure.

The rule is that of `PodRequests` in k8s.io/component-helpers: all containers together with the sidecars, or one init
container with the sidecars that were started before it, whichever is more; and the overhead of its runtime class. What
a pod says of itself as a whole (`spec.resources`) counts instead of that of its containers.
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


class Needs(NamedTuple):
    """CPU in thousandths of a core, main memory in bytes."""

    cpu: int = 0
    memory: int = 0

    def constraints(self) -> dict[str, Any]:
        """As fields of a JobSpec, rounded up; more than any node has stays more than any node has."""
        cpu, memory = min(self.cpu / MILLI, MAX_COUNT), min(-(-self.memory // MIB), MAX_MIB)
        return {"cpu": cpu or None, "memory_mib": memory or None}


def needs_of(spec: PodSpec) -> Needs:
    """What kube-scheduler takes off the node for the pod."""
    whole = spec.resources.requests or spec.resources.limits
    if not (whole or spec.overhead or any(c.resources.requests or c.resources.limits for c in _containers(spec))):
        return NOTHING
    return Needs(_needed(spec, "cpu", millicores), _needed(spec, "memory", whole_bytes))


NOTHING: Final = Needs()


def gpus_of(spec: PodSpec) -> int:
    """Whole devices that its containers ask for, at most MAX_DEVICES."""
    asked = total(spec, lambda container: device_count(str(container.resources.limits.get(labels.GPU_RESOURCE, 0))))
    return min(asked, MAX_DEVICES)


@lru_cache(4096)
def device_count(quantity: str) -> int:
    """A quantity of devices (the API server writes 1000 as "1k"), at most MAX_DEVICES; 0 for what is no quantity."""
    try:
        return max(0, min(MAX_DEVICES, ceil(parse_quantity(labels.GPU_RESOURCE, quantity))))
    except InvalidFieldError:
        return 0


def bounded_number(text: str, largest: int = MAX_COUNT) -> int | None:
    """A whole number in ASCII digits, from 0 to `largest`; None for any other text, however long."""
    if not text.isascii() or not text.isdecimal() or len(text) > _LONGEST:
        return None
    return number if (number := int(text)) <= largest else None


def total(spec: PodSpec, amount: Callable[[Container], int]) -> int:
    """The most of something that the pod's containers have at one time."""
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
    """A container with a limit only requests as much: the API server writes it so into pods, not into templates."""
    return str(requests.get(resource) or limits.get(resource) or 0)


@lru_cache(4096)
def millicores(quantity: str) -> int:
    """Rounded up; 0 for what is no quantity, which no pod or node can have."""
    try:
        return max(0, ceil(parse_quantity("cpu", quantity) * MILLI))
    except InvalidFieldError:
        return 0


@lru_cache(4096)
def whole_bytes(quantity: str) -> int:
    """Rounded up; 0 for what is no quantity."""
    try:
        return max(0, ceil(parse_quantity("memory", quantity)))
    except InvalidFieldError:
        return 0


def mebibytes_left(size: int) -> int:
    """What there is of memory, rounded down."""
    return max(0, floor(size / MIB))
