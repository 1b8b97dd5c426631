"""Sums up a pod's resource requests as kube-scheduler does, for every resource that a node counts. Pure.

The rule is that of `PodRequests` in k8s.io/component-helpers: the maximum of all containers with the sidecars, and of
each init container with the sidecars started before it; plus the overhead of the runtime class. Pod-level resources
(`spec.resources`) replace those of the containers.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from math import ceil, floor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kfp_gpuquota.api.quantity import MIB, as_number, parse_quantity
from kfp_gpuquota.api.resources import PORT_PREFIX, WHOLE_GPU, WHOLE_PORT
from kfp_gpuquota.api.validation import MAX_COUNT, MAX_MIB
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

    from kfp_gpuquota.api.resources import Resources
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Container as PodContainer
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import PodSpec
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Resources as ContainerResources

MILLI: Final = 1000
MAX_WEIGHT: Final = 64  # GPUs that one unit of another resource may count as
MAX_DEVICES: Final = 4096  # of one pod or node: more than any machine has, also in slices
MOST_ENTRIES: Final = 256
"""The longest list in a pod that is planned: of labels, conditions on nodes, resources and host ports, or claims."""
CLAIM_TEMPLATE: Final = "ResourceClaimTemplate "
"""Before the name of a template whose devices count: no resource's name has a space."""
_LONGEST: Final = 18  # digits: a number that a label or an annotation may hold


