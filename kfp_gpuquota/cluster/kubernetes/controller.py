"""The controller: watches the cluster, plans on change, carries plans out. One asyncio process.

    reflectors ─► snapshot ─► plan ─► writes
         ▲                              │
         └────────── API server ◄───────┘

A change is planned at once where nothing was planned lately, else with the others that come within a short while: a
single pod does not wait, and thousands do not cause thousands of plans.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota import scheduler
from kfp_gpuquota.cluster.kubernetes import labels, objects
from kfp_gpuquota.cluster.kubernetes.carrying_out import PodActions
from kfp_gpuquota.cluster.kubernetes.snapshot import Snapshot
from kfp_gpuquota.cluster.kubernetes.translate import PodView, pod_view
from kfp_gpuquota.cluster.kubernetes.watch import Reflector
from kfp_gpuquota.cluster.kubernetes.writer import Writer

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.kubernetes.connection import Connection

SOONEST_S: Final = 0.001
BUSY_S: Final = 0.02

log = logging.getLogger(__name__)


class Controller:
    """Everything that runs while this process leads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self.snapshot = Snapshot(self.wake)
        self._writer = Writer(connection)
        self._planning: asyncio.TimerHandle | None = None
        self._again: asyncio.TimerHandle | None = None
        self._planned_at = 0.0
        self._plan_s = 0.0
        ours = f"/apis/{labels.API_VERSION}"
        snapshot = self.snapshot
        self.pods = self._reflector("/api/v1/pods", objects.Pod, self._pod_changed, snapshot.drop_pod)
        self.reflectors: list[Reflector[Any]] = [
            self.pods,
            self._reflector("/api/v1/nodes", objects.Node, snapshot.put_node, snapshot.drop_node),
            self._reflector(f"{ours}/gpuquotas", objects.GpuQuota, snapshot.put_quota, snapshot.drop_quota),
        ]
        self.actions = PodActions(snapshot.plain, self._writer, self.pods.note, self._tell_user)
        self.plans = 0

    async def run(self) -> None:
        """Until cancelled."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._writer.close)
            stack.callback(self._stop_timers)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            for reflector in self.reflectors:
                group.create_task(reflector.run())
            for reflector in self.reflectors:
                await reflector.synced.wait()
            self.snapshot.start()
            log.info("all is listed: %d nodes, %d pods", len(self.snapshot.nodes), len(self.snapshot.pods))
            self.wake()

    def _reflector(self, path: str, kind: Any, changed: Any, gone: Any) -> Reflector[Any]:
        return Reflector(self._connection, path, kind, changed=changed, gone=gone)

    def _pod_changed(self, pod: objects.Pod) -> None:
        self.snapshot.put_pod(pod_view(pod))

    def _tell_user(self, pod: PodView, reason: str, message: str) -> None:
        log.info("%s/%s: %s: %s", pod.namespace, pod.name, reason, message)

    # Planning

    def wake(self) -> None:
        """Something changed: plan soon."""
        if self._planning is None and self.snapshot.started:
            since = self._loop.time() - self._planned_at
            pause = max(SOONEST_S, min(BUSY_S, 2 * self._plan_s) - since) if since < BUSY_S else SOONEST_S
            self._planning = self._loop.call_later(pause, self._plan)

    def _plan(self) -> None:
        started, now = self._loop.time(), time.time()
        plan = scheduler.plan(self.snapshot.state, now)
        self._carry_out(plan)
        self._planning = None  # what carrying it out changed needs no other plan
        self.plans += 1
        self._planned_at = self._loop.time()
        self._plan_s = self._planned_at - started
        self._plan_again(None if plan.again_at is None else plan.again_at - now)

    def _plan_again(self, delay_s: float | None) -> None:
        if self._again:
            self._again.cancel()
        self._again = None if delay_s is None else self._loop.call_later(max(0.0, delay_s), self.wake)

    def _carry_out(self, plan: scheduler.Plan) -> None:
        for evict in plan.evict:
            self.actions.stop(evict.workers, evict.reason)
        for move in plan.move:
            self.actions.stop((move.worker,), move.reason)
        for resize in plan.resize:
            self.actions.stop(resize.remove, resize.reason)
            self.actions.start(resize.job, resize.add, resize.reason)
        for bind in plan.bind:
            self.actions.start(bind.job, bind.placements, bind.reason)

    def _stop_timers(self) -> None:
        for timer in (self._planning, self._again):
            if timer:
                timer.cancel()
