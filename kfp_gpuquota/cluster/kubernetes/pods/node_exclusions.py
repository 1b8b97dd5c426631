"""Excludes a node from an owner's pods for a while after one was not bound there, or was rejected by its kubelet.

kube-scheduler and kubelets have constraints that are not planned (pod affinity, NUMA nodes). Without the exclusion the
next pod of the owner, or the ElasticJob's next worker, would be assigned to the same node again and again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

EXCLUDED_S: Final = 600.0


class NodeExclusions:
    """Excluded nodes by owner. `pods` are all tracked pods by uid; `put(pod)` updates pods when their nodes change.

    `changed(controller_uid, nodes)` reports the nodes excluded from now on: an ElasticJob has no waiting pods.
    """

    def __init__(
        self,
        pods: Mapping[str, PodView],
        put: Callable[[PodView], None],
        changed: Callable[[str, tuple[str, ...]], None],
    ) -> None:
        self._pods, self._put, self._changed = pods, put, changed
        self._until: dict[str, dict[str, float]] = {}  # owner -> node -> the event loop's time

    def note(self, pod: PodView) -> None:
        """Exclude the pod's node for its owner's next pods."""
        loop = asyncio.get_running_loop()
        self._until.setdefault(pod.controller_uid, {})[pod.node] = loop.time() + EXCLUDED_S
        loop.call_later(EXCLUDED_S, self._look, pod.controller_uid)
        self._changed(pod.controller_uid, self._nodes(pod.controller_uid))

    def apply(self, pod: PodView) -> PodView:
        """Return a waiting pod with its owner's excluded nodes."""
        waits = pod.stage is Stage.WAITING and pod.controller_uid in self._until
        return msgspec.structs.replace(pod, excluded_nodes=self._nodes(pod.controller_uid)) if waits else pod

    def _nodes(self, controller_uid: str) -> tuple[str, ...]:
        return tuple(sorted(self._until.get(controller_uid, ())))

    def _look(self, controller_uid: str) -> None:
        now = asyncio.get_running_loop().time()
        left = {node: until for node, until in self._until.pop(controller_uid, {}).items() if until > now}
        if left:
            self._until[controller_uid] = left
        self._changed(controller_uid, self._nodes(controller_uid))
        for pod in [
            pod for pod in self._pods.values() if pod.controller_uid == controller_uid and pod.stage is Stage.WAITING
        ]:
            self._put(self.apply(msgspec.structs.replace(pod, excluded_nodes=())))
