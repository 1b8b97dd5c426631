"""Objects of Dynamic Resource Allocation (resource.k8s.io/v1), with only the fields that are read."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata, Struct

_API: Final = "/apis/resource.k8s.io/v1"
CLASSES: Final = f"{_API}/deviceclasses"
SLICES: Final = f"{_API}/resourceslices"
CLAIMS: Final = f"{_API}/resourceclaims"
TEMPLATES: Final = f"{_API}/resourceclaimtemplates"
CLASS_PREFIX: Final = "deviceclass.resource.kubernetes.io/"
"""With the name of a DeviceClass it is the extended resource by which a container may request the class's devices."""


Amount = str | int | float
"""A quantity: most writers give it as text."""


class Cel(Struct, frozen=True):
    """A CEL expression."""

    expression: str = ""


class DeviceSelector(Struct, frozen=True):
    """A condition that a device must satisfy."""

    cel: Cel | None = None


class DeviceClassSpec(Struct, frozen=True):
    """The devices of a class, and the extended resource by which they may be requested besides the implicit one."""

    selectors: tuple[DeviceSelector, ...] = ()
    extended_resource_name: str = ""


class DeviceClass(Struct, frozen=True):
    """A DeviceClass."""

    metadata: Metadata
    spec: DeviceClassSpec = DeviceClassSpec()


class DeviceTaint(Struct, frozen=True):
    """A taint of a device."""

    effect: str = ""


class CapacityRange(Struct, frozen=True):
    """The amounts that a request may consume: `min`, and more by multiples of `step`."""

    min: Amount = ""
    step: Amount = ""


class CapacityPolicy(Struct, frozen=True):
    """How requests consume a capacity: `default` without an amount, else rounded up to one that is valid."""

    default: Amount = ""
    valid_values: tuple[Amount, ...] = ()
    valid_range: CapacityRange | None = None


class DeviceCapacity(Struct, frozen=True):
    """A capacity of a device; without a policy any amount may be consumed, and all of it by default."""

    value: Amount = ""
    request_policy: CapacityPolicy | None = None


class DeviceCounter(Struct, frozen=True):
    """The value of a counter."""

    value: Amount = ""


class CounterSet(Struct, frozen=True):
    """What the devices of a pool consume together: for example one GPU, of which they are partitions."""

    name: str = ""
    counters: dict[str, DeviceCounter] = msgspec.field(default_factory=dict)


class ConsumedCounters(Struct, frozen=True):
    """What a device consumes of a counter set."""

    counter_set: str = ""
    counters: dict[str, DeviceCounter] = msgspec.field(default_factory=dict)


class SlicedDevice(Struct, frozen=True):
    """One device of a ResourceSlice; each attribute has one value by the name of its type."""

    name: str
    attributes: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    taints: tuple[DeviceTaint, ...] = ()
    capacity: dict[str, DeviceCapacity] = msgspec.field(default_factory=dict)
    consumes_counters: tuple[ConsumedCounters, ...] = ()
    allow_multiple_allocations: bool = False


class ResourcePool(Struct, frozen=True):
    """The pool of a driver's devices that a slice is a part of; only slices of its newest generation are valid."""

    name: str = ""
    generation: int = 0


class ResourceSliceSpec(Struct, frozen=True):
    """Devices of one driver, on one node if `node_name` is given."""

    driver: str = ""
    node_name: str = ""
    pool: ResourcePool = ResourcePool()
    devices: tuple[SlicedDevice, ...] = ()
    shared_counters: tuple[CounterSet, ...] = ()


class ResourceSlice(Struct, frozen=True):
    """A ResourceSlice: devices that a driver publishes."""

    metadata: Metadata
    spec: ResourceSliceSpec = ResourceSliceSpec()


class RequestedCapacity(Struct, frozen=True):
    """What a request consumes of each device's capacity, by the capacity's name."""

    requests: dict[str, Amount] = msgspec.field(default_factory=dict)


class ExactRequest(Struct, frozen=True):
    """A request for devices of one class."""

    device_class_name: str = ""
    allocation_mode: str = ""
    count: int = 1
    admin_access: bool = False
    selectors: tuple[DeviceSelector, ...] = ()
    capacity: RequestedCapacity | None = None


class SubRequest(Struct, frozen=True):
    """One of the alternatives of a request."""

    name: str = ""
    device_class_name: str = ""


class DeviceRequest(Struct, frozen=True):
    """A request of a claim: for devices of one class, or for the first available of several alternatives."""

    name: str = ""
    exactly: ExactRequest | None = None
    first_available: tuple[SubRequest, ...] = ()


class RequestedDevices(Struct, frozen=True):
    """The devices that a claim requests."""

    requests: tuple[DeviceRequest, ...] = ()


class ResourceClaimSpec(Struct, frozen=True):
    """The specification of a claim."""

    devices: RequestedDevices = RequestedDevices()


class AllocatedDevice(Struct, frozen=True):
    """A device of a driver's pool that was allocated to a request: "NAME", or "NAME/ALTERNATIVE"."""

    request: str = ""
    driver: str = ""
    pool: str = ""
    device: str = ""
    admin_access: bool = False
    consumed_capacity: dict[str, Amount] = msgspec.field(default_factory=dict)


class AllocatedDevices(Struct, frozen=True):
    """The devices that a claim has."""

    results: tuple[AllocatedDevice, ...] = ()


class Allocation(Struct, frozen=True):
    """What was allocated to a claim."""

    devices: AllocatedDevices = AllocatedDevices()


class Consumer(Struct, frozen=True):
    """An object that a claim is reserved for: a pod, if `resource` is "pods"."""

    resource: str = ""
    name: str = ""


class ResourceClaimStatus(Struct, frozen=True):
    """The status of a claim."""

    allocation: Allocation | None = None
    reserved_for: tuple[Consumer, ...] = ()


class ResourceClaim(Struct, frozen=True):
    """A ResourceClaim."""

    metadata: Metadata
    spec: ResourceClaimSpec = ResourceClaimSpec()
    status: ResourceClaimStatus = ResourceClaimStatus()

    @property
    def results(self) -> tuple[AllocatedDevice, ...]:
        """Return the devices that the claim has; () before it is allocated."""
        return self.status.allocation.devices.results if self.status.allocation is not None else ()


class ClaimTemplateSpec(Struct, frozen=True):
    """The claims that are made of a template."""

    spec: ResourceClaimSpec = ResourceClaimSpec()


class ResourceClaimTemplate(Struct, frozen=True):
    """A ResourceClaimTemplate."""

    metadata: Metadata
    spec: ClaimTemplateSpec = ClaimTemplateSpec()
