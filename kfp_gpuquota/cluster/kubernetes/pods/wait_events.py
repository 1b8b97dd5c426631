"""Why pods wait, told on them as events: few enough for any cluster.

An event for each pod and plan would cost more than the pods. So nothing is told of a pod that waits for moments only,
of a group its first pod is told, the same is told once, numbers that change within a sentence count as news only after
a while, and all together are rationed, the oldest pods first.

Rejected: a condition in the pod's status. Kubeflow's notebook page and `kubectl describe` show events, and a condition
would be one more write for every pod that waits at all, since it would have to be taken away again.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kfp_gpuquota.api import Reason
    from kfp_gpuquota.cluster.kubernetes.convert.pods import PodView
    from kfp_gpuquota.cluster.kubernetes.pods.plain_pods import PlainPods

LOOK_EVERY_S: Final = 5.0
MOMENTS_S: Final = 3.0
MOST_AT_ONCE: Final = 10
NEWS_AFTER_S: Final = 300.0


class Told(NamedTuple):
    """What a pod was last told, and when by the loop's clock."""

    code: str
    message: str
    at: float


class WaitingPods:
    """`told(pod, reason, message)` writes an event."""

    def __init__(self, pods: PlainPods, told: Callable[[PodView, str, str], None]) -> None:
        self._pods, self._told = pods, told
        self._reasons: Mapping[str, Reason] = {}
        self._known: dict[str, Told] = {}
        self._timer: asyncio.TimerHandle | None = None

    def note(self, reasons: Mapping[str, Reason]) -> None:
        """Why each job waits, as the newest plan says it."""
        self._reasons = reasons
        if self._timer is None and (reasons or self._pods.gathering):
            self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def close(self) -> None:
        """Tell of nothing any more."""
        if self._timer:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        since = time.time() - MOMENTS_S
        waiting = sorted(self._waiting(), key=lambda found: (found[0].created, found[0].uid))
        self._known = {pod.uid: self._known[pod.uid] for pod, _, _ in waiting if pod.uid in self._known}
        old = (found for found in waiting if found[0].created <= since)
        news = (found for found in old if self._is_news(found[0].uid, found[1], found[2], now))
        for (pod, code, message), _ in zip(news, range(MOST_AT_ONCE), strict=False):
            self._known[pod.uid] = Told(code, message, now)
            self._told(pod, "Waiting", message)
        if waiting:
            self.note(self._reasons)

    def _waiting(self) -> Iterator[tuple[PodView, str, str]]:
        for uid, reason in self._reasons.items():
            if pods := self._pods.waiting_of(uid):
                yield pods[0], reason.code.value, reason.message
        for gathered in self._pods.gathering.values():
            views = [member.view for member in gathered.values()]
            if views:
                first = min(views, key=lambda view: (view.created, view.uid))
                have, size = len(views), views[-1].group_size
                yield (
                    first,
                    "gathering",
                    f"{have} of the {size} pods of group {first.group} are there; they start together",
                )

    def _is_news(self, uid: str, code: str, message: str, now: float) -> bool:
        told = self._known.get(uid)
        if told is None or told.code != code:
            return True
        return told.message != message and now - told.at >= NEWS_AFTER_S
