"""The use of GPUs for the charts: the page asks the exporters that the QuotaPolicy names, as the controller does.

Which GPU of a node a pod has is the kubelet's choice, and no object says it. A pod's GPUs are therefore shown as those
that the plan counts for it, in the order of the node; GPUs that no pod has, as those that the plan has free.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.gpu_use import GpuUseHistory
from kfp_gpuquota.cluster.kubernetes.unused_gpus.exporters import OFF_S, Exporters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kfp_gpuquota.api.history import UsePoint
    from kfp_gpuquota.api.wire import NodeView
    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import GpuUseRules
    from kfp_gpuquota.cluster.kubernetes.web.objects import Objects
    from kfp_gpuquota.fractions.activity import GpuUse

log = logging.getLogger(__name__)


class GpuMeter:
    """One per process. Nothing is measured while the QuotaPolicy has no `gpuUse`."""

    def __init__(self, objects: Objects, connection: Connection, now: Callable[[], float] = time.time) -> None:
        self._objects, self._now = objects, now
        self._exporters = Exporters(connection, now, lambda namespace: objects.quota(namespace) is not None)
        self._history = GpuUseHistory()

    async def run(self) -> None:
        """Measure again and again."""
        while True:
            rules = self._objects.gpu_use
            try:
                if rules is not None:
                    await self.look(rules)
            except Exception:
                log.exception("the use of GPUs is measured again")
            every_s = OFF_S if rules is None else rules.interval_s
            await asyncio.sleep(every_s - self._now() % every_s)  # one in each interval of the charts

    async def look(self, rules: GpuUseRules) -> None:
        """Measure all nodes once."""
        await self._exporters.look(rules, {view.node.name for view in self._objects.nodes()})
        measured: dict[str, GpuUse] = {}
        for view in self._objects.nodes():
            for device, use in self._uses(view):
                name = _name(view.node.name, device)
                measured[name] = _both(measured[name], use) if name in measured else use
        self._history.add(measured, self._now())

    def of(self, node: str, device: int) -> tuple[UsePoint, ...]:
        """Return the use of a device since this process runs, oldest first."""
        return self._history.of(_name(node, device))

    def _uses(self, view: NodeView) -> Iterator[tuple[int, GpuUse]]:
        """Yield (device, its use); more than once of one that several pods share."""
        devices: dict[str, list[int]] = {}
        for device in sorted(one.index for one in view.node.devices):
            for holder in view.held.get(device, ()) or ("/",):
                devices.setdefault(holder, []).append(device)
        for holder, held in devices.items():
            namespace, _, name = holder.partition("/")
            yield from zip(held, self._exporters.figures(view.node.name, namespace, name), strict=False)


def _name(node: str, device: int) -> str:
    return f"{node}/{device}"


def _both(one: GpuUse, other: GpuUse) -> GpuUse:
    """Return the use of a device of which two pods have a share: an exporter reports the device for each of them."""
    return max(one, other, key=lambda use: use.percent)
