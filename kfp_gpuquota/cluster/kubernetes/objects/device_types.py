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


class SlicedDevice(Struct, frozen=True):
    """One device of a ResourceSlice; each attribute has one value by the name of its type."""

    name: str
    attributes: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    taints: tuple[DeviceTaint, ...] = ()


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


class ResourceSlice(Struct, frozen=True):
    """A ResourceSlice: devices that a driver publishes."""

    metadata: Metadata
    spec: ResourceSliceSpec = ResourceSliceSpec()


class ExactRequest(Struct, frozen=True):
    """A request for devices of one class."""

    device_class_name: str = ""
    allocation_mode: str = ""
    count: int = 1
    admin_access: bool = False


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
