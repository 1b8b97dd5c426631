"""Evicts pods: by the eviction API first, and by deletion within the reclaim bound, whatever the owner has configured.

    0 s                 evicted, with the pod's own grace period, at most maxGracePeriodSeconds
    while refused       (a disruption budget, several of them, an API server that fails) evicted again every RETRY_S;
                        the first refusal is annotated on the pod, so that a restarted controller continues to count
    bound - grace - 5 s deleted with that grace period: disruption budgets do not apply to a deletion
    bound               deleted

A kubelet applies the grace period of the first deletion only (kubernetes/kubernetes#83916). So the grace period of a
pod that may borrow is capped when it is created (admission/pods.py), and that of any user's deletion when it is
requested (manifests/base/reclaim-policies.yaml). While a team is within its guarantee, pods that it loses to a move or
to its own higher priorities are never deleted: disruption budgets then apply without a time limit. Not covered: an
unreachable node, on which the pod's object stays until the node is back or removed, and pods created before the
installation.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError, is_disruption_budget
from kfp_gpuquota.cluster.kubernetes.convert import requests
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import Stage
from kfp_gpuquota.cluster.steady_clock import since_boot_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules

PREEMPTED: Final = "PreemptionByScheduler"  # the reason of the condition DisruptionTarget
RETRY_S: Final = 5.0
SLACK_S: Final = 5.0
"""The part of the bound for the call of the last deletion and the kubelet's delay of one second."""


@dataclass(slots=True)
class _Ending:
    """The eviction of one pod. `bounded`: it holds borrowed GPUs, so the reclaim bound applies.

    `requested_at` is in seconds since the epoch, `began` the same moment in seconds since the machine started: what is
    left of the bound does not depend on the machine's clock.
    """

    pod: PodView
    requested_at: float
    began: float
    bounded: bool
    noted: bool = False
    timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)

    def age_s(self) -> float:
        """Return for how long the pod has been evicted, before a restart of the controller included."""
        return since_boot_s() - self.began


class EvictionContext(Protocol):
    """What an eviction depends on, and where it is counted; implemented by the controller."""

    def borrows(self, namespace: str, /) -> bool:
        """Return whether the team is over its guaranteed quota."""

    def eviction_step(self, step: str, /) -> None:
        """Count a step of an eviction."""

    def eviction_ended(self, seconds: float, /) -> None:
        """Count an eviction that took this long."""


