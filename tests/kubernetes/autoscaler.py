"""A test double of an autoscaler: adds fake nodes for pods that kube-scheduler has found no node for.

It decides as Cluster Autoscaler and Karpenter do: by pods that are pending with the condition PodScheduled=False of
reason Unschedulable, are not gated, and would fit a node of its group (its labels, so many GPUs); one new node for as
many of them as fit it. It knows nothing of gpuquota. What it does not do: scale down, simulate affinity and volumes.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Self

from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.kubernetes.controlled import gpus_of, holds, is_over
from tools.devcluster import fake_nodes

if TYPE_CHECKING:
    from tools.devcluster.api import Api

LOOKS_EVERY_S = 0.2


class AutoscalerDouble:
    """One node group: nodes NAME-0, NAME-1, ... of a pool, with so many GPUs each, at most `most` of them."""

    def __init__(self, api: Api, name: str, pool: str, gpus: int, most: int) -> None:
        self._api, self._name, self._pool, self._gpus, self._most = api, name, pool, gpus, most
        self.nodes: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for node in self.nodes:
            self._api.delete(f"/api/v1/nodes/{node}")

    def _run(self) -> None:
        while not self._stop.wait(LOOKS_EVERY_S):
            pods = self._api.items("/api/v1/pods")
            for _ in range(self._needed(pods)):
                self._add()

    def _needed(self, pods: list[dict[str, Any]]) -> int:
        """How many more nodes the pending pods fill, beside the GPUs that are idle."""
        idle = len(self.nodes) * self._gpus
        idle -= sum(gpus_of(pod) for pod in pods if pod["spec"].get("nodeName") in self.nodes and not is_over(pod))
        lacking = sum(gpus_of(pod) for pod in pods if self._helps(pod)) - idle
        return min(-(-lacking // self._gpus), self._most - len(self.nodes)) if lacking > 0 else 0

    def _helps(self, pod: dict[str, Any]) -> bool:
        if holds(pod) or is_over(pod) or pod["spec"].get("schedulingGates"):
            return False
        terms = str(pod["spec"].get("affinity", ""))
        selected = pod["spec"].get("nodeSelector", {}).get(labels.POOL) == self._pool
        conditions = pod["status"].get("conditions", [])
        unschedulable = any(c["type"] == "PodScheduled" and c.get("reason") == "Unschedulable" for c in conditions)
        return unschedulable and selected and "metadata.name" not in terms

    def _add(self) -> None:
        body = fake_nodes.fake_node(f"{self._name}-{len(self.nodes)}", self._gpus)
        body["metadata"]["labels"][labels.POOL] = self._pool
        self._api.create("/api/v1/nodes", body)
        self.nodes.append(body["metadata"]["name"])
