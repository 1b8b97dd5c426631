"""Node pools that an autoscaler grows: their pods are opened without a node, so that it sees them pending. Pure.

Cluster Autoscaler and Karpenter add nodes for pods that kube-scheduler has looked at and found no node for; a gated pod
they do not see, nor one that is pinned to a node. So of a pool that the QuotaPolicy declares `autoscaled`, the plan
uses no real node but stand-ins of one shape, as many as

    min(maxGpus, max(GPUs of the pool's real nodes, GPUs that teams ask for within their guarantees there))

have: demand within a guarantee makes the pool grow, borrowing uses what is there already. What is planned onto a
stand-in is opened with a requirement of the pool's label instead of a node's name; which of the pool's nodes it gets is
kube-scheduler's to say. It holds the stand-in's devices, noted on it, until it is gone: so a team's quota is counted
from the moment when its pod may start, a controller started anew finds the same, and no number is given twice.

Rejected: moving a pod's seat to its real node once it is bound (the plan would then pin others to nodes that pending
pods are about to fill), a ProvisioningRequest (Cluster Autoscaler only).
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

    from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import Seats


class AutoscaledPool(msgspec.Struct, frozen=True, kw_only=True):
    """One pool. `labels` are those of its nodes that pods may select by. CPU and memory are not counted there."""

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
        """Return how many nodes the pool has at most."""
        return self.max_gpus // self.gpus_per_node

    def stand_ins(self, real_gpus: int, guaranteed_demand: float) -> int:
        """Return how many stand-ins there are to be."""
        return min(self.max_nodes, ceil(max(real_gpus, guaranteed_demand) / self.gpus_per_node))

    def stand_in(self, number: int) -> ApiNode:
        """Return the node that stands for one that may come."""
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
    """Return how many stand-ins of the pool there must be for pods to keep what they hold on these nodes."""
    return max((number_of(node) + 1 for node in nodes if pool_of(node) == pool), default=0)


class StandIns:
    """The stand-ins of all autoscaled pools, kept as many as are needed. One that is held is never taken away.

    `nodes` are those that the scheduler has been given, by name.
    """

    def __init__(
        self,
        pools: Iterable[AutoscaledPool],
        tell: Callable[[scheduler.Event], None],
        seats: Seats,
        nodes: dict[str, ApiNode],
    ) -> None:
        self.pools = {pool.name: pool for pool in pools}
        self._tell, self._seats, self._nodes = tell, seats, nodes
        self._counts: dict[str, int] = dict.fromkeys(self.pools, 0)

    def adjust(self, pool: str, count: int) -> None:
        """Have so many of a pool, or as many more as are still held; never more than the pool may have nodes, since a
        pod's annotation may claim any.
        """
        count, now = min(count, self.pools[pool].max_nodes), self._counts[pool]
        for number in range(now, count):
            node = self.pools[pool].stand_in(number)
            self._seats.resize(node.name, len(node.devices))
            self._nodes[node.name] = node
            self._tell(scheduler.NodeChanged(node))
        while now > count and not self._seats.in_use(stand_in_name(pool, now - 1)):
            now -= 1
            name = stand_in_name(pool, now)
            self._seats.resize(name, 0)
            self._nodes.pop(name, None)
            self._tell(scheduler.NodeRemoved(name))
        self._counts[pool] = max(now, count)
