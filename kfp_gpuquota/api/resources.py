"""Other countable resources of a node: extended resources, ephemeral storage, huge pages, host ports.

They are a part of a job and of a node as the scheduler plans them, on clusters whose nodes announce them (Kubernetes).
They are no part of `JobSpec` and `Node`, which users write and read: there a job that named one would wait permanently
on a cluster that counts none.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.job import JobSpec
from kfp_gpuquota.api.node import Node

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Resources = tuple[tuple[str, int], ...]
"""Amounts by resource, sorted by name."""

WHOLE_GPU: Final = 1_000_000
"""One GPU in the unit of `gpu_weights`."""

GPU_PART_PREFIX: Final = "gpuPart/"
"""With a DRA driver's name: its GPUs in millionths, as devices are parts of them; with a counter's name after it, that.

No resource's name begins so, since a domain has no upper-case letter.
"""

PORT_PREFIX: Final = "hostPort/"
WHOLE_PORT: Final = 1 << 20
"""What a node has of each port. A wildcard address takes all of it, any other address one unit, and all of its own."""


class CountedJobSpec(JobSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job of which each worker needs these amounts on its node.

    `gpu_weights` are the millionths of a GPU that one unit of some of the resources counts as. A worker that has such
    resources holds no devices besides: its `gpus` are only those of which the number of its workers follows.
    """

    resources: Resources = ()
    gpu_weights: Resources = ()


class CountedNode(Node, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node with the amounts that its workers may hold together; it has none of a resource that it does not list.

    `gpu_weights` as in CountedJobSpec.
    """

    resources: Resources = ()
    gpu_weights: Resources = ()


def weighed(resources: Mapping[str, int], weights: Resources) -> int:
    """Return the millionths of a GPU that the amounts count as."""
    return sum(weight * resources.get(name, 0) for name, weight in weights)


def part_weights(names: Iterable[str]) -> Resources:
    """Return the weights of those of the names that are GPUs of which devices are parts, and not their counters."""
    found = (name for name in names if name.startswith(GPU_PART_PREFIX) and name.count("/") == 1)
    return tuple((name, 1) for name in sorted(found))


def counted_amounts(spec: JobSpec) -> dict[str, int]:
    """Return what each worker of the job has of resources that count as GPUs."""
    if not isinstance(spec, CountedJobSpec):
        return {}
    requested = dict(spec.resources)
    return {name: requested[name] for name, _ in spec.gpu_weights}


def other_gpus_of(spec: JobSpec) -> float:
    """Return the GPUs that the other resources of each of the job's workers count as."""
    return weighed(dict(spec.resources), spec.gpu_weights) / WHOLE_GPU if isinstance(spec, CountedJobSpec) else 0.0


def capacity_of(resources: Mapping[str, int] | None, name: str) -> float:
    """Return what a node has of a resource: none if it does not list it, but every node has every host port.

    `resources` is None for a node that does not count any, such as one that an autoscaler has yet to add: unlimited.
    """
    if resources is None:
        return inf
    return resources.get(name, WHOLE_PORT if name.startswith(PORT_PREFIX) else 0)


def plain_job(spec: JobSpec) -> JobSpec:
    """Return the job as users see it, without the other resources of its workers."""
    return JobSpec(**{field: getattr(spec, field) for field in JobSpec.__struct_fields__})


def plain_node(node: Node) -> Node:
    """Return the node as users see it, without its other resources."""
    return Node(**{field: getattr(node, field) for field in Node.__struct_fields__})
