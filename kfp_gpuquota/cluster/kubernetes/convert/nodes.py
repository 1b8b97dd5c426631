"""Converts Kubernetes nodes to the scheduler's nodes. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Device
from kfp_gpuquota.api.node import SharingRules
from kfp_gpuquota.api.resources import CountedNode, part_weights
from kfp_gpuquota.api.validation import MAX_COUNT, MAX_MIB
from kfp_gpuquota.cluster.kubernetes.convert.node_constraints import taints_of
from kfp_gpuquota.cluster.kubernetes.convert.non_gpu_pods import NodeUsage
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import (
    MILLI,
    allocatable_of,
    bounded_number,
    device_count,
    mebibytes_left,
    millicores,
    whole_bytes,
)
from kfp_gpuquota.cluster.kubernetes.objects import labels

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.api.resources import Resources
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Node

PODS_PER_DEVICE: Final = 32  # more pods than share one GPU: beyond it, the node's pod limit does not constrain the plan
_UNSET: Final = SharingRules(memory_reserve=0.0)
_BLOCKING_EFFECTS: Final = frozenset({"NoSchedule", "NoExecute"})


def same_node(before: Node, after: Node) -> bool:
    """Return whether the two versions of a node have the same scheduling properties."""
    return (
        before.metadata.uid == after.metadata.uid
        and before.metadata.labels == after.metadata.labels
        and before.spec == after.spec
        and before.status.allocatable == after.status.allocatable
        and is_ready(before) == is_ready(after)
    )


def node_of(
    node: Node,
    unplanned: Iterable[int] = (),
    taken: NodeUsage | None = None,
    sharing: SharingRules = _UNSET,
    weights: Resources = (),
) -> CountedNode:
    """Return the node without the devices that are `unplanned`, and without the `taken` resources.

    `weights` has the other resources that count as GPUs. A node without GPUs has no CPU and memory here: a team's quota
    of these counts only what GPU jobs can use.
    """
    held, taken, allocatable = set(unplanned), taken or NodeUsage(), node.status.allocatable
    count, memory = gpu_count(node), bounded_number(node.metadata.labels.get(labels.GPU_MEMORY, "0"), MAX_MIB) or 0
    counted = has_gpus(node, weights)
    pod_capacity = min(MAX_COUNT, millicores(allocatable.get("pods", "0")) // MILLI) - taken.pods
    return CountedNode(
        name=node.metadata.name,
        devices=tuple(device(i, memory) for i in range(count) if i not in held),
        ready=is_ready(node),
        labels=node.metadata.labels,
        taints=taints_of(node.spec.taints),
        cpu=max(0, millicores(allocatable.get("cpu", "0")) - taken.cpu) / MILLI if counted else 0.0,
        memory_mib=mebibytes_left(whole_bytes(allocatable.get("memory", "0")) - taken.memory) if counted else 0,
        max_workers=max(0, pod_capacity) if pod_capacity < count * PODS_PER_DEVICE or (counted and not count) else None,
        pool=node.metadata.labels.get(labels.POOL, ""),
        resources=allocatable_of(allocatable, taken.others) if counted else (),
        gpu_weights=(*((name, one) for name, one in weights if name in allocatable), *part_weights(allocatable)),
        max_sharers=sharing.max_sharers,
        memory_reserve=sharing.memory_reserve,
        smallest_share=sharing.smallest_share,
    )


@lru_cache(4096)
def device(index: int, memory_mib: int) -> Device:
    """Return the device with this index, cached, since thousands of nodes have equal devices."""
    return Device(index=index, memory_mib=memory_mib)


def gpu_count(node: Node) -> int:
    """Return the number of healthy GPUs that the node's device plugin has announced."""
    return device_count(node.status.allocatable.get(labels.GPU_RESOURCE, "0"))


def has_gpus(node: Node, weights: Resources = ()) -> bool:
    """Return whether the node has GPUs, or resources that count as GPUs."""
    allocatable = node.status.allocatable
    counted = (*weights, *part_weights(allocatable))
    return gpu_count(node) > 0 or any(allocatable.get(name, "0") != "0" for name, _ in counted)


def is_ready(node: Node) -> bool:
    """Return whether new pods may be scheduled on the node."""
    ready = any(c.type == "Ready" and c.status == "True" for c in node.status.conditions)
    tainted = any(t.effect in _BLOCKING_EFFECTS and t.key.startswith("node.kubernetes.io/") for t in node.spec.taints)
    return ready and not tainted and not node.spec.unschedulable
