"""Records why pods wait as rate-limited events on the pods.

An event for each pod and plan would cost more than the pods. So there is no event for pods that wait only briefly, a
group has one on its first pod, the same event is not repeated, a changed number in a message is reported only after a
while, and the total is limited, the oldest pods first.

Rejected: a condition in the pod's status. Kubeflow's notebook page and `kubectl describe` show events, and a condition
would need a second write for every waiting pod to remove it again.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kfp_gpuquota.api import Reason
    from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
    from kfp_gpuquota.cluster.kubernetes.convert.owners import Owner
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.kuberay.reconciler import RayUnits
    from kfp_gpuquota.cluster.kubernetes.pods.device_claims import DeviceClaims
    from kfp_gpuquota.cluster.kubernetes.pods.plain_pods import PlainPods
    from kfp_gpuquota.cluster.kubernetes.pods.unseen_pods import UnseenPods

LOOK_EVERY_S: Final = 5.0
MIN_WAIT_S: Final = 3.0
MAX_EVENTS: Final = 10
REPORTED_AGAIN_S: Final = 300.0


class Reported(NamedTuple):
    """The last event of a pod, and when it was recorded by the event loop's clock."""

    code: str
    message: str
    at: float


class GroupOwners(Protocol):
    """The owners of groups; implemented by `Gangs`."""

    def refresh(self, owner: Owner, /) -> None:
        """Read the owner of an incomplete group again."""

    def unknown(self) -> Iterator[tuple[PodView, str]]:
        """Yield pods whose owner cannot be read, and why."""


class WaitEvents:
    """Waiting pods and their last events. `owners` is asked for those of incomplete groups and for unknown ones."""

    def __init__(
        self,
        pods: PlainPods,
        ray: RayUnits,
        recorder: Recorder,
        owners: GroupOwners,
        unseen: UnseenPods,
        claims: DeviceClaims,
    ) -> None:
        self._pods, self._ray, self._recorder, self._owners, self._unseen = pods, ray, recorder, owners, unseen
        self._claims = claims
        self._reasons: Mapping[str, Reason] = {}
        self._reported: dict[str, Reported] = {}
        self._timer: asyncio.TimerHandle | None = None

    def note(self, reasons: Mapping[str, Reason]) -> None:
        """Update the reasons why jobs wait, from the newest plan."""
        self._reasons = reasons
        if reasons or any(self._pods.incomplete()) or any(self._unplanned()):
            self.look_soon()

    def look_soon(self) -> None:
        """Report in a moment why pods wait, also where nothing is planned: those of an unknown owner are in no plan."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        since = time.time() - MIN_WAIT_S
        waiting = sorted(self._waiting(), key=lambda found: (found[0].created, found[0].uid))
        self._reported = {pod.uid: self._reported[pod.uid] for pod, _, _ in waiting if pod.uid in self._reported}
        old = (found for found in waiting if found[0].created <= since)
        due = (found for found in old if self._is_due(found[0].uid, found[1], found[2], now))
        for (pod, code, message), _ in zip(due, range(MAX_EVENTS), strict=False):
            self._reported[pod.uid] = Reported(code, message, now)
            self._recorder.record(pod.subject, "Waiting", message)
        if waiting:
            self.note(self._reasons)

    def _waiting(self) -> Iterator[tuple[PodView, str, str]]:
        for uid, reason in self._reasons.items():
            if pods := self._pods.waiting_of(uid) or self._ray.pods.waiting_of(uid):
                yield pods[0], reason.code.value, reason.message
        for views in self._pods.incomplete():
            if views[0].owner is not None:
                self._owners.refresh(views[0].owner)
            first, size = views[0], max(view.group_size for view in views)
            yield (
                first,
                "gathering",
                f"{len(views)} of the {size} pods of group {first.group} exist; they start together",
            )

        yield from self._unplanned()
        yield from ((pod, "unseen", why) for pod, why in self._unseen.waiting())

    def _unplanned(self) -> Iterator[tuple[PodView, str, str]]:
        """Yield pods that are in no plan, since what they need is unknown."""
        yield from ((pod, "unknown-owner", why) for pod, why in self._owners.unknown())
        yield from ((pod, "unknown-claim", why) for pod, why in self._claims.unknown())

    def _is_due(self, uid: str, code: str, message: str, now: float) -> bool:
        last = self._reported.get(uid)
        if last is None or last.code != code:
            return True
        return last.message != message and now - last.at >= REPORTED_AGAIN_S
