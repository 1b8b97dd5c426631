"""The controller: watches the cluster, plans on changes, and carries out the plans, in one asyncio process.

    reflectors ─► snapshot ─► plan ─► writes
         ▲                              │
         └────────── API server ◄───────┘

A change is planned at once if there was no recent plan, else together with the changes of a short interval: a single
pod does not wait, and thousands of pods do not cause thousands of plans.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import time
import uuid
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota import scheduler
from kfp_gpuquota.cluster.kubernetes.client.event_recorder import Recorder, Subject
from kfp_gpuquota.cluster.kubernetes.client.fence import NO_FENCE
from kfp_gpuquota.cluster.kubernetes.client.logging_setup import because_of
from kfp_gpuquota.cluster.kubernetes.client.quarantine import Quarantine
from kfp_gpuquota.cluster.kubernetes.client.reflector import Reflector
from kfp_gpuquota.cluster.kubernetes.client.write_queue import Writer
from kfp_gpuquota.cluster.kubernetes.controller.cache import Snapshot
from kfp_gpuquota.cluster.kubernetes.controller.metrics import Metrics
from kfp_gpuquota.cluster.kubernetes.controller.plan_log import log_plan
from kfp_gpuquota.cluster.kubernetes.controller.status_writer import StatusWriter, job_status, quota_status
from kfp_gpuquota.cluster.kubernetes.convert.limit_ranges import LimitRanges
from kfp_gpuquota.cluster.kubernetes.convert.pods import PodView, Stage, counted_view, recovered_pod
from kfp_gpuquota.cluster.kubernetes.convert.volumes import Volumes
from kfp_gpuquota.cluster.kubernetes.elasticjob.reconciler import ElasticJobs
from kfp_gpuquota.cluster.kubernetes.elasticjob.startup_backoff import ReadyRules
from kfp_gpuquota.cluster.kubernetes.objects import core_types, custom_types, labels
from kfp_gpuquota.cluster.kubernetes.pods.eviction import Evictions
from kfp_gpuquota.cluster.kubernetes.pods.node_exclusions import NodeExclusions
from kfp_gpuquota.cluster.kubernetes.pods.pod_actions import PodActions
from kfp_gpuquota.cluster.kubernetes.pods.pod_groups import Gangs
from kfp_gpuquota.cluster.kubernetes.pods.recovery import StuckPods, awaits_a_node, does_not_come_up, lacks_its_place
from kfp_gpuquota.cluster.kubernetes.pods.wait_events import WaitEvents
from kfp_gpuquota.cluster.kubernetes.quota import quota_policy
from kfp_gpuquota.cluster.kubernetes.quota.default_quotas import DefaultQuotas
from kfp_gpuquota.cluster.kubernetes.quota.profiles import Profiles
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import RulesBook
from kfp_gpuquota.cluster.kubernetes.sharing.reservation_pods import ReservationSettings
from kfp_gpuquota.cluster.kubernetes.sharing.reservations import Reservations
from kfp_gpuquota.cluster.planning import PlanningHealth
from kfp_gpuquota.errors import PlanningFailedError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from kfp_gpuquota.cluster.kubernetes.client.async_client import Connection
    from kfp_gpuquota.cluster.kubernetes.client.fence import Fence
    from kfp_gpuquota.cluster.kubernetes.client.request import Lane
    from kfp_gpuquota.cluster.kubernetes.elasticjob.pod_builder import PodSettings

LONGEST_REST_S: Final = 0.5
QUOTAS_LOOKED_AT_S: Final = 1.0
KINDS: Final = {
    "PolicyObject": "WorkloadPolicy",
    "QuotaPolicyObject": "QuotaPolicy",
}  # kinds whose structs have another name
NOT_READY: Final = "not_ready"  # a kind of decision: GPUs released because pods did not start

log = logging.getLogger(__name__)


class Controller:
    """All parts that run while this process leads.

    `tls` is the TLS context of the membership service; None serves without TLS, for a trusted network. `fence` is
    checked before each write, and `epoch` is the leader's (`leaseTransitions`).
    """

    def __init__(
        self,
        connection: Connection,
        settings: PodSettings,
        *,
        membership_port: int = 0,
        tls: ssl.SSLContext | None = None,
        metrics: Metrics | None = None,
        reserving: ReservationSettings | None = None,
        ready: ReadyRules | None = None,
        fence: Fence = NO_FENCE,
        epoch: int = 0,
    ) -> None:
        self._connection, self._membership_port, self._tls = connection, membership_port, tls
        self._loop = asyncio.get_running_loop()
        self.metrics = metrics or Metrics()
        self.rules = RulesBook(lambda: self._rules_changed())  # noqa: PLW0108 - it uses what is created below
        self.snapshot = snapshot = Snapshot(self.wake, self.rules)
        self._writer = Writer(connection, fence=fence)
        self.health = PlanningHealth(self._loop.time)
        self._planning_failed = asyncio.Event()
        self._planning: asyncio.Handle | None = None
        self._again: asyncio.TimerHandle | None = None
        self._quotas_timer: asyncio.TimerHandle | None = None
        self._planned_at = self._plan_s = 0.0
        self._name, self._numbers = f"plan-{uuid.uuid4().hex[:6]}", itertools.count(1)
        self.volumes = Volumes(self._volume_changed)
        self.limits = LimitRanges(lambda namespace: self.elastic.limits_changed(namespace))  # noqa: PLW0108 - made below
        self.profiles = Profiles(self._writer, snapshot.quotas, self._record_namespace_event)
        self.default_quotas = DefaultQuotas(self._writer, self.rules, snapshot.quotas, self.profiles.asks)
        self.events = Recorder(self._writer)
        self.quarantine = Quarantine(partial(self.events.record, warning=True))
        self.pods = self._reflector(
            "/api/v1/pods", core_types.Pod, self._pod_changed, self._pod_gone, recover=recovered_pod
        )
        self.reflectors = [self.pods, *self._other_reflectors()]
        self.reservations = Reservations(
            snapshot.allocator,
            snapshot.nodes,
            self._writer,
            reserving or ReservationSettings(),
            noted=self.pods.note,
            recall=snapshot.share_of,
            displaced=self._gpu_changed,
        )
        self.evictions = Evictions(
            snapshot.pods,
            self._writer,
            self.rules,
            self._record_pod_event,
            count=lambda step: self.metrics.reclaim_steps.labels(step).inc(),
            ended=self.metrics.reclaims.observe,
            borrows=self._borrows,
        )
        self.actions = PodActions(
            snapshot.plain,
            self._writer,
            self.pods.note,
            self._record_pod_event,
            self.reservations,
            self.rules,
            self.evictions,
        )
        self.gangs = Gangs(snapshot.pods, self._put_pod, self._writer)
        self._waiting = WaitEvents(snapshot.plain, self._record_pod_event)
        self._exclusions = NodeExclusions(snapshot.pods, snapshot.put_pod, self._avoided)
        self._ready = ready or ReadyRules()
        self._stuck = [StuckPods(snapshot.pods, self._place_taken, lacks_its_place)]
        if self._ready.timeout_s:
            self._stuck.append(StuckPods(snapshot.pods, self._not_ready, does_not_come_up, self._ready.timeout_s))
            self._stuck.append(StuckPods(snapshot.pods, self._no_node_came, awaits_a_node, self._ready.timeout_s))
        conditions: dict[str, tuple[core_types.Condition, ...]] = {}
        self._quota_status = StatusWriter(self._writer, lambda name: quota_status(snapshot, name, conditions))
        self.elastic = snapshot.elastic = ElasticJobs(
            snapshot.emit,
            snapshot.allocator,
            snapshot.emitted_nodes,
            self._writer,
            settings,
            noted=self.pods.note,
            changed=lambda uid: self._job_status.changed(uid),  # noqa: PLW0108 - it is made below
            decided=lambda uid: self._job_status.decided(uid),  # noqa: PLW0108
            requests_in=self.limits.requests_in,
            volume_terms=self.volumes.terms,
            ready=self._ready,
            avoided=self._exclusions.note,
            warn_user=self._workers_not_ready,
            epoch=epoch,
        )
        self.elastic.max_grace_s = lambda: self.rules.rules.reclaim.max_grace_s
        self._rules_changed()
        self.elastic.workers.reservations = self.reservations
        self._job_status = StatusWriter(self._writer, partial(job_status, self.elastic))
        self.ready = False

    async def run(self) -> None:
        """Run until cancelled. Raises PlanningFailedError when plans fail repeatedly."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._writer.close)
            stack.callback(self._stop_timers)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            watching = [group.create_task(reflector.run()) for reflector in self.reflectors]
            with _nothing_collected():
                await self._load()
            membership = self.elastic.membership.serving(self._membership_port, self._tls)
            served = await stack.enter_async_context(membership)
            counts = len(self.snapshot.nodes), len(self.snapshot.pods), len(self.snapshot.quotas)
            log.info("listed %d nodes, %d pods, %d quotas; workers are served %s", *counts, served)
            if not self.rules.written:
                self._writer.submit(quota_policy.default_policy(), lambda _: None, lambda _: None)
            self.ready = True
            self.wake()
            await self._planning_failed.wait()
            for task in watching:
                task.cancel()
        self.health.check()

    def queued_writes(self) -> dict[Lane, int]:
        """Return the number of requests to the API server that wait for a slot, by lane."""
        return self._writer.depth

    async def _load(self) -> None:
        """List all objects, and emit them to the scheduler."""
        for reflector in self.reflectors:
            await reflector.synced.wait()
        await self.gangs.settled()
        await self.snapshot.start(self.gangs.join)
        self.reservations.start()
        self.profiles.start()
        self.default_quotas.start()

    def _other_reflectors(self) -> list[Reflector[Any]]:
        ours, snapshot, profiles = f"/apis/{labels.API_VERSION}", self.snapshot, self.profiles
        return [
            self._reflector("/api/v1/nodes", core_types.Node, snapshot.put_node, snapshot.drop_node),
            self._reflector(f"{ours}/gpuquotas", custom_types.GpuQuota, self._quota_changed, self._quota_gone),
            self._reflector(f"{ours}/elasticjobs", custom_types.ElasticJob, snapshot.put_job, snapshot.drop_job),
            self._reflector(
                "/apis/kubeflow.org/v1/profiles",
                core_types.Profile,
                profiles.put_profile,
                profiles.drop_profile,
                optional=True,
            ),
            self._reflector(
                quota_policy.PATH, custom_types.QuotaPolicyObject, self.rules.put, self.rules.drop, optional=True
            ),
            self._reflector(
                "/api/v1/persistentvolumeclaims",
                core_types.PersistentVolumeClaim,
                self.volumes.put_claim,
                self.volumes.drop_claim,
            ),
            self._reflector(
                "/api/v1/persistentvolumes",
                core_types.PersistentVolume,
                self.volumes.put_volume,
                self.volumes.drop_volume,
            ),
            self._reflector("/api/v1/limitranges", core_types.LimitRange, self.limits.put, self.limits.drop),
            self._reflector("/api/v1/namespaces", core_types.Namespace, self._namespace_changed, self._namespace_gone),
        ]

    def _reflector(self, path: str, kind: Any, changed: Any, gone: Any, **more: Any) -> Reflector[Any]:
        def handled(found: Any) -> None:
            changed(found)
            if kind is not core_types.Pod:  # `_pod_changed` quarantines pods itself
                self.quarantine.release(found.metadata.uid)

        def released(uid: str) -> None:
            self.quarantine.release(uid)
            gone(uid)

        def quarantined(metadata: core_types.Metadata, problem: str) -> None:
            version = path.removeprefix("/apis/").removeprefix("/api/").rpartition("/")[0]
            name = KINDS.get(kind.__name__, kind.__name__)
            subject = Subject(name, metadata.name, metadata.namespace, metadata.uid, version)
            self.quarantine.put(subject, problem)

        return Reflector(
            self._connection, path, kind, changed=handled, deleted=released, quarantined=quarantined, **more
        )

    def _pod_gone(self, uid: str) -> None:
        self.gangs.drop(uid)
        self.snapshot.drop_pod(uid)
        self.reservations.drop(uid)
        self.evictions.drop(uid)

    def _pod_changed(self, pod: core_types.Pod) -> None:
        if self.reservations.see(pod):
            return
        view = counted_view(pod)
        if view.problem:
            self.quarantine.put(Subject("Pod", view.name, view.namespace, view.uid), view.problem)
        else:
            self.quarantine.release(view.uid)
        if (joined := self.gangs.join(view)) is not None:
            self._put_pod(joined)

    def _put_pod(self, view: PodView) -> None:
        self.snapshot.put_pod(self._exclusions.apply(self.volumes.apply(view)))
        self.evictions.note(view)
        for stuck in self._stuck:
            stuck.note(view)

    def _volume_changed(self, namespace: str, claim: str) -> None:
        """Update pods after their claim was bound to a volume that restricts their nodes."""
        if not self.snapshot.started:
            return
        here = (pod for pod in self.snapshot.pods.values() if pod.namespace == namespace and claim in pod.claims)
        for pod in [pod for pod in here if pod.stage is Stage.WAITING]:
            self._put_pod(pod)
        self.elastic.limits_changed(namespace)

    def _place_taken(self, pod: PodView) -> None:
        why = f"its place on node {pod.node} was taken by another pod, or never suited it: {pod.start_failure}"
        recreated = self.rules.rules.recreates(pod)
        if recreated:
            self._exclusions.note(pod)
        if self.elastic.owns(pod):
            self.elastic.pod_events.remake(pod)
            self._record_pod_event(pod, "PlaceTaken", why)
        elif recreated:
            self.actions.remake(pod, "PlaceTaken", why)
        else:
            self._record_pod_event(
                pod, "PlaceTaken", f"{why}; nobody would make it anew: delete it, and create it again"
            )

    def _workers_not_ready(self, job: Subject, message: str) -> None:
        self.metrics.decisions.labels(NOT_READY).inc()
        self.events.record(job, "WorkersNotReady", message, warning=True)

    def _not_ready(self, pod: PodView) -> None:
        """Evict a pod that does not start; its owner's next pod waits at the gate, and gets another node."""
        if pod.uid not in self.snapshot.plain.members:
            return
        said = pod.start_failure or "its volumes or its network are not there"
        why = f"it did not come up on node {pod.node} in {self._ready.timeout_s:g} s: {said}"
        if self.rules.rules.recreates(pod):
            self.metrics.decisions.labels(NOT_READY).inc()
            self._exclusions.note(pod)
            self.actions.remake(pod, "NotReady", f"{why}; its GPUs are given back")
        else:
            self._record_pod_event(
                pod, "NotReady", f"{why}; it keeps its GPUs, since nobody would make it anew: delete it"
            )

    def _no_node_came(self, pod: PodView) -> None:
        """Evict a pod for which the autoscaler adds no node, if its owner recreates it, so that it is queued again."""
        said = pod.start_failure or "kube-scheduler has not looked at it"
        why = f"no node of the autoscaled pool took it in {self._ready.timeout_s:g} s: {said}"
        if pod.uid in self.snapshot.plain.members and self.rules.rules.recreates(pod):
            self.metrics.decisions.labels(NOT_READY).inc()
            self.actions.remake(pod, "NoNodeCame", f"{why}; its GPUs are given back")
        else:
            self._record_pod_event(pod, "NoNodeCame", f"{why}; it keeps its quota, and goes on waiting")

    def _gpu_changed(self, holder: str, why: str) -> None:
        """Replace a sharer whose GPU is no longer reserved; its next pod gets the reserved one."""
        member, worker = self.snapshot.plain.members.get(holder), self.elastic.workers.pods.get(holder)
        if member is not None and self.rules.rules.recreates(member.view):
            self.actions.remake(member.view, "GpuChanged", why)
        elif member is not None:
            self._record_pod_event(
                member.view, "GpuChanged", f"{why}; delete it, and create it again: nobody else would"
            )
        elif worker is not None:
            self._record_pod_event(worker, "GpuChanged", why)
            self.elastic.pod_events.remake(worker)

    def _avoided(self, controller_uid: str, nodes: tuple[str, ...]) -> None:
        self.elastic.avoid(controller_uid, nodes)

    def _namespace_changed(self, namespace: core_types.Namespace) -> None:
        self.profiles.put_namespace(namespace)
        self.default_quotas.put_namespace(namespace)

    def _namespace_gone(self, uid: str) -> None:
        self.profiles.drop_namespace(uid)
        self.default_quotas.drop_namespace(uid)

    def _quota_changed(self, quota: custom_types.GpuQuota) -> None:
        self.snapshot.put_quota(quota)
        self.profiles.quota_changed(quota.metadata.name)
        self.wake()

    def _quota_gone(self, uid: str) -> None:
        name = next((n for n, q in self.snapshot.quotas.items() if q.metadata.uid == uid), "")
        self.snapshot.drop_quota(uid)
        self.profiles.quota_changed(name)
        self.wake()

    def _borrows(self, namespace: str) -> bool:
        return namespace in self.snapshot.projects and self.snapshot.held(namespace).borrowed > 0

    def _rules_changed(self) -> None:
        self.snapshot.state.ledger.reclaim_shelter_s = self.rules.rules.reclaim.max_min_run_time_s
        self.default_quotas.rules_changed()
        self.wake()

    def _record_pod_event(self, pod: PodView, reason: str, message: str) -> None:
        self.events.record(Subject("Pod", pod.name, pod.namespace, pod.uid), reason, message)

    def _record_namespace_event(self, namespace: str, reason: str, message: str) -> None:
        self.events.record(Subject("Namespace", namespace, namespace), reason, message, warning=True)

    # Planning

    def wake(self) -> None:
        """Plan soon, after a change."""
        if self._planning is None and self.snapshot.complete and not self._planning_failed.is_set():
            self.health.requested()
            rest = min(LONGEST_REST_S, 2 * self._plan_s)  # so that planning takes at most a third of the time
            pause = self._planned_at + max(rest, self.health.pause_s) - self._loop.time()
            # Even without a pause, changes that arrive in one chunk are planned together: all of them are processed
            # before the event loop's next iteration.
            later = self._loop.call_later
            self._planning = later(pause, self._plan) if pause > 0 else self._loop.call_soon(self._plan)

    def _plan(self) -> None:
        started = self._loop.time()
        try:
            again_s = self._plan_once(started)
        except Exception:  # noqa: BLE001 - a single job must not end planning for all others
            again_s = self._plan_failed()
        else:
            self.health.succeeded()
        self._planning = None  # changes by this plan itself need no further plan
        self._planned_at = self._loop.time()
        self._plan_s = self._planned_at - started
        self.metrics.plans.observe(self._plan_s)
        self._plan_again(again_s)
        if self._quotas_timer is None:
            self._quotas_timer = self._loop.call_later(QUOTAS_LOOKED_AT_S, self._look_at_quotas)

    def _plan_once(self, started: float) -> float | None:
        """Plan, and carry out the plan; return in how many seconds to plan again without a change, if at all."""
        now = time.time()
        self.snapshot.catch_up()
        plan = scheduler.plan(self.snapshot.state, now)
        with because_of(f"{self._name}-{next(self._numbers)}"):
            log_plan(plan, self._loop.time() - started)
            self._carry_out(plan)
        return None if plan.again_at is None else plan.again_at - now

    def _plan_failed(self) -> float | None:
        """Count the failure; return the pause in seconds before the next plan, or None if the process ends instead."""
        log.exception("the plan failed")
        self.metrics.plan_failures.inc()
        try:
            self.health.failed()
        except PlanningFailedError as error:
            log.error("%s", error.message)
            self._planning_failed.set()
            return None
        return self.health.pause_s

    def _plan_again(self, delay_s: float | None) -> None:
        if self._again:
            self._again.cancel()
        self._again = None if delay_s is None else self._loop.call_later(max(0.0, delay_s), self.wake)

    def _carry_out(self, plan: scheduler.Plan) -> None:
        self.elastic.decisions.plan(plan)
        self._waiting.note(plan.waiting)
        for evict in plan.evict:
            self.actions.stop(evict.workers, evict.reason)
        for move in plan.move:
            self.actions.stop((move.worker,), move.reason)
        for resize in plan.resize:
            self.actions.stop(resize.remove, resize.reason)
            self.actions.start(resize.job, resize.add, resize.reason)
        for bind in plan.bind:
            self.actions.start(bind.job, bind.placements, bind.reason)
        for kind in ("bind", "evict", "move", "resize"):
            if decided := len(getattr(plan, kind)):
                self.metrics.decisions.labels(kind).inc(decided)

    def _look_at_quotas(self) -> None:
        self._quotas_timer = None
        for name in self.snapshot.quotas:
            self._quota_status.changed(name)

    def _stop_timers(self) -> None:
        for stuck in self._stuck:
            stuck.close()
        self._waiting.close()
        self.evictions.close()
        self._job_status.close()
        self._quota_status.close()
        for timer in (self._planning, self._again, self._quotas_timer):
            if timer:
                timer.cancel()


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Disable garbage collection: listed objects are long-lived, and scanning them costs a quarter of a start's CPU."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
