"""Detects pods that hold GPUs but do not start: kube-scheduler cannot bind them, or the kubelet cannot start them.

The node of an admitted pod cannot be changed. So after a while a worker is recreated by this controller, and any other
pod is evicted, so that its owner recreates it. A pod that would not be recreated is left, with an event.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.convert.pods import PodView, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STUCK_S: Final = 15.0  # longer than a node needs to free capacity, and than an autoscaler's first steps


class StuckPods:
    """Calls `found(pod)` for each pod that is `stuck`, every `stuck_s` seconds. `pods` are all tracked pods by uid."""

    def __init__(
        self,
        pods: Mapping[str, PodView],
        found: Callable[[PodView], None],
        stuck: Callable[[PodView], bool],
        stuck_s: float = STUCK_S,
    ) -> None:
        self._pods, self._found, self._stuck, self._stuck_s = pods, found, stuck, stuck_s
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def note(self, pod: PodView) -> None:
        """Process an update of a pod."""
        if self._stuck(pod):
            if pod.uid not in self._timers:
                self._wait(pod.uid)
        elif self._timers and (timer := self._timers.pop(pod.uid, None)):
            timer.cancel()

    def close(self) -> None:
        """Cancel all timers."""
        for timer in self._timers.values():
            timer.cancel()

    def _wait(self, uid: str) -> None:
        self._timers[uid] = asyncio.get_running_loop().call_later(self._stuck_s, self._look, uid)

    def _look(self, uid: str) -> None:
        del self._timers[uid]
        pod = self._pods.get(uid)
        if pod is not None and self._stuck(pod):
            self._wait(uid)
            self._found(pod)


def lacks_its_place(pod: PodView) -> bool:
    """Return whether the pod was admitted to a node, and kube-scheduler reports that it does not fit there."""
    waits = pod.stage is Stage.ASSIGNED and not pod.bound and pod.start_failure.startswith("Unschedulable")
    return waits and not pod.stand_in


def awaits_a_node(pod: PodView) -> bool:
    """Return whether the pod was admitted to an autoscaled pool, and is not bound to a node yet."""
    return pod.stage is Stage.ASSIGNED and not pod.bound and bool(pod.stand_in)


def does_not_come_up(pod: PodView) -> bool:
    """Return whether the kubelet reports a failure, or has not created the sandbox yet; image pulls may take long."""
    starts = pod.stage is Stage.ASSIGNED and pod.bound and not pod.running
    return starts and not pod.job_uid and (bool(pod.start_failure) or not pod.prepared)