class Evictions:
    """Evictions in progress. `pods` are all tracked pods by uid."""

    def __init__(
        self,
        pods: Mapping[str, PodView],
        writer: Writer,
        rules: CurrentRules,
        recorder: Recorder,
        context: EvictionContext,
    ) -> None:
        self._pods, self._writer, self._rules, self._recorder = pods, writer, rules, recorder
        self._context = context
        self._endings: dict[str, _Ending] = {}
        self._preempted: set[str] = set()  # uids of pods that kube-scheduler stops, as reported

    @property
    def blocked(self) -> int:
        """Return the number of pods whose eviction was refused and is repeated."""
        return sum("retry" in ending.timers for ending in self._endings.values())

    def evict(self, pod: PodView, *, bounded: bool, requested_at: float | None = None) -> None:
        """Evict a pod; the reclaim bound applies if its GPUs are reclaimed or its team holds borrowed ones.

        `requested_at` is when the bound began, in seconds since 1970, if that was earlier.
        """
        if pod.uid in self._endings:
            return
        now, bounded = time.time(), bounded or self._context.borrows(pod.namespace)
        requested_at = min(self._requested_at(pod, now), requested_at or now)
        ending = _Ending(pod, requested_at, since_boot_s() - (now - requested_at), bounded)
        self._endings[pod.uid] = ending
        ending.noted = ending.requested_at < now
        current = self._pods.get(pod.uid)
        if current is None or current.stage is not Stage.TERMINATING:
            self._context.eviction_step("evicted")
        if bounded:
            self._set(ending, "delete", self._left_s(ending), self._delete)
        if not bounded or self._left_s(ending) > 0:
            self._evict(pod.uid)

    def note_suspended(self, pods: int) -> None:
        """Count pods whose owner was suspended instead of an eviction."""
        for _ in range(pods):
            self._context.eviction_step("suspended")

    def note(self, pod: PodView) -> None:
        """Process an update of a pod."""
        if pod.leaving and pod.lost.startswith(PREEMPTED) and pod.uid not in self._preempted:
            self._preempted.add(pod.uid)
            self._context.eviction_step("preempted")
            why = f"kube-scheduler preempted it by the pods' PriorityClasses, and not the quota: {pod.lost}"
            self._recorder.record(pod.subject, "PreemptedByScheduler", why, warning=True)
        if pod.stage is Stage.ENDED:
            self.drop(pod.uid)

    def drop(self, uid: str) -> None:
        """End the eviction of a pod that was deleted or has ended."""
        self._preempted.discard(uid)
        if (ending := self._endings.pop(uid, None)) is not None:
            for timer in ending.timers.values():
                timer.cancel()
            self._context.eviction_ended(ending.age_s())

    def close(self) -> None:
        """Cancel all timers."""
        for ending in self._endings.values():
            for timer in ending.timers.values():
                timer.cancel()
        self._endings.clear()

    def _requested_at(self, pod: PodView, now: float) -> float:
        """Return when the eviction began: the annotation of an earlier controller counts, unless it is outdated."""
        recent = now - 2 * self._rules.rules.reclaim.bound_s < pod.reclaimed_at <= now
        return pod.reclaimed_at if recent else now

    def _grace_of(self, pod: PodView) -> float:
        return max(1.0, min(pod.grace_s, self._rules.rules.reclaim.max_grace_s))

    def _left_s(self, ending: _Ending) -> float:
        """Return in how many seconds the pod must be deleted at the latest, to end within the bound."""
        return self._rules.rules.reclaim.bound_s - self._grace_of(ending.pod) - SLACK_S - ending.age_s()

    def _evict(self, uid: str) -> None:
        ending, pod = self._endings.get(uid), self._pods.get(uid)
        if ending is None or pod is None or pod.stage is Stage.TERMINATING:
            return
        grace = self._grace_of(pod) if pod.grace_s > self._grace_of(pod) else None
        self._writer.submit(requests.eviction(pod, grace), lambda _: None, partial(self._refused, uid))

    def _refused(self, uid: str, error: Exception) -> None:
        ending = self._endings.get(uid)
        if ending is None or (isinstance(error, ApiError) and error.not_found):
            return  # the watch reports it as well; 409 may be another pod with that name, or a transient conflict
        if not ending.bounded and self._context.borrows(ending.pod.namespace):
            # another job may wait for this pod's GPUs: the plan counts GPUs of terminating pods as free soon
            ending.bounded, ending.requested_at, ending.began = True, time.time(), since_boot_s()
            self._set(ending, "delete", self._left_s(ending), self._delete)
        self._context.eviction_step("refused")
        self._recorder.record(ending.pod.subject, "EvictionBlocked", self._why_blocked(ending, error))
        if ending.bounded and not ending.noted:
            ending.noted = True
            self._writer.submit(requests.reclaim_note(ending.pod, ending.requested_at), lambda _: None, lambda _: None)
        self._set(ending, "retry", RETRY_S, self._evict)

    def _why_blocked(self, ending: _Ending, error: Exception) -> str:
        cause = "a disruption budget forbids it" if is_refused_by_budgets(error) else f"{error}"
        if not ending.bounded:
            return f"it must move to another node, or stop for a job of higher priority of its own team, but {cause}"
        bound = self._rules.rules.reclaim.bound_s
        return f"its team's borrowed GPUs are reclaimed, but {cause}; it is deleted within {bound:g} s in any case"

    def _delete(self, uid: str) -> None:
        """Delete the pod near the end of the bound, if the eviction API has not ended it."""
        ending, pod = self._endings.get(uid), self._pods.get(uid)
        if ending is None or pod is None:
            return
        bound_s = self._rules.rules.reclaim.bound_s
        deadline = ending.requested_at + bound_s
        if pod.stage is Stage.TERMINATING:
            if pod.ends_at > deadline:
                self._context.eviction_step("overdue")
                late = f"{pod.ends_at - deadline:.0f} s"
                self._recorder.record(
                    pod.subject, "ReclaimOverdue", f"it was deleted with a grace period that ends {late} too late"
                )
            return
        grace = max(1.0, min(self._grace_of(pod), bound_s - ending.age_s() - SLACK_S))
        self._context.eviction_step("deleted")
        why = f"the reclaim of its borrowed GPUs began {ending.age_s():.0f} s ago"
        bound = f"{bound_s:g} s are allowed (QuotaPolicy, reclaim.boundSeconds)"
        self._recorder.record(
            pod.subject, "ReclaimForced", f"{why}, {bound}: it is deleted with {grace:g} s of grace period"
        )
        write = requests.deletion(pod.namespace, pod.name, pod.uid, grace)
        self._writer.submit(write, lambda _: None, partial(self._not_deleted, uid))

    def _not_deleted(self, uid: str, error: Exception) -> None:
        ending = self._endings.get(uid)
        if ending is not None and not (isinstance(error, ApiError) and error.not_found):
            self._set(ending, "delete", 1.0, self._delete)

    def _set(self, ending: _Ending, name: str, delay_s: float, action: Callable[[str], None]) -> None:
        if before := ending.timers.get(name):
            before.cancel()
        loop = asyncio.get_running_loop()
        ending.timers[name] = loop.call_later(max(0.0, delay_s), action, ending.pod.uid)


def is_refused_by_budgets(error: Exception) -> bool:
    """Return whether a disruption budget refuses the eviction (429), or several budgets apply to the pod (500)."""
    return isinstance(error, ApiError) and (
        is_disruption_budget(error) or "more than one PodDisruptionBudget" in error.message
    )
