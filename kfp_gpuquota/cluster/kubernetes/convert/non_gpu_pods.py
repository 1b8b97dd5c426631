"""Tracks the CPU, memory, pod slots and other resources that pods outside the quota use on each node. No I/O.

These are DaemonSet pods, services, and pods with GPUs outside the quota; also what a pod of the quota has more, or
less, since it was resized in place. kube-scheduler counts them all, so only the remaining resources may be planned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import ResourceRequests


@dataclass(slots=True)
class NodeUsage:
    """Usage of one node: CPU in thousandths of a core, memory in bytes, number of pods, and other resources.

    `holders` is how many entries it is the sum of.
    """

    cpu: int = 0
    memory: int = 0
    pods: int = 0
    others: dict[str, int] = field(default_factory=dict)
    holders: int = field(default=0, compare=False)


class NonGpuPods:
    """Usage of all nodes by pods outside the quota."""

    def __init__(self) -> None:
        self._by_node: dict[str, NodeUsage] = {}
        self._pods: dict[str, tuple[str, ResourceRequests, int]] = {}

    def on(self, node: str) -> NodeUsage:
        """Return the node's usage."""
        return self._by_node.get(node, _NOTHING)

    def put(self, uid: str, node: str, needs: ResourceRequests, slots: int = 1) -> str | None:
        """Add or update a pod; return the node whose usage changed, if any. `slots`: how many pods it counts as."""
        if self._pods.get(uid) == (node, needs, slots):
            return None
        self.drop(uid)
        self._pods[uid] = (node, needs, slots)
        self._count(node, needs, 1, slots)
        return node

    def drop(self, uid: str) -> str | None:
        """Remove a pod; return the node whose usage changed, if any."""
        if uid not in self._pods:
            return None
        node, needs, slots = self._pods.pop(uid)
        self._count(node, needs, -1, slots)
        return node

    def _count(self, node: str, needs: ResourceRequests, sign: int, slots: int) -> None:
        taken = self._by_node.setdefault(node, NodeUsage())
        taken.cpu += sign * needs.cpu
        taken.memory += sign * needs.memory
        taken.pods += sign * slots
        taken.holders += sign
        for name, amount in needs.others:
            taken.others[name] = taken.others.get(name, 0) + sign * amount
        if not taken.holders:
            del self._by_node[node]


_NOTHING = NodeUsage()
