"""Nodes as the scheduler is told of them: pure."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Device
from kfp_gpuquota.api import Node as ApiNode
from kfp_gpuquota.api.validation import MAX_COUNT, MAX_MIB
from kfp_gpuquota.cluster.kubernetes.convert.node_constraints import taints_of
from kfp_gpuquota.cluster.kubernetes.convert.non_gpu_pods import Taken
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import (
    MILLI,
    bounded_number,
    device_count,
    mebibytes_left,
    millicores,
    whole_bytes,
)
from kfp_gpuquota.cluster.kubernetes.objects import labels

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Node

PLACES_OF_A_DEVICE: Final = 32  # so many pods share no GPU: where more of them have a place, places are not scarce
_EFFECTS_THAT_BAR: Final = frozenset({"NoSchedule", "NoExecute"})


def same_node(before: Node, after: Node) -> bool:
    """Nothing differs that matters here."""
    return (
        before.metadata.uid == after.metadata.uid
        and before.metadata.labels == after.metadata.labels
        and before.spec == after.spec
        and before.status.allocatable == after.status.allocatable
        and is_ready(before) == is_ready(after)
    )


def node_of(node: Node, foreign: Iterable[int] = (), taken: Taken | None = None) -> ApiNode:
    """The node, without the devices that pods outside the quota hold, and what `taken` says beside these.

    Of a node without GPUs nothing counts: a team's share of CPU is one of what can be used together with GPUs.
    """
    held, taken, allocatable = set(foreign), taken or Taken(), node.status.allocatable
    count, memory = gpu_count(node), bounded_number(node.metadata.labels.get(labels.GPU_MEMORY, "0"), MAX_MIB) or 0
    places = min(MAX_COUNT, millicores(allocatable.get("pods", "0")) // MILLI) - taken.pods
    return ApiNode(
        name=node.metadata.name,
        devices=tuple(device(i, memory) for i in range(count) if i not in held),
        ready=is_ready(node),
        labels=node.metadata.labels,
        taints=taints_of(node.spec.taints),
        cpu=max(0, millicores(allocatable.get("cpu", "0")) - taken.cpu) / MILLI if count else 0.0,
        memory_mib=mebibytes_left(whole_bytes(allocatable.get("memory", "0")) - taken.memory) if count else 0,
        max_workers=max(0, places) if places < count * PLACES_OF_A_DEVICE else None,
        pool=node.metadata.labels.get(labels.POOL, ""),
    )


@cache
def device(index: int, memory_mib: int) -> Device:
    """One of a node's devices; the kubelet's plugin decides which one that is. Thousands of nodes share these."""
    return Device(index=index, memory_mib=memory_mib)


def gpu_count(node: Node) -> int:
    """How many GPUs its device plugin has announced, and are healthy."""
    return device_count(node.status.allocatable.get(labels.GPU_RESOURCE, "0"))


def is_ready(node: Node) -> bool:
    """Whether new pods may be sent there."""
    ready = any(c.type == "Ready" and c.status == "True" for c in node.status.conditions)
    barred = any(t.effect in _EFFECTS_THAT_BAR and t.key.startswith("node.kubernetes.io/") for t in node.spec.taints)
    return ready and not barred and not node.spec.unschedulable
