"""Holds back a team's waiting pods beyond a bound, the youngest ones: they are no jobs of the scheduler yet.

Each waiting job costs time and memory in every part of the controller, so the number that one team may have is bounded
(QuotaPolicy, maxWaitingPods). The next pod is seen when one of the seen ones starts, ends or is deleted.

A pod of a group of which others are seen is seen whatever the bound is: a part of a group would wait for the rest.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules

REPORTED: Final = 10  # pods of each team that get an event


class UnseenPods:
    """Waiting pods by team. `put(pod)` receives a pod that is seen from now on."""

    def __init__(self, rules: CurrentRules, put: Callable[[PodView], None]) -> None:
        self._rules, self._put = rules, put
        self._seen: dict[str, dict[str, str]] = {}  # team -> uid of a waiting pod -> its group
        self._held: dict[str, dict[str, PodView]] = {}
        self._order: dict[str, list[tuple[float, str]]] = {}  # of those held back, by age; some are gone

    def holds_back(self, pod: PodView) -> bool:
        """Return whether the pod is not to be seen yet; it is kept here then."""
        team, uid = pod.namespace, pod.uid
        seen = self._seen.setdefault(team, {})
        if pod.stage is not Stage.WAITING:
            self.drop(pod)
            return False
        if uid in seen or len(seen) < self._most or (pod.group and pod.group in seen.values()):
            self._held.get(team, {}).pop(uid, None)
            seen[uid] = pod.group
            return False
        held = self._held.setdefault(team, {})
        if uid not in held:
            heappush(self._order.setdefault(team, []), (pod.created, uid))
        held[uid] = pod
        return True

    def drop(self, pod: PodView) -> None:
        """Forget a pod that waits no more, and see the next one."""
        self._held.get(pod.namespace, {}).pop(pod.uid, None)
        if self._seen.get(pod.namespace, {}).pop(pod.uid, None) is not None:
            self._see_more(pod.namespace)

    def rules_changed(self) -> None:
        """See more pods after the bound was raised."""
        for team in list(self._held):
            self._see_more(team)

    def waiting(self) -> Iterator[tuple[PodView, str]]:
        """Yield the oldest pods that are held back of each team, and why."""
        why = (
            f"{self._most} pods of its team wait before it, as many as are considered at once "
            "(QuotaPolicy, maxWaitingPods)"
        )
        for held in self._held.values():
            yield from ((pod, why) for pod in islice(held.values(), REPORTED))

    @property
    def _most(self) -> int:
        return self._rules.rules.max_waiting_pods

    def _see_more(self, team: str) -> None:
        held, order, seen = self._held.get(team, {}), self._order.get(team, []), self._seen.get(team, {})
        while order and held and len(seen) < self._most:
            _, uid = heappop(order)
            if (pod := held.pop(uid, None)) is not None:
                siblings = [one for one in held.values() if pod.group and one.group == pod.group]
                for one in (pod, *siblings):
                    held.pop(one.uid, None)
                    self._put(one)
        if not held:
            self._held.pop(team, None)
            self._order.pop(team, None)
