"""The controller: watches the cluster, requests plans on changes, and carries them out, in one asyncio process.

reflectors ─► snapshot ─► planner's process ─► plan ─► writes
     ▲                                                   │
     └──────────────────── API server ◄──────────────────┘
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota import scheduler
from kfp_gpuquota.cluster.kubernetes.client.leader.fence import NO_FENCE
from kfp_gpuquota.cluster.kubernetes.client.quarantine import Quarantine
from kfp_gpuquota.cluster.kubernetes.client.writes.event_recorder import Recorder
from kfp_gpuquota.cluster.kubernetes.client.writes.status_writer import StatusWriter
from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
from kfp_gpuquota.cluster.kubernetes.controller.cache import Snapshot
from kfp_gpuquota.cluster.kubernetes.controller.cluster_objects import ClusterObjects
from kfp_gpuquota.cluster.kubernetes.controller.forecast import StartForecast
from kfp_gpuquota.cluster.kubernetes.controller.metrics import Metrics
from kfp_gpuquota.cluster.kubernetes.controller.plan_loop import PlanLoop
from kfp_gpuquota.cluster.kubernetes.controller.quota_status import quota_status
from kfp_gpuquota.cluster.kubernetes.controller.watches import FOREIGN_KINDS, Watches
from kfp_gpuquota.cluster.kubernetes.convert.elastic_jobs import template_of
from kfp_gpuquota.cluster.kubernetes.convert.limit_ranges import LimitRanges
from kfp_gpuquota.cluster.kubernetes.convert.pod_repulsion import PodRepulsions
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.convert.pods import claims_in, counted_view
from kfp_gpuquota.cluster.kubernetes.convert.published_devices import PublishedDevices
from kfp_gpuquota.cluster.kubernetes.convert.volumes import Volumes
from kfp_gpuquota.cluster.kubernetes.convert.worker_ids import worker_id
from kfp_gpuquota.cluster.kubernetes.elasticjob.reconciler import ElasticJobs
from kfp_gpuquota.cluster.kubernetes.elasticjob.store import ElasticJobStore
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.startup_backoff import ReadyRules
from kfp_gpuquota.cluster.kubernetes.kuberay.owners import Owners
from kfp_gpuquota.cluster.kubernetes.kuberay.reconciler import RayUnits
from kfp_gpuquota.cluster.kubernetes.kuberay.units import Ledger
from kfp_gpuquota.cluster.kubernetes.managed_jobs.reconciler import ManagedJobs
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Subject
from kfp_gpuquota.cluster.kubernetes.pinning.unpinned import UnpinnedPods
from kfp_gpuquota.cluster.kubernetes.planner.process import InlinePlanner
from kfp_gpuquota.cluster.kubernetes.pods.device_claims import DeviceClaims, counts_differently
from kfp_gpuquota.cluster.kubernetes.pods.eviction import Evictions
from kfp_gpuquota.cluster.kubernetes.pods.node_exclusions import NodeExclusions
from kfp_gpuquota.cluster.kubernetes.pods.pod_actions import PodActions
from kfp_gpuquota.cluster.kubernetes.pods.pod_groups import Gangs
from kfp_gpuquota.cluster.kubernetes.pods.recovery import PodRecovery
from kfp_gpuquota.cluster.kubernetes.pods.uncounted_pods import ExchangedClaims, UncountedPods
from kfp_gpuquota.cluster.kubernetes.pods.wait_events import WaitEvents
from kfp_gpuquota.cluster.kubernetes.quota import quota_policy
from kfp_gpuquota.cluster.kubernetes.quota.default_quotas import DefaultQuotas
from kfp_gpuquota.cluster.kubernetes.quota.deleted_quotas import record_deletion
from kfp_gpuquota.cluster.kubernetes.quota.limit_enforcement import LimitEnforcement
from kfp_gpuquota.cluster.kubernetes.quota.move_budget import MoveBudget
from kfp_gpuquota.cluster.kubernetes.quota.profiles import Profiles
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules
from kfp_gpuquota.cluster.kubernetes.quota.workload_policies import CurrentPolicies
from kfp_gpuquota.cluster.kubernetes.sharing.reservation_pods import ReservationSettings
from kfp_gpuquota.cluster.kubernetes.sharing.reservations import Reservations
from kfp_gpuquota.cluster.kubernetes.suspension.resuming import Resuming
from kfp_gpuquota.cluster.kubernetes.suspension.suspending import SUSPENDED_UNUSED
from kfp_gpuquota.cluster.kubernetes.unused_gpus.exporters import Exporters
from kfp_gpuquota.cluster.kubernetes.unused_gpus.unused_workloads import UNUSED, UnusedWorkloads
from kfp_gpuquota.cluster.steady_clock import SteadyClock
from kfp_gpuquota.engine.expected_starts import RunTimesOfWaiting, run_times
from kfp_gpuquota.engine.notifications import Notification, Notified
from kfp_gpuquota.gc_pause import collector_paused

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from kfp_gpuquota.api.resources import Resources as Amounts
    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
    from kfp_gpuquota.cluster.kubernetes.client.leader.fence import Fence
    from kfp_gpuquota.cluster.kubernetes.client.reflector import Reflector
    from kfp_gpuquota.cluster.kubernetes.client.writes.request import Lane
    from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_builder import PodSettings
    from kfp_gpuquota.cluster.kubernetes.objects import core_types, custom_types
    from kfp_gpuquota.cluster.kubernetes.planner.process import Planner
    from kfp_gpuquota.cluster.kubernetes.sharing.share_annotations import ShareNote
    from kfp_gpuquota.scheduler.forecast import RunTime

QUOTAS_LOOKED_AT_S: Final = 1.0
FOREIGN_S: Final = 2.0  # how long the first plan waits for a page of these
NOTIFIED: Final = {
    "Evicted": Notified.PREEMPTED,
    "Suspended": Notified.PREEMPTED,
    UNUSED: Notified.UNUSED,
    SUSPENDED_UNUSED: Notified.UNUSED,
}
"""By the reason of an event. ElasticJobs notify of all but their suspension for unused GPUs themselves."""
NOT_READY: Final = "not_ready"  # a kind of decision: GPUs released because pods did not start

log = logging.getLogger(__name__)


class Controller:
    """All parts that run while this process leads.

    `tls` is the TLS context of the membership service; None serves without TLS, for a trusted network. `fence` is
    checked before each write, and `epoch` is the leader's (`leaseTransitions`). `page_url` is the address
    of the web page. `clock` gives the time of records and plans, in seconds since 1970. `planner(state)` makes plans.
    `notify` receives what people are notified of.
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
        page_url: str = "",
        clock: Callable[[], float] | None = None,
        planner: Callable[[scheduler.State], Planner] = InlinePlanner,
        notify: Callable[[Notification], None] = lambda _: None,
    ) -> None:
        self._now = clock or SteadyClock()
        self._connection, self._membership_port, self._tls = connection, membership_port, tls
        self._loop = asyncio.get_running_loop()
        self.metrics = metrics or Metrics()
        self._not_ready = self.metrics.decisions.labels(NOT_READY)
        self._writer = Writer(connection, fence=fence)
        self.events = Recorder(self._writer)
        self.quarantine = Quarantine(partial(self.events.record, warning=True))
        self.rules = CurrentRules(self._rules_changed)
        self.volumes, self.limits = Volumes(self._volume_changed), LimitRanges(self._limits_changed)
        watches = Watches(connection, self.quarantine)
        self.pods = watches.pods(self._pod_changed, self._pod_deleted)
        cluster = ClusterObjects(self.wake, self._now)
        self._planner = planner(cluster.state)
        cluster.feed = self._planner.feed
        ready = ready or ReadyRules()
        self._build_devices(cluster, reserving or ReservationSettings())
        self._build_jobs(cluster, settings, ready, epoch, page_url)
        self._notify = self.elastic.book.notify = notify
        self.events.recorded = self._event_recorded
        self._build_planning(cluster)
        self._build_quotas(cluster)
        self._build_pod_parts(ready)
        self.reflectors = self._reflectors(watches)
        self._rules_changed()
        self.ready = False

    def _build_devices(self, cluster: ClusterObjects, reserving: ReservationSettings) -> None:
        """Build what decides which devices a pod gets, and how its claims count."""
        self._repulsions = PodRepulsions()
        self.unpinned = UnpinnedPods(
            cluster.emitted_nodes, cluster.allocator, self.volumes, self._repulsions, self._writer, self
        )
        self.reservations = Reservations(
            cluster.allocator, cluster.nodes, self._writer, reserving, written_pods=self.pods, sharers=self
        )
        self.devices = PublishedDevices(
            lambda node: self.snapshot.put_node(self.devices.apply(node)),
            partial(self.events.record, warning=True),
            lambda pool: self.claims.sizes_changed(pool),  # noqa: PLW0108 - it is built below
        )
        self.claims = DeviceClaims(self.rules, self.devices, self._claims_changed, self._jobs_outdated)

    def _build_jobs(
        self, cluster: ClusterObjects, settings: PodSettings, ready: ReadyRules, epoch: int, page_url: str
    ) -> None:
        """Build the reconcilers of ElasticJobs and Ray clusters, and the evictions."""
        self.elastic = ElasticJobs(
            ElasticJobStore(cluster.emit, cluster.allocator, cluster.emitted_nodes, self._now),
            cluster.allocator,
            self._writer,
            settings,
            self.reservations,
            self.unpinned,
            limits=self.limits,
            volumes=self.volumes,
            rules=self.rules,
            projects=cluster.projects,
            ready=ready,
            written_pods=self.pods,
            events=self,
            counted=self._counted,
            classes=lambda job: self.claims.classes_of(job.metadata.namespace, claims_in(template_of(job), {})),
            epoch=epoch,
            page_url=page_url,
        )
        self.evictions = Evictions(cluster.pods, self._writer, self.rules, self.events, self)
        self.ray = RayUnits(
            Owners(self.limits, self.volumes, self.rules),
            Ledger(cluster.emit, cluster.allocator, self._now),
            self._writer,
            self.evictions,
            self.events,
            self.pods,
            self.unpinned,
        )

    def _build_planning(self, cluster: ClusterObjects) -> None:
        """Build the view of the cluster that is planned, the loop of plans, and the forecast of starts."""
        book = self.elastic.book
        self._move_budget = MoveBudget(self._writer, self.rules, self.wake)
        self.snapshot = Snapshot(cluster, self.rules, self.elastic, self.ray)
        self._forecast = StartForecast(self._planner, self.current_state, book, self._now)
        self.metrics.starts_compared.set_function(lambda: book.accuracy.compared)
        self.metrics.starts_held.set_function(lambda: book.accuracy.held)
        self.plans = PlanLoop(
            self._planner,
            self.snapshot,
            self.unpinned,
            self.metrics,
            self._now,
            run_times=RunTimesOfWaiting(book),
            move_budget=self._move_budget,
            carry_out=self._carry_out,
            ended=self._planned,
        )

    def _build_quotas(self, cluster: ClusterObjects) -> None:
        """Build what writes, mirrors and enforces quotas, and their status."""
        snapshot = self.snapshot
        self.profiles = Profiles(self._writer, snapshot.quotas, self._record_namespace_event)
        self.default_quotas = DefaultQuotas(self._writer, self.rules, snapshot.quotas, self.profiles.asks)
        self.managed_jobs = ManagedJobs(self._writer, self.events)
        self.policies = CurrentPolicies()
        self._limits = LimitEnforcement(cluster.emit, self.rules)
        conditions: dict[str, tuple[core_types.Condition, ...]] = {}
        self._quota_status = StatusWriter(
            self._writer, lambda name: quota_status(snapshot, name, conditions, self.unused.stored_of(name))
        )
        self._quotas_timer: asyncio.TimerHandle | None = None

    def _build_pod_parts(self, ready: ReadyRules) -> None:
        """Build what starts, stops, groups and recovers pods, and explains why they wait."""
        snapshot = self.snapshot
        self._uncounted = UncountedPods(self.claims, self._writer, self.pods)
        self._exchanged = ExchangedClaims(self.claims, self._writer, self.events)
        self.actions = PodActions(
            snapshot.plain,
            self._writer,
            self.reservations,
            self.rules,
            self.evictions,
            self.events,
            self.pods,
            self.ray,
            self.unpinned,
        )
        self.unused = UnusedWorkloads(
            Exporters(self._connection, self._now, snapshot.quotas.__contains__),
            self.rules,
            self.policies,
            snapshot.plain,
            self.elastic,
            self.actions,
            self._writer,
            self.events,
            self._planner,
            state=self.current_state,
            quota_changed=self._quota_status.changed,
            now=self._now,
        )
        self.gangs = Gangs(snapshot.pods, self.put_pod, self._owner_unread, self._writer, self.claims.counted_in)
        self._waiting = WaitEvents(snapshot.plain, self.ray, self.events, self.gangs, snapshot.unseen, self.claims)
        self._exclusions = NodeExclusions(snapshot.pods, snapshot.put_pod, self._nodes_excluded)
        self._recovery = PodRecovery(
            snapshot.pods,
            snapshot.plain,
            self.elastic,
            self.actions,
            self._exclusions,
            self.rules,
            self.events,
            self._not_ready,
            ready.timeout_s,
            self.unpinned,
        )

    def _reflectors(self, watches: Watches) -> list[Reflector[Any]]:
        """Return the watches of all kinds, in the order in which their lists are awaited."""
        snapshot = self.snapshot
        return [
            self.pods,
            *watches.own_kinds(
                snapshot, self._quota_changed, self._quota_deleted, self.rules, self.managed_jobs, self.policies
            ),
            *watches.cluster_kinds(snapshot, self.volumes, self.limits, self.devices),
            *watches.device_kinds(self.claims, self.devices),
            *watches.foreign_kinds(self.profiles, self.ray, self.unused),
            *watches.suspended_owners(Resuming(self._writer, self.events, snapshot.plain.running)),
            watches.namespaces(self._namespace_changed, self._namespace_deleted),
        ]

    async def run(self) -> None:
        """Run until cancelled. Raises PlanningFailedError when plans fail repeatedly."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._writer.close)
            stack.push_async_callback(self._planner.close)
            stack.callback(self._stop_timers)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            watching = [group.create_task(reflector.run()) for reflector in self.reflectors]
            with collector_paused():  # a quarter of a start's CPU
                await self._load()
            membership = self.elastic.membership.serving(self._membership_port, self._tls)
            served = await stack.enter_async_context(membership)
            counts = len(self.snapshot.nodes), len(self.snapshot.pods), len(self.snapshot.quotas)
            log.info("listed %d nodes, %d pods, %d quotas; workers are served %s", *counts, served)
            if not self.rules.written:
                self._writer.submit(quota_policy.default_policy(), lambda _: None, lambda _: None)
            self.ready = True
            self.wake()
            watching.append(group.create_task(self.unused.run()))
            await self.plans.failed.wait()
            for task in watching:
                task.cancel()
        self.plans.health.check()

    def queued_writes(self) -> dict[Lane, int]:
        """Return the number of requests to the API server that wait for a slot, by lane."""
        return self._writer.depth

    def current_state(self) -> scheduler.State | None:
        """Return the state that the next plan is made of; None until all objects are listed."""
        if not self.snapshot.complete:
            return None
        self.snapshot.catch_up()
        return self.snapshot.state

    def run_times(self, now: float) -> Callable[[str], RunTime]:
        """Return what is known of a job's run time, as a function of its uid."""
        return run_times(self.elastic.book, now)

    async def _load(self) -> None:
        """List all objects, and emit them to the scheduler."""
        for reflector in self.reflectors:
            if reflector.path in FOREIGN_KINDS:
                if not await reflector.synced_or_unread(FOREIGN_S):
                    log.error("%s cannot be listed: planning starts without it", reflector.path)
            else:
                await reflector.synced.wait()
        self.start_claims()
        await self.gangs.settled()
        await self.snapshot.start(self.gangs.join)
        for job in self.snapshot.plain.jobs:
            self.actions.watch_rest(job)
        self.snapshot.emit(self._move_budget.recalled())
        self.reservations.start()
        self.unused.restore(self.snapshot.quotas.values())
        self.profiles.start()
        self.default_quotas.start()
        self.managed_jobs.start()

    def _event_recorded(self, subject: Subject, reason: str, message: str) -> None:
        """Notify of pods, and owners of pods, that release their GPUs for others, or do not use them."""
        what = NOTIFIED.get(reason)
        if what is not None and (subject.kind, reason) != ("ElasticJob", UNUSED):
            of = (subject.namespace, subject.name, subject.uid)
            self._notify(Notification(what, *of, user="", labels={}, why=message, at=self._now(), kind=subject.kind))

    def _pod_deleted(self, uid: str) -> None:
        self.claims.drop(uid)
        self.gangs.drop(uid)
        self.unpinned.drop(uid)
        self._recovery.drop(uid)
        self._repulsions.drop(uid)
        self.snapshot.drop_pod(uid)
        self.reservations.drop(uid)
        self.evictions.drop(uid)
        self._claims_changed()

    def _pod_changed(self, pod: core_types.Pod) -> None:
        if self.reservations.see(pod):
            return
        view = counted_view(pod)
        self._repulsions.put(view.uid, () if view.stage is Stage.ENDED else view.repels)
        if view.problem:
            self.quarantine.put(view.subject, view.problem)
        else:
            self.quarantine.release(view.uid)
        if (claimed := self.claims.put(view)) is not None:
            self._join(claimed)
            self._claims_changed()

    def start_claims(self) -> None:
        """Process the pods with claims, after everything was listed."""
        for pod in self.claims.start():
            self._join(pod)

    def _claims_changed(self) -> None:
        """Process the pods whose claims count differently now."""
        for pod in self.claims.outdated():
            self._join(pod)

    def _join(self, pod: PodView) -> None:
        """Process a pod whose claims are resolved, after its owner was read."""
        if self.claims.follows(pod.uid) and not pod.job_uid:
            self._uncounted.let_through(pod.uid)
            self._exchanged.stop(pod.uid)
            if self.claims.unknown_reason(pod.uid):
                self._waiting.look_soon()
            differs = counts_differently(self.snapshot.pods.get(pod.uid), pod)
            if differs or pod.stage is Stage.OUTSIDE:
                self.gangs.drop(pod.uid)
            if differs:
                self.snapshot.drop_pod(pod.uid)
            if pod.stage is Stage.OUTSIDE:
                self.put_pod(pod)
                return
        if (joined := self.gangs.join(pod)) is not None:
            self.put_pod(joined)

    # As `PodOwners`

    def holder_of(self, pod: PodView) -> str:
        """Return by which name the pod's devices are held."""
        if self.elastic.owns(pod):
            return worker_id(pod.job_uid, pod.index)
        return self.ray.pods.holder_of(pod.uid) or pod.uid

    def promised_devices(self) -> dict[str, set[int]]:
        """Return the devices that are promised to jobs, by node."""
        found: dict[str, set[int]] = {}
        for one in itertools.chain.from_iterable(self.snapshot.state.promises.values()):
            found.setdefault(one.node, set()).update(one.devices)
        return found

    def _owner_unread(self) -> None:
        self._waiting.look_soon()

    def put_pod(self, view: PodView) -> None:
        """Process a pod that has changed, or whose reservation has moved."""
        view = self.unpinned.apply(view)
        if view.rejected and view.uid in self.snapshot.pods:
            self._recovery.rejected(view)
        self.snapshot.put_pod(self._exclusions.apply(self.volumes.apply(view)))
        self.unpinned.note_bound(view)
        self.evictions.note(view)
        self._recovery.note(view)

    def _nodes_excluded(self, controller_uid: str, nodes: tuple[str, ...]) -> None:
        self.elastic.avoid(controller_uid, nodes)
        self.ray.avoid(controller_uid, nodes)

    def _counted(
        self, job: custom_types.ElasticJob, template: core_types.PodSpec, others: Amounts
    ) -> tuple[Amounts, Amounts]:
        return self.claims.of_job(job.metadata.namespace, claims_in(template, {}), others)

    def _jobs_outdated(self, namespace: str) -> None:
        if self.snapshot.complete:
            self.elastic.limits_changed(namespace)

    def _limits_changed(self, namespace: str) -> None:
        self.elastic.limits_changed(namespace)
        self.ray.limits_changed(namespace)

    def _volume_changed(self, namespace: str, claim: str) -> None:
        """Update pods after their claim was bound to a volume that restricts their nodes."""
        if not self.snapshot.started:
            return
        here = (pod for pod in self.snapshot.pods.values() if pod.namespace == namespace and claim in pod.claims)
        for pod in list(here):
            self.put_pod(pod)
        self._limits_changed(namespace)

    # As `ElasticJobEvents`

    def node_failed(self, pod: PodView) -> None:
        """Exclude the pod's node for its job's next workers."""
        self._exclusions.note(pod)

    def workers_not_ready(self, job: Subject, message: str) -> None:
        """Warn the job's user: GPUs are released because workers did not start."""
        self._not_ready.inc()
        self.events.record(job, "WorkersNotReady", message, warning=True)

    # As `Sharers`

    def share_of(self, holder: str) -> ShareNote | None:
        """Return the share that a holder of parts of GPUs has requested, if any."""
        return self.snapshot.share_of(holder)

    def gpu_changed(self, holder: str, why: str) -> None:
        """Replace a sharer whose GPU is no longer reserved; its next pod gets the reserved one."""
        self._recovery.gpu_changed(holder, why)

    # As `EvictionContext`

    def borrows(self, namespace: str) -> bool:
        """Return whether the team is over its guaranteed quota."""
        return namespace in self.snapshot.projects and self.snapshot.held(namespace).borrowed > 0

    def eviction_step(self, step: str) -> None:
        """Count a step of an eviction."""
        self.metrics.reclaim_steps.labels(step).inc()

    def eviction_ended(self, seconds: float) -> None:
        """Count an eviction that took this long."""
        self.metrics.reclaims.observe(seconds)

    # Objects

    def _namespace_changed(self, namespace: core_types.Namespace) -> None:
        self.claims.put_namespace(namespace)
        self.profiles.put_namespace(namespace)
        self.default_quotas.put_namespace(namespace)

    def _namespace_deleted(self, uid: str) -> None:
        self.profiles.drop_namespace(uid)
        self.default_quotas.drop_namespace(uid)

    def _quota_changed(self, quota: custom_types.GpuQuota) -> None:
        self.snapshot.put_quota(quota)
        self.profiles.quota_changed(quota.metadata.name)

    def _quota_deleted(self, uid: str) -> None:
        quota = next((q for q in self.snapshot.quotas.values() if q.metadata.uid == uid), None)
        self.snapshot.drop_quota(uid)
        if quota is not None:
            self.profiles.quota_changed(quota.metadata.name)
            if not self.profiles.asks(quota.metadata.name):
                record_deletion(quota, self.snapshot.pods.values(), self.events)
        self.wake()

    def _rules_changed(self) -> None:
        rules = self.rules.rules
        self.snapshot.state.ledger.reclaim_shelter_s = rules.reclaim.max_min_run_time_s
        self.snapshot.state.ledger.moves = rules.moves
        self.snapshot.state.ledger.defragmentation = rules.defragmentation
        self.snapshot.state.ledger.reserve_after_s = rules.reserve_after_s
        self.snapshot.state.ledger.half_life_s = rules.usage_half_life_s
        self.reservations.memory_reserve = rules.sharing.memory_reserve
        self.gangs.forget_sizes()
        self.devices.set_counted([name for name, _ in rules.gpu_weights], dict(rules.divided))
        self.claims.rules_changed()
        self.snapshot.rules_changed()
        self.snapshot.unseen.rules_changed()
        self.snapshot.plain.users_changed()
        self.default_quotas.rules_changed()
        self.elastic.rules_changed()
        self.wake()

    def _record_namespace_event(self, namespace: str, reason: str, message: str) -> None:
        self.events.record(Subject("Namespace", namespace, namespace), reason, message, warning=True)

    # Planning

    def wake(self) -> None:
        """Plan soon, after a change."""
        self.plans.wake()

    def _planned(self) -> None:
        self._forecast.planned()
        if self._quotas_timer is None:
            self._quotas_timer = self._loop.call_later(QUOTAS_LOOKED_AT_S, self._look_at_quotas)

    def _carry_out(self, plan: scheduler.Plan) -> None:
        state = self.snapshot.state
        promised = scheduler.changed_promises(state.promises, plan)
        self.elastic.plan(plan)
        self.ray.decisions.carry_out(plan)
        self._waiting.note(plan.waiting)
        for evict in plan.evict:
            self.actions.stop(evict.workers, evict.reason)
        for move in plan.move:
            self.actions.stop((move.worker,), move.reason)
        for resize in plan.resize:
            self.actions.stop(resize.remove, resize.reason)
            self.actions.start(resize.job, resize.add, resize.reason)
        for bind in plan.bind:
            self.metrics.started(self.snapshot.state.jobs[bind.job], self._now())
            self.actions.start(bind.job, bind.placements, bind.reason)
        for uid in promised.keys() & state.jobs.keys():
            if uid not in self.elastic.book.jobs:  # whose records have their own
                victims = plan.victims.get(uid, ()) if promised[uid] else ()
                self.snapshot.emit(scheduler.PlacementsPromised(uid, promised[uid], self._now(), victims))
            self._quota_status.decided(state.jobs[uid].queue.name)
        for kind in ("bind", "evict", "move", "resize"):
            if decided := len(getattr(plan, kind)):
                self.metrics.decisions.labels(kind).inc(decided)

    def _look_at_quotas(self) -> None:
        self._quotas_timer = None
        for name in self.snapshot.quotas:
            self._quota_status.changed(name)
            exceeded = self.snapshot.exceeds_limit(name)
            self._limits.note(name, exceeded=exceeded, now=self._loop.time())
        if self._limits.pending:
            self._quotas_timer = self._loop.call_later(QUOTAS_LOOKED_AT_S, self._look_at_quotas)

    def _stop_timers(self) -> None:
        self._recovery.close()
        self._waiting.close()
        self._forecast.close()
        self.evictions.close()
        self.elastic.close()
        self.managed_jobs.close()
        self._quota_status.close()
        self._move_budget.close()
        self.plans.close()
        if self._quotas_timer:
            self._quotas_timer.cancel()
