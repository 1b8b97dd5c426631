"""Node pools that an autoscaler grows: their pods are admitted without a node, so that they become pending. Pure.

Cluster Autoscaler and Karpenter add nodes for pods that kube-scheduler found unschedulable; they ignore gated pods and
pods that are pinned to a node. So for a pool that the QuotaPolicy declares `autoscaled`, the plan uses stand-in nodes
of one shape instead of the real ones. Their number is

    min(maxGpus, max(GPUs of the pool's real nodes, GPUs that teams request within their guarantees there))

divided by GPUs per node: demand within a guarantee grows the pool; over-quota demand uses only existing nodes. A pod
that is planned onto a stand-in is admitted with a node selector for the pool instead of a node name; kube-scheduler
chooses the node. An annotation records the stand-in's devices, which the pod holds until it is deleted: so quota is
counted from its admission, a restarted controller restores the same state, and no device is assigned twice.

Rejected: moving a pod's device assignment to its real node after binding (the plan would pin other pods to nodes that
pending pods are about to fill), and ProvisioningRequests (Cluster Autoscaler only).
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Node as ApiNode
from kfp_gpuquota.api.validation import MAX_COUNT, check_count, check_name
from kfp_gpuquota.cluster.kubernetes.convert.nodes import device
from kfp_gpuquota.cluster.kubernetes.convert.stand_in_names import pool_of, stand_in_name
from kfp_gpuquota.cluster.kubernetes.objects import labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator


class AutoscaledPool(msgspec.Struct, frozen=True, kw_only=True):
    """An autoscaled pool. `labels` are node labels that pods may select. CPU and memory are not counted there."""

    name: str
    max_gpus: int
    gpus_per_node: int = 1
    labels: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_name("pools", self.name)
        check_count(f"pools.{self.name}.autoscaled.maxGpus", self.max_gpus, 1, "GPUs", MAX_COUNT)
        check_count(f"pools.{self.name}.autoscaled.gpusPerNode", self.gpus_per_node, 1, "GPUs", MAX_COUNT)

    @property
    def max_nodes(self) -> int:
        """Return the maximum number of the pool's nodes."""
        return self.max_gpus // self.gpus_per_node

    def stand_ins(self, real_gpus: int, guaranteed_demand: float) -> int:
        """Return the number of stand-ins that the pool should have."""
        return min(self.max_nodes, ceil(max(real_gpus, guaranteed_demand) / self.gpus_per_node))

    def stand_in(self, number: int) -> ApiNode:
        """Return the stand-in node with this number."""
        name = stand_in_name(self.name, number)
        return ApiNode(
            name=name,
            devices=tuple(device(index, 0) for index in range(self.gpus_per_node)),
            labels={**dict(self.labels), labels.POOL: self.name, "kubernetes.io/hostname": name},
            pool=self.name,
        )


def number_of(node: str) -> int:
    """Return the number of a stand-in."""
    return int(node.rpartition(".")[2])


def fewest(nodes: Iterable[str], pool: str) -> int:
    """Return the minimum number of stand-ins of the pool that includes all these nodes."""
    return max((number_of(node) + 1 for node in nodes if pool_of(node) == pool), default=0)


class StandIns:
    """Adds and removes the stand-ins of all autoscaled pools. A stand-in with assigned devices is never removed.

    `nodes` are the nodes in the scheduler's state, by name.
    """

    def __init__(
        self,
        pools: Iterable[AutoscaledPool],
        emit: Callable[[scheduler.Event], None],
        allocator: DeviceAllocator,
        nodes: dict[str, ApiNode],
    ) -> None:
        self.pools = {pool.name: pool for pool in pools}
        self._emit, self._allocator, self._nodes = emit, allocator, nodes
        self._counts: dict[str, int] = dict.fromkeys(self.pools, 0)

    def adjust(self, pool: str, count: int) -> None:
        """Set the number of a pool's stand-ins to `count`, or higher while more are in use.

        It never exceeds the pool's maximum, since a pod's annotation may name any stand-in.
        """
        count, now = min(count, self.pools[pool].max_nodes), self._counts[pool]
        for number in range(now, count):
            node = self.pools[pool].stand_in(number)
            self._allocator.resize(node.name, len(node.devices))
            self._nodes[node.name] = node
            self._emit(scheduler.NodeChanged(node))
        while now > count and not self._allocator.in_use(stand_in_name(pool, now - 1)):
            now -= 1
            name = stand_in_name(pool, now)
            self._allocator.resize(name, 0)
            self._nodes.pop(name, None)
            self._emit(scheduler.NodeRemoved(name))
        self._counts[pool] = max(now, count)
