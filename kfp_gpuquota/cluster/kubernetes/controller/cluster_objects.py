"""The cluster's objects as last seen, and the scheduler's state that was built of them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kfp_gpuquota import scheduler
from kfp_gpuquota.cluster.kubernetes.convert.device_allocator import DeviceAllocator
from kfp_gpuquota.errors import GpuQuotaError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.api import Node as ApiNode
    from kfp_gpuquota.api import Project
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Node
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import GpuQuota

_CHANGE_USE: Final = (
    scheduler.WorkerStarted,
    scheduler.WorkerLeaving,
    scheduler.WorkerGone,
    scheduler.QuotaChanged,
    scheduler.QuotaRemoved,
)

log = logging.getLogger(__name__)


class ClusterObjects:
    """Data only; `Snapshot` updates it. Nodes, quotas and projects are by name, pods by uid.

    `emitted_nodes` are the nodes in the scheduler's state. `wake()` requests a plan, `now()` is in seconds since
    1970. `feed` receives each event after it was applied, for the planner's copy of the state.
    """

    def __init__(self, wake: Callable[[], None], now: Callable[[], float]) -> None:
        self.wake, self.now = wake, now
        self.state = scheduler.State()
        self.allocator = DeviceAllocator()
        self.nodes: dict[str, Node] = {}
        self.emitted_nodes: dict[str, ApiNode] = {}
        self.quotas: dict[str, GpuQuota] = {}
        self.projects: dict[str, Project] = {}
        self.pods: dict[str, PodView] = {}
        self.feed: Callable[[scheduler.Event], None] = lambda _event: None

    def emit(self, event: scheduler.Event) -> None:
        """Apply an event to the scheduler's state; a refused event is a defect, but must not stop the controller."""
        try:
            self.apply(event)
        except GpuQuotaError as error:
            log.error("the scheduler refused %r: %s", event, error)
        self.wake()

    def apply(self, event: scheduler.Event) -> None:
        """Apply an event to the scheduler's state, and feed it to the planner. Raises what the state raises.

        Where past borrowing counts, the time comes first: starts and ends of pods, and changes of quotas, have none.
        """
        if self.state.ledger.half_life_s is not None and isinstance(event, _CHANGE_USE):
            passed = scheduler.TimePassed(self.now())
            self.state.apply(passed)
            self.feed(passed)
        self.state.apply(event)
        self.feed(event)
