"""What pods that are none of ours take on their nodes beside GPUs: CPU, memory, and a place each. Pure bookkeeping.

Agents of every node, other teams' services, pods with GPUs outside the quota: kube-scheduler counts them all, so what
they leave is what may be planned with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import Needs


@dataclass(slots=True)
class Taken:
    """On one node: thousandths of cores, bytes, pods."""

    cpu: int = 0
    memory: int = 0
    pods: int = 0


class Bystanders:
    """All nodes'."""

    def __init__(self) -> None:
        self._on: dict[str, Taken] = {}
        self._known: dict[str, tuple[str, Needs]] = {}

    def on(self, node: str) -> Taken:
        """What they take there."""
        return self._on.get(node, _NOTHING)

    def put(self, uid: str, node: str, needs: Needs) -> str | None:
        """A pod is there, and takes that; the node on which less is left now."""
        if self._known.get(uid) == (node, needs):
            return None
        self.drop(uid)
        self._known[uid] = (node, needs)
        self._count(node, needs, 1)
        return node

    def drop(self, uid: str) -> str | None:
        """A pod takes nothing any more; the node on which more is left now."""
        if uid not in self._known:
            return None
        node, needs = self._known.pop(uid)
        self._count(node, needs, -1)
        return node

    def _count(self, node: str, needs: Needs, sign: int) -> None:
        taken = self._on.setdefault(node, Taken())
        taken.cpu += sign * needs.cpu
        taken.memory += sign * needs.memory
        taken.pods += sign
        if not taken.pods:
            del self._on[node]


_NOTHING = Taken()
