"""Adds the devices that DRA drivers publish (ResourceSlices) to what nodes have of extended resources. No I/O.

The devices of a DeviceClass are those of the class's implicit extended resource, and of the one that it names. Like
kube-scheduler, a node that has the extended resource by a device plugin keeps that amount. Only classes that count are
added: those of QuotaPolicy's table, and nvidia.com/gpu.

Only slices of one node are read, of the newest generation of their pool. Devices that several nodes can reach are left
to kube-scheduler. If two classes that count select the same devices, the plan may send pods of both to them;
kube-scheduler then binds only some, and the others count against the quota until they are bound (unpinned.py).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kfp_gpuquota.cluster.kubernetes.convert.claimed_devices import Selected, selected_by, selects
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Subject
from kfp_gpuquota.cluster.kubernetes.objects.device_types import CLASS_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Node
    from kfp_gpuquota.cluster.kubernetes.objects.device_types import DeviceClass, ResourceSlice, ResourceSliceSpec


class _Class(NamedTuple):
    name: str
    conditions: Selected
    extended: str


class PublishedDevices:
    """Slices and classes. `put_node(node)` receives a node again when its devices have changed.

    `report(class, reason, message)` is called for classes that are only partly understood.
    """

    def __init__(self, put_node: Callable[[Node], None], report: Callable[[Subject, str, str], None]) -> None:
        self._put_node, self._report = put_node, report
        self._counted: frozenset[str] = frozenset()
        self._classes: dict[str, _Class] = {}  # by uid
        self._slices: dict[str, ResourceSliceSpec] = {}  # by uid
        self._of_node: dict[str, dict[str, None]] = {}  # uids of its slices
        self._nodes: dict[str, Node] = {}  # as their kubelets report them

    def set_counted(self, names: Collection[str]) -> None:
        """Set the names of the resources that count as GPUs."""
        counted = frozenset({labels.GPU_RESOURCE, *names})
        if counted != self._counted:
            self._counted = counted
            self._update(self._of_node)

    def apply(self, node: Node) -> Node:
        """Return the node with the published devices."""
        name = node.metadata.name
        self._nodes[name] = node
        amounts = self._amounts(name) if name in self._of_node else {}
        if not amounts:
            return node
        given = {
            name: amount for name, amount in node.status.allocatable.items() if amount != "0" or name not in amounts
        }
        allocatable = {name: str(amount) for name, amount in amounts.items()} | given
        return msgspec.structs.replace(node, status=msgspec.structs.replace(node.status, allocatable=allocatable))

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
        self._slices[uid] = spec
        if spec.node_name:
            self._of_node.setdefault(spec.node_name, {})[uid] = None
        self._update((spec.node_name,))

    def drop_slice(self, uid: str) -> None:
        """Remove a deleted slice."""
        spec = self._slices.pop(uid, None)
        if spec is not None and (slices := self._of_node.get(spec.node_name)) is not None:
            slices.pop(uid, None)
            if not slices:
                del self._of_node[spec.node_name]
            self._update((spec.node_name,))

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
        self._update(self._of_node)

    def drop_class(self, uid: str) -> None:
        """Remove a deleted DeviceClass."""
        if self._classes.pop(uid, None) is not None:
            self._update(self._of_node)

    def _update(self, nodes: Collection[str]) -> None:
        for name in list(nodes):
            if name in self._nodes:
                self._put_node(self._nodes[name])

    def _amounts(self, node: str) -> dict[str, int]:
        """Return the number of the node's devices by the name of each resource that counts."""
        counted = [(one, names) for one in self._classes.values() if (names := self._names_of(one))]
        slices = [self._slices[uid] for uid in self._of_node[node]]
        newest: dict[tuple[str, str], int] = {}
        for one in slices:
            pool = one.driver, one.pool.name
            newest[pool] = max(newest.get(pool, 0), one.pool.generation)
        found: Counter[str] = Counter()
        for one in slices:
            if one.pool.generation == newest[one.driver, one.pool.name]:
                for device in one.devices:
                    found.update(
                        name
                        for device_class, names in counted
                        if selects(device_class.conditions, one.driver, device)
                        for name in names
                    )
        return dict(found)

    def _names_of(self, one: _Class) -> tuple[str, ...]:
        implicit = f"{CLASS_PREFIX}{one.name}"
        return tuple(name for name in (implicit, one.extended) if name in self._counted)