class ResourceRequests(NamedTuple):
    """CPU in thousandths of a core, memory in bytes, and all others that are counted, except GPUs and pod slots."""

    cpu: int = 0
    memory: int = 0
    others: Resources = ()

    def constraints(self) -> dict[str, Any]:
        """Return the requests as fields of a CountedJobSpec, rounded up, and capped at more than any node has."""
        cpu, memory = min(self.cpu / MILLI, MAX_COUNT), min(-(-self.memory // MIB), MAX_MIB)
        return {"cpu": cpu or None, "memory_mib": memory or None, "resources": self.others}


def resource_requests_of(spec: PodSpec) -> ResourceRequests:
    """Return what kube-scheduler reserves for the pod on its node."""
    needed, ports = _needed(spec), ports_of(spec)
    if not needed and not ports:
        return NOTHING
    others = ((name, amount) for name, amount in needed.items() if amount and name not in SEPARATE)
    return ResourceRequests(needed.get("cpu", 0), needed.get("memory", 0), tuple(sorted((*others, *ports))))


def ports_of(spec: PodSpec) -> Resources:
    """Return the host ports of the pod's containers as amounts: see WHOLE_PORT. Init containers take none.

    Of a pod with more than MOST_ENTRIES the others are left out.
    """
    amounts: dict[str, int] = {}
    ports = (port for container in spec.containers for port in container.ports if port.host_port)
    for port in islice(ports, MOST_ENTRIES + 1):
        name = f"{PORT_PREFIX}{port.protocol}/{port.host_port}"
        if port.host_ip in _ANY_ADDRESS:
            amounts[name] = WHOLE_PORT
        else:
            amounts[name] = min(WHOLE_PORT, amounts.get(name, 0) + 1)
            amounts[f"{name}/{port.host_ip}"] = WHOLE_PORT
    return tuple(amounts.items())


def allocatable_of(allocatable: Mapping[str, str], taken: Mapping[str, int]) -> Resources:
    """Return what a node has of the other resources, without what is `taken`."""
    amounts = {name: whole_number(amount) for name, amount in allocatable.items() if name not in SEPARATE}
    amounts |= {name: WHOLE_PORT for name in taken if name.startswith(PORT_PREFIX)}
    return tuple(sorted((name, max(0, amount - taken.get(name, 0))) for name, amount in amounts.items()))


NOTHING: Final = ResourceRequests()
SEPARATE: Final = frozenset({"cpu", "memory", "pods", labels.GPU_RESOURCE})  # counted by fields of their own
_ANY_ADDRESS: Final = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - not bound, but compared


def gpus_of(spec: PodSpec) -> int:
    """Return the number of devices that the pod's containers request, at most MAX_DEVICES."""
    name = labels.GPU_RESOURCE
    asked = total(spec, lambda container: [(name, device_count(str(container.resources.limits.get(name, 0))))])
    return min(asked.get(name, 0), MAX_DEVICES)


def weights_text(weights: Resources) -> str:
    """Return the resources that count as GPUs as annotated: 'amd.com/gpu=1,nvidia.com/gpu.shared=0.25'."""
    return ",".join(f"{name}={as_number(weight / WHOLE_GPU)}" for name, weight in weights)


@lru_cache(256)
def weights_in(text: str) -> Resources:
    """Return the resources that count as GPUs, in millionths of a GPU. Raises InvalidFieldError."""
    try:
        rows = [row.rpartition("=") for row in text.split(",")]
        weights = tuple((name, round(float(number) * WHOLE_GPU)) for name, _, number in rows)
    except (ValueError, OverflowError):
        weights = ()
    if not weights or not all(0 < weight <= MAX_WEIGHT * WHOLE_GPU for _, weight in weights):
        raise InvalidFieldError(labels.GPU_WEIGHTS, text, "it must be RESOURCE=GPUS, separated by commas")
    return weights


def requests_any(spec: PodSpec, names: Container[str]) -> bool:
    """Return whether the pod requests any of these resources, or claims devices by any of these templates."""
    given = (resources for one in _containers(spec) for resources in (one.resources.limits, one.resources.requests))
    if any(str(amount) != "0" for resources in given for name, amount in resources.items() if name in names):
        return True
    return any(f"{CLAIM_TEMPLATE}{one.resource_claim_template_name}" in names for one in spec.resource_claims)


def check_length(field: str, length: int, most: int = MOST_ENTRIES) -> None:
    """Raise InvalidFieldError for a list of a pod that is longer than the plan considers."""
    if length > most:
        raise InvalidFieldError(field, length, f"a pod with more than {most} of them is not planned")


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


def total(spec: PodSpec, amounts: Callable[[PodContainer], Iterable[tuple[str, int]]]) -> dict[str, int]:
    """Return the maximum amounts that the pod's containers use at the same time, each by its name."""
    sidecars, largest, together = dict[str, int](), dict[str, int](), dict[str, int]()
    for container in spec.init_containers:
        for name, amount in amounts(container):
            most = sidecars.get(name, 0) + amount
            largest[name] = max(largest.get(name, 0), most)
            if container.restart_policy == "Always":
                sidecars[name] = most
    for container in spec.containers:
        for name, amount in amounts(container):
            together[name] = together.get(name, sidecars.get(name, 0)) + amount
    return {name: max(together.get(name, 0), largest.get(name, 0)) for name in (*together, *largest)}


def _containers(spec: PodSpec) -> tuple[PodContainer, ...]:
    return (*spec.containers, *spec.init_containers)


def _needed(spec: PodSpec) -> dict[str, int]:
    """Return the amounts of all resources, each read once: a pod of a megabyte has ten thousand of them."""
    needed = total(spec, lambda container: _amounts(container.resources))
    for name in _names(spec.resources):
        if (whole := requested(spec.resources.requests, spec.resources.limits, name)) != "0":
            needed[name] = _read(name, whole)
    for name, quantity in spec.overhead.items():
        needed[name] = needed.get(name, 0) + _read(name, str(quantity))
    return needed


def _names(resources: ContainerResources) -> set[str]:
    return resources.requests.keys() | resources.limits.keys()


def _amounts(resources: ContainerResources) -> Iterator[tuple[str, int]]:
    """Yield what a container requests of each resource."""
    for name in _names(resources):
        yield name, _read(name, requested(resources.requests, resources.limits, name))


def _read(name: str, quantity: str) -> int:
    if name == "cpu":
        return millicores(quantity)
    return whole_bytes(quantity) if name == "memory" else whole_number(quantity)


def requested(requests: Mapping[str, Any], limits: Mapping[str, Any], resource: str) -> str:
    """Return the request, by default the limit: the API server adds that default to pods, but not to templates."""
    return str(requests.get(resource) or limits.get(resource) or 0)


@lru_cache(4096)
def millicores(quantity: str) -> int:
    """Return a CPU quantity in thousandths of a core, rounded up; 0 for an invalid quantity."""
    return _rounded_up("cpu", quantity, MILLI)


@lru_cache(4096)
def whole_bytes(quantity: str) -> int:
    """Return a memory quantity in bytes, rounded up; 0 for an invalid quantity."""
    return _rounded_up("memory", quantity)


@lru_cache(4096)
def whole_number(quantity: str) -> int:
    """Return a quantity of any other resource, rounded up; 0 for an invalid quantity."""
    return _rounded_up("resources", quantity)


def _rounded_up(kind: str, quantity: str, unit: int = 1) -> int:
    try:
        return max(0, ceil(parse_quantity(kind, quantity) * unit))
    except InvalidFieldError:
        return 0


def mebibytes_left(size: int) -> int:
    """Return bytes as MiB, rounded down, at least 0."""
    return max(0, floor(size / MIB))
