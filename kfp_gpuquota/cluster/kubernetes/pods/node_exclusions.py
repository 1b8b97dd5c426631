"""Nodes that an owner's pods avoid for a while, since kube-scheduler had no room there for one that was sent.

It has reasons that are not planned with (affinity to other pods, host ports, where a volume can be mounted). Without
this the pod that is made anew, by its owner or as an ElasticJob's next worker, would be sent there again, and again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.kubernetes.convert.pods import PodView, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

AVOIDED_S: Final = 600.0


class Avoidance:
    """`known` are the pods that were put, by uid; `put` gets those that may use a node again.

    `changed(maker, nodes)` is told what is avoided from now on: a maker that is an ElasticJob has no pods that wait.
    """

    def __init__(
        self,
        known: Mapping[str, PodView],
        put: Callable[[PodView], None],
        changed: Callable[[str, tuple[str, ...]], None],
    ) -> None:
        self._known, self._put, self._changed = known, put, changed
        self._until: dict[str, dict[str, float]] = {}  # owner -> node -> the loop's time

    def note(self, pod: PodView) -> None:
        """The pod found no room on the node that it was sent to."""
        loop = asyncio.get_running_loop()
        self._until.setdefault(pod.maker, {})[pod.node] = loop.time() + AVOIDED_S
        loop.call_later(AVOIDED_S, self._look, pod.maker)
        self._changed(pod.maker, self._nodes(pod.maker))

    def apply(self, pod: PodView) -> PodView:
        """The pod, with what its owner's pods avoid."""
        waits = pod.stage is Stage.WAITING and pod.maker in self._until
        return msgspec.structs.replace(pod, avoids=self._nodes(pod.maker)) if waits else pod

    def _nodes(self, maker: str) -> tuple[str, ...]:
        return tuple(sorted(self._until.get(maker, ())))

    def _look(self, maker: str) -> None:
        now = asyncio.get_running_loop().time()
        left = {node: until for node, until in self._until.pop(maker, {}).items() if until > now}
        if left:
            self._until[maker] = left
        self._changed(maker, self._nodes(maker))
        for pod in [pod for pod in self._known.values() if pod.maker == maker and pod.stage is Stage.WAITING]:
            self._put(self.apply(msgspec.structs.replace(pod, avoids=())))
