"""Detects pods that hold GPUs in vain: they do not start, or their GPU has failed.

| an admitted pod                                          | event after | its GPUs are given on after             |
|----------------------------------------------------------|-------------|-----------------------------------------|
| has another controller's scheduling gate                 | REPORT_S    | the start-up timeout                    |
| waits for another scheduler, or for none                 | REPORT_S    | the start-up timeout                    |
| is not bound, is not pinned                              | REPORT_S    | the start-up timeout (see unpinned.py)  |
| is not bound to the node to which it is pinned           | REPORT_S    | STUCK_S, if its owner recreates it      |
| is bound, and its kubelet reports why it does not start  | REPORT_S    | the start-up timeout                    |
| is bound, and its volumes or its network are not ready   | -           | the start-up timeout                    |
| has a GPU that its kubelet reports as unhealthy          | REPORT_S    | GPU_FAILED_S, if its owner recreates it |

To give GPUs on, the pod is evicted: the node of an admitted pod cannot be changed, and what could still start may not
be left uncounted. A pod that has not started loses no work, so that also holds for one that no owner recreates. Workers
of ElasticJobs have their own timeouts (elasticjob/workers/startup_timeout.py).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from kfp_gpuquota.cluster.kubernetes.convert.pod_placement import NOWHERE
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
    from kfp_gpuquota.cluster.kubernetes.elasticjob.reconciler import ElasticJobs
    from kfp_gpuquota.cluster.kubernetes.pinning.unpinned import UnpinnedPods
    from kfp_gpuquota.cluster.kubernetes.pods.node_exclusions import NodeExclusions
    from kfp_gpuquota.cluster.kubernetes.pods.plain_pods import PlainPods
    from kfp_gpuquota.cluster.kubernetes.pods.pod_actions import PodActions
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules

STUCK_S: Final = 15.0  # longer than a node needs to free capacity, and than an autoscaler's first steps
REPORT_S: Final = 3.0
GPU_FAILED_S: Final = 60.0  # longer than a device plugin needs to report a device as healthy again
_NOT_PREPARED: Final = "its volumes or its network are not ready"
_NOT_RECREATED: Final = "no controller recreates it: delete it, and create it again"


class ReleaseCounter(Protocol):
    """Counts the pods whose GPUs are released because they do not start."""

    def inc(self) -> None:
        """Count one."""


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


def is_not_bindable(pod: PodView) -> bool:
    """Return whether the pod was admitted to a node, and kube-scheduler reports that it does not fit there."""
    waits = pod.stage is Stage.ASSIGNED and not pod.bound and pod.start_failure.startswith("Unschedulable")
    return waits and not pod.stand_in


def awaits_node(pod: PodView) -> bool:
    """Return whether the pod was admitted to an autoscaled pool, and is not bound to a node yet."""
    return pod.stage is Stage.ASSIGNED and not pod.bound and bool(pod.stand_in)


def start_problem(pod: PodView) -> str:
    """Return why an admitted pod has not started; "" for one that starts, or runs. Image pulls may take long."""
    if pod.stage is not Stage.ASSIGNED or pod.running or pod.job_uid or awaits_node(pod):
        return ""
    if pod.bound:
        return pod.start_failure or ("" if pod.prepared else _NOT_PREPARED)
    if pod.other_gate:
        return f"scheduling gate {pod.other_gate} of another controller is still on it"
    if pod.start_failure:
        return pod.start_failure
    name = pod.owner.name if pod.owner is not None and pod.owner.is_native else ""
    group = f"; it binds no pod of PodGroup {name} while another one waits for quota" if name else ""
    return f"scheduler {pod.scheduler or 'kube-scheduler'} has not bound it{group}"


def problem_of(pod: PodView) -> str:
    """Return what its user should be informed of at once: why the pod does not start, or that its GPU has failed."""
    if pod.stage is Stage.ASSIGNED and pod.unhealthy_gpu:
        return f"its GPU {pod.unhealthy_gpu} has failed"
    problem = start_problem(pod)
    return "" if problem == _NOT_PREPARED else problem


def has_failed_gpu(pod: PodView) -> bool:
    """Return whether the pod holds a GPU that has failed."""
    return pod.stage is Stage.ASSIGNED and bool(pod.unhealthy_gpu)


class PodRecovery:
    """Recreates pods that hold GPUs and do not start, or informs their users where no owner would recreate them.

    `pods` are all tracked pods by uid. A pod that does not start is recreated after `timeout_s`; 0: never.
    """

    def __init__(
        self,
        pods: Mapping[str, PodView],
        plain: PlainPods,
        elastic: ElasticJobs,
        actions: PodActions,
        exclusions: NodeExclusions,
        rules: CurrentRules,
        recorder: Recorder,
        released: ReleaseCounter,
        timeout_s: float,
        unpinned: UnpinnedPods,
    ) -> None:
        self._unpinned = unpinned
        self._plain, self._elastic, self._actions, self._exclusions = plain, elastic, actions, exclusions
        self._rules, self._recorder, self._released, self._timeout_s = rules, recorder, released, timeout_s
        self._reported: dict[str, str] = {}  # the last problem of each pod
        self._stuck = [
            StuckPods(pods, self._report, lambda pod: bool(problem_of(pod)), REPORT_S),
            StuckPods(pods, self._not_bindable, is_not_bindable),
            StuckPods(pods, self._gpu_failed, has_failed_gpu, GPU_FAILED_S),
        ]
        if timeout_s:
            self._stuck.append(StuckPods(pods, self._not_started, lambda pod: bool(start_problem(pod)), timeout_s))
            self._stuck.append(StuckPods(pods, self._no_node_added, awaits_node, timeout_s))

    def note(self, pod: PodView) -> None:
        """Process an update of a pod."""
        for stuck in self._stuck:
            stuck.note(pod)

    def drop(self, uid: str) -> None:
        """Forget a deleted pod."""
        self._reported.pop(uid, None)

    def close(self) -> None:
        """Cancel all timers."""
        for stuck in self._stuck:
            stuck.close()

    def gpu_changed(self, holder: str, why: str) -> None:
        """Replace a sharer whose GPU is no longer reserved; its next pod gets the reserved one."""
        member, worker = self._plain.members.get(holder), self._elastic.workers.pods.get(holder)
        if member is not None and self._rules.rules.recreates(member.view):
            self._actions.remake(member.view, "GpuChanged", why)
        elif member is not None:
            self._recorder.record(member.view.subject, "GpuChanged", f"{why}; {_NOT_RECREATED}")
        elif worker is not None:
            self._recorder.record(worker.subject, "GpuChanged", why)
            self._elastic.pod_events.remake(worker)

    def rejected(self, pod: PodView) -> None:
        """Exclude the node whose kubelet rejected a pod for the next pods of its owner, which would fail there, too."""
        if pod.controller_uid:  # all pods without an owner have the same
            self._exclusions.note(pod)
        self._recorder.record(pod.subject, "PlaceTaken", f"node {pod.node} rejected it: {pod.rejected}")

    def _not_bindable(self, pod: PodView) -> None:
        """Recreate a pod that kube-scheduler cannot bind to its node, and exclude that node for its owner.

        A pod that is not pinned stays: only its reservation moves.
        """
        if pod.reserved_on:
            self._refused(pod)
            return
        why = f"it could not be bound to node {pod.node}, which was planned for it: {pod.start_failure}"
        recreated = self._rules.rules.recreates(pod)
        if recreated:
            self._exclusions.note(pod)
        if self._elastic.owns(pod):
            self._elastic.pod_events.remake(pod)
            self._recorder.record(pod.subject, "PlaceTaken", why)
        elif recreated:
            self._actions.remake(pod, "PlaceTaken", why)
        else:
            self._recorder.record(pod.subject, "PlaceTaken", f"{why}; {_NOT_RECREATED}")

    def _refused(self, pod: PodView) -> None:
        node = self._unpinned.refuse(pod)
        where = "count against its team's quota" if node == NOWHERE else f"are reserved on node {node}"
        why = f"kube-scheduler does not bind it to node {pod.node}: {pod.start_failure}"
        if node != pod.node:
            self._recorder.record(pod.subject, "ReservationMoved", f"{why}; its GPUs {where}")

    def _report(self, pod: PodView) -> None:
        """Inform the pod's user once of each problem."""
        problem = problem_of(pod)
        kind = problem.partition(":")[0]
        if self._reported.get(pod.uid) == kind:
            return
        self._reported[pod.uid] = kind
        until = f"; its GPUs are released if that lasts {self._timeout_s:g} s" if self._timeout_s else ""
        if pod.reserved_on and not pod.bound:
            until += "; until it is bound or deleted, other pods only prefer the nodes that are planned for them"
        what = f"it holds GPUs, but does not start: {problem}{until}" if not pod.unhealthy_gpu else problem
        self._recorder.record(pod.subject, "GpuFailed" if pod.unhealthy_gpu else "NotStarting", what)

    def _not_started(self, pod: PodView) -> None:
        """Evict a pod that does not start; its owner's next pod waits at the gate, and gets another node."""
        if self._elastic.owns(pod):
            return
        where = f" on node {pod.node}" if pod.bound else ""
        why = f"it did not start{where} in {self._timeout_s:g} s: {start_problem(pod)}; its GPUs are released"
        self._released.inc()
        if self._rules.rules.recreates(pod):
            self._exclusions.note(pod)
        else:
            why += "; no controller creates it again"
        self._actions.remake(pod, "NotReady", why)

    def _gpu_failed(self, pod: PodView) -> None:
        """Replace a pod whose GPU has failed, as a lost worker."""
        why = f"its GPU {pod.unhealthy_gpu} has failed"
        if self._elastic.owns(pod):
            self._recorder.record(pod.subject, "GpuFailed", why)
            self._elastic.pod_events.remake(pod)
        elif self._rules.rules.recreates(pod):
            self._actions.remake(pod, "GpuFailed", f"{why}; {self._rules.rules.consequence(pod)}")

    def _no_node_added(self, pod: PodView) -> None:
        """Evict a pod for which the autoscaler adds no node, if its owner recreates it, so that it is queued again."""
        failure = pod.start_failure or "kube-scheduler has reported no reason"
        why = f"the autoscaler added no node for it in {self._timeout_s:g} s: {failure}"
        if not self._elastic.owns(pod) and self._rules.rules.recreates(pod):
            self._released.inc()
            self._actions.remake(pod, "NoNodeCame", f"{why}; its GPUs are released")
        else:
            self._recorder.record(pod.subject, "NoNodeCame", f"{why}; it keeps its quota, and stays pending")
