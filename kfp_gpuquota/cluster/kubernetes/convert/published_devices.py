"""Adds the devices that DRA drivers publish (ResourceSlices) to what nodes have of extended resources. No I/O.

The devices of a DeviceClass are those of the class's implicit extended resource, and of the one that it names. Like
kube-scheduler, a node that has the extended resource by a device plugin keeps that amount. Only classes that count are
added: those of QuotaPolicy's table, and nvidia.com/gpu.

Devices of classes that the table counts without a `countsAs` are added as parts of GPUs if their driver divides or
shares any of its devices (device_parts.py).

Only slices of one node are planned, of the newest generation of their pool. Pods that claim devices of a class of which
several nodes can reach each device wait with that reason (`only_reached_by_several`). If two classes that
count select the same devices, the plan may send pods of both to them; kube-scheduler then binds only some, and the
others count against the quota until they are bound (unpinned.py).

What lists of nodes show (`shown_on`) is what kube-scheduler has allocated (ResourceClaims), and not what pods request:
a device is in use while it is allocated, to whatever class and also outside the quota. A class has one row there, by
the first of its names that counts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from kfp_gpuquota.api.quantity import as_number
from kfp_gpuquota.api.resources import GPU_PART_PREFIX, WHOLE_GPU
from kfp_gpuquota.cluster.kubernetes.convert.claimed_devices import (
    Demand,
    Selected,
    by_name,
    classes_of,
    is_tainted,
    selected_by,
    selects,
)
from kfp_gpuquota.cluster.kubernetes.convert.device_parts import PublishedParts, gpus_of_pool
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Subject
from kfp_gpuquota.cluster.kubernetes.objects.device_types import CLASS_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from kfp_gpuquota.api.resources import Resources
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Node
    from kfp_gpuquota.cluster.kubernetes.objects.device_types import (
        DeviceClass,
        ResourceClaim,
        ResourceSlice,
        ResourceSliceSpec,
        SlicedDevice,
    )

K = TypeVar("K")
Pool = tuple[str, str]  # driver and name


class DeviceId(NamedTuple):
    """The name of a device in the cluster."""

    driver: str
    pool: str
    name: str


class _Class(NamedTuple):
    name: str
    conditions: Selected
    extended: str


class _Use(NamedTuple):
    """A device's allocation to a claim: the DeviceClass that was requested, and the pods with that claim."""

    device_class: str
    holders: tuple[str, ...]
    capacity: tuple[tuple[str, str], ...] = ()  # what it consumes of the device


class Allocations:
    """The devices that claims have. Pods are named "namespace/name", or without their namespace."""

    def __init__(self, *, with_namespace: bool) -> None:
        self._with_namespace = with_namespace
        self._claims: dict[str, dict[DeviceId, _Use]] = {}  # by uid
        self._uses: dict[DeviceId, dict[str, _Use]] = {}  # of each device, by the claim's uid

    def put(self, claim: ResourceClaim) -> set[Pool]:
        """Add or update a claim; return the pools whose devices are used differently now."""
        classes, meta = classes_of(claim.spec), claim.metadata
        pods = (one.name for one in claim.status.reserved_for if one.resource == "pods")
        prefix = f"{meta.namespace}/" if self._with_namespace else ""
        holders = tuple(f"{prefix}{name}" for name in pods)
        found = {
            DeviceId(one.driver, one.pool, one.device): _Use(
                classes.get(one.request, ""), holders, by_name(one.consumed_capacity)
            )
            for one in claim.results
            if not one.admin_access
        }
        return set() if self._claims.get(meta.uid, {}) == found else self._replace(meta.uid, found)

    def drop(self, uid: str) -> set[Pool]:
        """Remove a deleted claim; return the pools of its devices."""
        return self._replace(uid, {})

    def of(self, device: DeviceId) -> tuple[_Use, ...]:
        """Return the allocations of a device, in the order of its claims' uids: several of one that allows that."""
        return tuple(use for _, use in sorted(self._uses.get(device, {}).items()))

    def _replace(self, uid: str, found: dict[DeviceId, _Use]) -> set[Pool]:
        before = self._claims.pop(uid, {})
        for device in before:
            uses = self._uses[device]
            del uses[uid]
            if not uses:
                del self._uses[device]
        for device, use in found.items():
            self._uses.setdefault(device, {})[uid] = use
        if found:
            self._claims[uid] = found
        return {(device.driver, device.pool) for device in (*before, *found)}


