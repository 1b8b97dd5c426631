"""Pods that hold GPUs and do not get on: their place was taken by somebody else, or they do not come up.

Kube-scheduler then finds no room on the node that they were admitted to, or their kubelet cannot start them. Where a
pod was sent cannot be changed. So after a while it is made anew: a worker by us, any other pod by its owner, once the
eviction API has taken it away; a pod that nobody would make anew is left, and told of.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.convert.pods import PodView, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STUCK_S: Final = 15.0  # a place that is about to be free again, and an autoscaler's first steps, take less


class StuckPods:
    """`pods` are those known, by uid; `found(pod)` is told of each for which `stuck` holds, each time `stuck_s` have
    gone by.
    """

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
        """A pod is as given."""
        if self._stuck(pod):
            if pod.uid not in self._timers:
                self._wait(pod.uid)
        elif self._timers and (timer := self._timers.pop(pod.uid, None)):
            timer.cancel()

    def close(self) -> None:
        """Tell of none any more."""
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
    """It was sent to a node, and kube-scheduler says that it does not fit there."""
    waits = pod.stage is Stage.HELD and not pod.bound and pod.trouble.startswith("Unschedulable")
    return waits and not pod.opened


def awaits_a_node(pod: PodView) -> bool:
    """It was opened in an autoscaled pool, and no node there has taken it yet."""
    return pod.stage is Stage.HELD and not pod.bound and bool(pod.opened)


def does_not_come_up(pod: PodView) -> bool:
    """Its kubelet complains, or has not made its volumes and its network yet. To pull an image may take its time."""
    starts = pod.stage is Stage.HELD and pod.bound and not pod.running
    return starts and not pod.job_uid and (bool(pod.trouble) or not pod.prepared)
