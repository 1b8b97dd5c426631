"""Ray's nodes as the nodes of a plan, and when a node that left is certain to run nothing any more.

A device of such a node is a slot, not a physical GPU: Ray itself assigns GPUs to the actor that holds them, and the
worker gets those in CUDA_VISIBLE_DEVICES. Rejected: to choose the GPUs here. Other Ray work on the node gets its GPUs
from Ray, which cannot be asked for certain ones, so that two programs would use one GPU while another one is idle.

Invariant of the fence: a worker runs at most `silence_s` after the last moment at which Ray's head counted its node
as alive, because its shim ends it then (`shim.lease_left_s`). So `silence_s` and a margin after the node was first
seen missing, nothing of it runs any more, and its workers may be replaced.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Device, Node
from kfp_gpuquota.api.affinity import GPU_PRODUCT
from kfp_gpuquota.cluster.ray.messages import NODE_ID

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kfp_gpuquota.cluster.ray.messages import RayNode

MARGIN_S: Final = 2.0
SHOWN_ID: Final = 8
ADDRESS: Final = "gpuquota.dev/ray-address"
RAY_GPU: Final = "ray-gpu"


def node_name(seen: RayNode) -> str:
    """Return Ray's name of the node, or its host's, and the begin of its id: no other node ever has that name."""
    given = seen.hostname if seen.name in {"", seen.address} else seen.name
    name = re.sub(r"[^a-z0-9.-]+", "-", given.lower()).strip("-.") or "node"
    return f"{name[:50]}-{seen.id[:SHOWN_ID]}"


def as_node(seen: RayNode, name: str, *, ready: bool = True) -> Node:
    """Return the plan's node of this name."""
    model = seen.gpu_type or RAY_GPU
    product = {GPU_PRODUCT: seen.gpu_type} if seen.gpu_type else {}
    return Node(
        name=name,
        devices=tuple(Device(index=index, model=model) for index in range(seen.gpus)),
        ready=ready and not seen.draining,
        labels={**seen.labels, **product, NODE_ID: seen.id, ADDRESS: seen.address},
        cpu=seen.cpus,
        memory_mib=seen.memory_mib,
    )


def used_elsewhere(seen: RayNode) -> int:
    """Return how many GPUs of the node other Ray work uses, a part of one counted as one."""
    return math.ceil(max(0.0, seen.gpus - seen.free - seen.held) - 1e-6)


def taken_slots(seen: RayNode, used: int, held: Collection[int]) -> tuple[int, ...]:
    """Return as many slots as other Ray work uses GPUs, of those that no worker of ours holds."""
    free = [index for index in reversed(range(seen.gpus)) if index not in held]
    return tuple(sorted(free[:used]))


@dataclass
class Fence:
    """Which nodes have left, since when (monotonic seconds), and which must not be used before their workers ended.

    The second are new nodes at the address of one that left: a raylet that was started again on the same machine
    offers GPUs on which workers of the one before may still run.
    """

    silence_s: float
    tracked: set[str] = field(default_factory=set)
    missing_since: dict[str, float] = field(default_factory=dict)
    held_back: set[str] = field(default_factory=set)

    def observe(self, seen: Sequence[RayNode], with_workers: Mapping[str, str], now: float) -> None:
        """Record the live nodes, and the nodes on which workers are recorded, with their addresses."""
        alive = {node.id for node in seen}
        missing = {node_id: address for node_id, address in with_workers.items() if node_id not in alive}
        self.missing_since = {node_id: self.missing_since.get(node_id, now) for node_id in missing}
        addresses = set(missing.values())
        suspects = {*self.held_back, *(alive - self.tracked)}
        self.held_back = {node.id for node in seen if node.id in suspects and node.address in addresses}
        self.tracked |= alive

    def passed(self, now: float) -> set[str]:
        """Return the nodes on which nothing runs any more."""
        return {node_id for node_id, since in self.missing_since.items() if now >= since + self.silence_s + MARGIN_S}


@dataclass
class Steady:
    """A count that rises only when it was higher for a while: an actor that ends still holds its GPUs for a moment."""

    rises_after_s: float
    value: int = 0
    higher_since: float | None = None

    def update(self, count: int, now: float) -> int:
        """Return the count to use from now on."""
        if count <= self.value:
            self.value, self.higher_since = count, None
        elif self.higher_since is None:
            self.higher_since = now
        elif now - self.higher_since >= self.rises_after_s:
            self.value, self.higher_since = count, None
        return self.value