@dataclass
class Shown:
    """The number of a node's devices of one resource, and what each pod holds of them.

    A device that several pods share counts for the first one, and 0 for the others; "" is an allocation without a pod.
    Of GPUs that are divided, `count` is their number, and pods hold parts.
    """

    count: int = 0
    held: dict[str, float] = field(default_factory=dict)

    def add(self, uses: Collection[_Use]) -> None:
        """Add a device with its allocations."""
        self.count += 1
        holders = list(dict.fromkeys(holder for use in uses for holder in use.holders or ("",)))
        for number, holder in enumerate(holders):
            self.held[holder] = self.held.get(holder, 0) + (number == 0)

    def add_part(self, use: _Use, gpus: float) -> None:
        """Add what an allocation holds of divided GPUs."""
        for number, holder in enumerate(use.holders or ("",)):
            self.held[holder] = as_number(self.held.get(holder, 0) + (0 if number else gpus))


class PublishedDevices:
    """Slices and classes. `put_node(node)` receives a node again when its devices have changed.

    `report(class, reason, message)` is called for classes that are only partly understood, and `sizes_changed(pool)`
    when what the devices of a pool count as has changed, with None of all pools.
    """

    def __init__(
        self,
        put_node: Callable[[Node], None],
        report: Callable[[Subject, str, str], None],
        sizes_changed: Callable[[Pool | None], None] = lambda _pool: None,
    ) -> None:
        self._put_node, self._report, self._sizes_changed = put_node, report, sizes_changed
        self._parts = PublishedParts()
        self._divided: Mapping[str, str] = {}
        self._counted: frozenset[str] = frozenset()
        self._classes: dict[str, _Class] = {}  # by uid
        self._class_uids: dict[str, str] = {}  # by name
        self._far: dict[str, bool] = {}  # of classes by name: what `only_reached_by_several` has found
        self._shared: dict[str, ResourceSliceSpec] = {}  # slices whose devices several nodes can reach, by uid
        self._slices: dict[str, ResourceSliceSpec] = {}  # by uid
        self._of_node: dict[str, dict[str, None]] = {}  # uids of its slices
        self._of_pool: dict[Pool, dict[str, None]] = {}
        self._nodes: dict[str, Node] = {}  # as their kubelets report them

    @property
    def count_any(self) -> bool:
        """Return whether the devices of any class count."""
        return bool(self._counted_classes())

    def set_counted(self, names: Collection[str], divided: Mapping[str, str] | None = None) -> None:
        """Set the names of the resources that count as GPUs.

        `divided` has those that count by the part of a GPU that each device is, with the counter that says which.
        """
        counted, parts = frozenset({labels.GPU_RESOURCE, *names}), divided or {}
        if (counted, parts) != (self._counted, self._divided):
            self._counted, self._divided = counted, parts
            self._update(self._of_node)

    def part_of(self, demand: Demand, resource: str) -> Resources | None:
        """Return what each device of a demand counts as, of a class that counts as `resource`; None: as its row."""
        counts_by, of = self._divided.get(resource), self._class_of(demand.device_class)
        return None if counts_by is None or of is None else self._parts.part_of(demand, of.conditions, counts_by)

    def is_published(self, device: tuple[str, str, str]) -> bool:
        """Return whether a device (driver, pool, name) is published now."""
        return self._parts.has(device)

    def only_reached_by_several(self, device_class: str) -> bool:
        """Return whether the class has devices, and several nodes can reach each of them."""
        if not self._shared:
            return False
        if device_class not in self._far:
            self._far[device_class] = self._is_far(device_class)
        return self._far[device_class]

    def _is_far(self, device_class: str) -> bool:
        if (of := self._class_of(device_class)) is None:
            return False
        has_any = any(_has_any(one, of.conditions) for one in self._shared.values())
        near = (one for one in self._slices.values() if one.node_name)
        return has_any and not any(_has_any(one, of.conditions) for one in near)

    def _class_of(self, name: str) -> _Class | None:
        return self._classes.get(self._class_uids.get(name, ""))

    def apply(self, node: Node) -> Node:
        """Return the node with the published devices."""
        name = node.metadata.name
        self._nodes[name] = node
        amounts = self.amounts(name)
        if not amounts:
            return node
        return with_amounts(node, amounts)

    def shown_on(self, node: str, allocations: Allocations) -> dict[str, Shown]:
        """Return the node's devices and who holds them, by the resource that counts."""
        found: dict[str, Shown] = {}
        divided: dict[str, dict[Pool, list[SlicedDevice]]] = {}
        for one, device in self._devices(node):
            place = DeviceId(one.driver, one.pool.name, device.name)
            uses = allocations.of(place)
            if is_tainted(device) and not uses:
                continue
            requested = {use.device_class for use in uses}
            rows = {
                names[0]
                for of, names in self._counted_classes()
                if of.name in requested or selects(of.conditions, one.driver, device)
            }
            for name in rows:
                shown = found.setdefault(name, Shown())
                if name in self._divided and self._parts.divides(one.driver):
                    divided.setdefault(name, {}).setdefault(place[:2], []).append(device)
                    for use in uses:
                        shown.add_part(use, self._gpus_of(place, use, self._divided[name]))
                else:
                    shown.add(uses)
        for name, pools in divided.items():
            found[name].count += sum(self._gpus_in(pool, devices) for pool, devices in pools.items())
        return found

    def _gpus_of(self, device: DeviceId, use: _Use, counts_by: str) -> float:
        """Return the part of a GPU that an allocation has of a device."""
        demand = Demand(use.device_class, capacity=use.capacity, device=device)
        part = dict(self._parts.part_of(demand, Selected(), counts_by) or ())
        return part.get(f"{GPU_PART_PREFIX}{device.driver}", WHOLE_GPU) / WHOLE_GPU

    def _gpus_in(self, pool: Pool, devices: Collection[SlicedDevice]) -> int:
        """Return the number of GPUs of which these devices of a pool are parts."""
        slices = newest_of(self._slices[uid] for uid in self._of_pool[pool])
        return gpus_of_pool(slices, devices).get(f"{GPU_PART_PREFIX}{pool[0]}", 0) // WHOLE_GPU

    def nodes_with(self, pools: Collection[Pool]) -> set[str]:
        """Return the nodes that have slices of any of these pools."""
        uids = (uid for pool in pools for uid in self._of_pool.get(pool, ()))
        return {name for uid in uids if (name := self._slices[uid].node_name)}

    def drop_node(self, uid: str) -> None:
        """Remove a deleted node."""
        for name in [name for name, node in self._nodes.items() if node.metadata.uid == uid]:
            del self._nodes[name]

    def put_slice(self, published: ResourceSlice) -> None:
        """Add or update a slice."""
        uid, spec = published.metadata.uid, published.spec
        before = self._slices.get(uid)
        if before == spec:
            return
        if before is not None:
            self._leave(uid, before)
            if (before.driver, before.pool.name, before.node_name) != (spec.driver, spec.pool.name, spec.node_name):
                self._pool_changed(before)
        self._slices[uid] = spec
        if spec.node_name:
            self._of_node.setdefault(spec.node_name, {})[uid] = None
        if not spec.node_name and spec.devices:
            self._shared[uid] = spec
        self._of_pool.setdefault((spec.driver, spec.pool.name), {})[uid] = None
        self._pool_changed(spec)

    def _pool_changed(self, spec: ResourceSliceSpec) -> None:
        self._far.clear()
        pool = spec.driver, spec.pool.name
        divided = self._parts.divides(spec.driver)
        changed, kinds = self._parts.put_pool(pool, newest_of(self._slices[uid] for uid in self._of_pool.get(pool, ())))
        if divided is not self._parts.divides(spec.driver):
            self._update(self._of_node)
        else:
            self._update(self.nodes_with([pool]) | {spec.node_name})
        if changed or (kinds and self._parts.divides(spec.driver)):
            self._sizes_changed(None if kinds else pool)
        elif not spec.node_name:
            self._sizes_changed(None)

    def drop_slice(self, uid: str) -> None:
        """Remove a deleted slice."""
        if (spec := self._slices.pop(uid, None)) is not None:
            self._leave(uid, spec)
            self._pool_changed(spec)

    def _leave(self, uid: str, spec: ResourceSliceSpec) -> None:
        """Remove a slice from those of its node and pool."""
        self._shared.pop(uid, None)
        _remove(self._of_node, spec.node_name, uid)
        _remove(self._of_pool, (spec.driver, spec.pool.name), uid)

    def put_class(self, device_class: DeviceClass) -> None:
        """Add or update a DeviceClass."""
        name, conditions = device_class.metadata.name, selected_by(device_class)
        found = _Class(name, conditions, device_class.spec.extended_resource_name)
        if self._classes.get(device_class.metadata.uid) == found:
            return
        if conditions.approximate:
            all_or_none = f"all devices of {conditions.driver} are" if conditions.driver else "no devices are"
            self._report(
                Subject("DeviceClass", name, "", device_class.metadata.uid, "resource.k8s.io/v1"),
                "NotEvaluated",
                f"its selectors have conditions that the quota's plan does not evaluate: it assumes that {all_or_none} "
                "of this class; only kube-scheduler knows which",
            )
        self._classes[device_class.metadata.uid] = found
        self._class_uids[name] = device_class.metadata.uid
        self._far.clear()
        self._sizes_changed(None)
        self._update(self._of_node)

    def drop_class(self, uid: str) -> None:
        """Remove a deleted DeviceClass."""
        if (found := self._classes.pop(uid, None)) is not None:
            if self._class_uids.get(found.name) == uid:
                del self._class_uids[found.name]
            self._far.clear()
            self._update(self._of_node)

    def _update(self, nodes: Collection[str]) -> None:
        for name in list(nodes):
            if name in self._nodes:
                self._put_node(self._nodes[name])

    def amounts(self, node: str) -> dict[str, int]:
        """Return the number of the node's devices by the name of each resource that counts, and its divided GPUs."""
        counted = self._counted_classes()
        found: Counter[str] = Counter()
        divided: dict[Pool, list[SlicedDevice]] = {}
        for one, device in self._devices(node):
            if not is_tainted(device):
                selecting = (names for of, names in counted if selects(of.conditions, one.driver, device))
                resources = {name for names in selecting for name in names}
                if self._divided and self._parts.divides(one.driver) and resources & self._divided.keys():
                    resources -= self._divided.keys()
                    divided.setdefault((one.driver, one.pool.name), []).append(device)
                found.update(resources)
        for pool, devices in divided.items():
            found.update(gpus_of_pool(newest_of(self._slices[uid] for uid in self._of_pool[pool]), devices))
        return dict(found)

    def _devices(self, node: str) -> Iterator[tuple[ResourceSliceSpec, SlicedDevice]]:
        """Yield the node's devices, each with its slice, of the newest generation of each pool."""
        for one in newest_of(self._slices[uid] for uid in self._of_node.get(node, ())):
            for device in one.devices:
                yield one, device

    def _counted_classes(self) -> list[tuple[_Class, tuple[str, ...]]]:
        """Return the classes that count, with the names by which they do."""
        return [(one, names) for one in self._classes.values() if (names := self._names_of(one))]

    def _names_of(self, one: _Class) -> tuple[str, ...]:
        implicit = f"{CLASS_PREFIX}{one.name}"
        return tuple(name for name in (implicit, one.extended) if name in self._counted)


def newest_of(slices: Iterable[ResourceSliceSpec]) -> list[ResourceSliceSpec]:
    """Return the slices of the newest generation of each pool."""
    given = list(slices)
    newest: dict[Pool, int] = {}
    for one in given:
        pool = one.driver, one.pool.name
        newest[pool] = max(newest.get(pool, 0), one.pool.generation)
    return [one for one in given if one.pool.generation == newest[one.driver, one.pool.name]]


def _has_any(spec: ResourceSliceSpec, conditions: Selected) -> bool:
    return any(selects(conditions, spec.driver, device) for device in spec.devices)


def with_amounts(node: Node, amounts: Mapping[str, int]) -> Node:
    """Return the node with these amounts of resources, except of those that a device plugin has announced."""
    given = {name: amount for name, amount in node.status.allocatable.items() if amount != "0" or name not in amounts}
    allocatable = {name: str(amount) for name, amount in amounts.items()} | given
    return msgspec.structs.replace(node, status=msgspec.structs.replace(node.status, allocatable=allocatable))


def _remove(uids_of: dict[K, dict[str, None]], key: K, uid: str) -> None:
    found = uids_of.get(key, {})
    found.pop(uid, None)
    if not found:
        uids_of.pop(key, None)
