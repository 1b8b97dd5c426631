"""Cache of the cluster: converts changes of objects to the scheduler's events.

The cache is rebuilt from the API alone. Before `start` it only collects objects; then it emits all of them in a fixed
order, so that the same objects result in the same state in whatever order they arrived. Later it emits each change.

`start` yields to the event loop every few milliseconds: with 100,000 pods it takes seconds, in which the Lease must be
renewed and pods must be reviewed. A change in the meantime is emitted at once if its object was emitted before, else
with its object; no pod before all possible owners. Rejected: a thread, since nothing here is locked.

A decision is assumed to be done when it is made (`assume_...`), so that the next plan includes it; the watch confirms
it, or a failed write undoes it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from kfp_gpuquota import scheduler
from kfp_gpuquota.api import Project
from kfp_gpuquota.api.quantity import SHOWN_PLACES, as_number
from kfp_gpuquota.cluster.kubernetes.client.process.tasks import TimeSlices
from kfp_gpuquota.cluster.kubernetes.convert import nodes
from kfp_gpuquota.cluster.kubernetes.convert.autoscaled_pools import StandIns, fewest
from kfp_gpuquota.cluster.kubernetes.convert.non_gpu_pods import NonGpuPods
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import PodView, Stage
from kfp_gpuquota.cluster.kubernetes.convert.pods import pod_job
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import ResourceRequests
from kfp_gpuquota.cluster.kubernetes.convert.stand_in_names import pool_of
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.pods.plain_pods import PlainPods
from kfp_gpuquota.cluster.kubernetes.pods.unseen_pods import UnseenPods
from kfp_gpuquota.cluster.kubernetes.quota import quotas
from kfp_gpuquota.cluster.kubernetes.quota.borrowed import Borrowed
from kfp_gpuquota.cluster.kubernetes.quota.promises import stored_promises
from kfp_gpuquota.cluster.kubernetes.sharing.share_annotations import note_of
from kfp_gpuquota.errors import GpuQuotaError, InvalidFieldError
from kfp_gpuquota.scheduler.state.model import GPU

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.controller.cluster_objects import ClusterObjects
    from kfp_gpuquota.cluster.kubernetes.elasticjob.reconciler import ElasticJobs
    from kfp_gpuquota.cluster.kubernetes.kuberay.reconciler import RayUnits
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Node
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob, GpuQuota
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules
    from kfp_gpuquota.cluster.kubernetes.sharing.share_annotations import ShareNote

T = TypeVar("T")

log = logging.getLogger(__name__)


class ProjectUsage(NamedTuple):
    """A project's GPUs held (including terminating pods), borrowed and requested, and its number of waiting jobs.

    `unmet` are those that are requested within the guarantee and not held.
    """

    gpus: float = 0
    borrowed: float = 0
    requested: float = 0
    waiting: int = 0
    unmet: float = 0


def _shown(gpus: float) -> int | float:
    return as_number(round(gpus, SHOWN_PLACES))


class Snapshot:
    """Updates `cluster`, with the pods of other controllers (`plain`), the ElasticJobs (`elastic`)
    and the Ray clusters that change their size (`ray`)."""

    def __init__(self, cluster: ClusterObjects, rules: CurrentRules, elastic: ElasticJobs, ray: RayUnits) -> None:
        self.rules, self.elastic, self.ray = rules, elastic, ray
        self.state, self.allocator, self.emitted_nodes = cluster.state, cluster.allocator, cluster.emitted_nodes
        self.nodes, self.pods = cluster.nodes, cluster.pods
        self.quotas, self.projects = cluster.quotas, cluster.projects
        self.emit, self._apply, self._wake = cluster.emit, cluster.apply, cluster.wake
        self.plain = PlainPods(self.emit, self.allocator, rules)
        self.unseen = UnseenPods(rules, self._put_counted)
        self.borrowed = Borrowed(cluster.state, cluster.quotas, cluster.emit, cluster.now)
        self.refused_quotas: dict[str, str] = {}
        self._jobs: dict[str, ElasticJob] = {}  # until everything is listed
        self._node_names: dict[str, str] = {}
        self._quota_names: dict[str, str] = {}
        self._foreign: dict[str, PodView] = {}
        self._non_gpu_pods = NonGpuPods()
        self._planned_needs: dict[str, ResourceRequests] = {}  # of pods of the quota, by uid
        self._counting = rules.rules.sharing, rules.rules.gpu_weights
        self._outdated: dict[str, None] = {}  # nodes whose changes were not emitted yet
        self._overfull: list[str] = []  # nodes that were emitted without some of their free devices
        self._not_emitted: dict[str, PodView] = {}  # during `start`: listed or seen since, and not emitted yet
        self._owners_emitted = False
        self.stand_ins = StandIns((), self.emit, self.allocator, self.emitted_nodes)
        self._pool_nodes: dict[str, set[str]] = {}  # of autoscaled pools, by pool
        self.started = self.complete = False

    async def start(self, join: Callable[[PodView], PodView | None] = lambda pod: pod) -> None:
        """Emit all listed objects to the scheduler in a fixed order. `join` assigns pods to their owners' groups."""
        slices = TimeSlices()
        self._not_emitted = dict(self.pods)
        self.pods.clear()  # others hold this dict: it stays the same one
        self.started = True
        self.stand_ins = StandIns(self.rules.rules.pools, self.emit, self.allocator, self.emitted_nodes)
        for name in sorted(self.nodes):
            self._safely(self._emit_node, name)
            await slices.yield_if_due()
        stand_in = [pod.stand_in for pod in self._not_emitted.values() if pod.stand_in]
        for pool in self.stand_ins.pools:
            self.stand_ins.adjust(pool, fewest(stand_in, pool))
        for name in sorted(self.quotas):
            self._safely(self._emit_quota, name)
        for uid in sorted(self._jobs):
            if (job := self._jobs.pop(uid, None)) is not None:
                self._safely(self.put_job, job)
            await slices.yield_if_due()
        self.ray.start(self.put_pod)
        self._owners_emitted = True
        for uid in [pod.uid for pod in sorted(self._not_emitted.values(), key=self._start_order)]:
            if (pod := self._not_emitted.pop(uid, None)) is not None and (joined := join(pod)) is not None:
                self._safely(self.put_pod, joined)
            await slices.yield_if_due()
        for _ in self.plain.settling():
            await slices.yield_if_due()
        self.elastic.start()
        self._restore_promises()
        self.borrowed.recall()
        self.complete = True
        self._wake()

    def _restore_promises(self) -> None:
        """Emit what an earlier controller promised to jobs that still exist."""
        for name in sorted(self.quotas):
            for promise in stored_promises(self.quotas[name], self.state):
                if promise.job in self.elastic.book.jobs:
                    self.elastic.book.promise(promise)
                else:
                    self.emit(promise)

    @staticmethod
    def _safely(emit: Callable[[T], None], what: T) -> None:
        """Emit an object; its exception must not prevent the others from being emitted."""
        try:
            emit(what)
        except Exception:
            log.exception("%r could not be emitted to the scheduler", what)

    def _start_order(self, pod: PodView) -> tuple[object, ...]:
        """Return a sort key: workers processed before, then completed pods, then pods with annotated devices."""
        accounted = self.elastic.accounted(pod)
        return not accounted, pod.exit_code != 0, pod.devices is None, pod.created, pod.uid

    def share_of(self, holder: str) -> ShareNote | None:
        """Return the share that a holder of parts of GPUs has requested, if any."""
        if (member := self.plain.members.get(holder)) is not None:
            pod = member.view
            return note_of(pod_job(pod), holder, f"{pod.namespace}/{pod.name}", pod.created)
        return self.elastic.workers.share_of(holder)

    # Nodes

    def put_node(self, node: Node) -> None:
        """Add or update a node. Most updates are heartbeats, which change nothing."""
        before, self.nodes[node.metadata.name] = self.nodes.get(node.metadata.name), node
        self._node_names[node.metadata.uid] = node.metadata.name
        if self.started and (before is None or not nodes.same_node(before, node)):
            self._emit_node(node.metadata.name)

    def drop_node(self, uid: str) -> None:
        """Remove a deleted node; pods on it hold their devices until they are deleted, too."""
        name = self._node_names.pop(uid, None)
        if name is None or (name in self.nodes and self.nodes[name].metadata.uid != uid):
            return
        self.nodes.pop(name, None)
        self.emitted_nodes.pop(name, None)
        self.allocator.resize(name, 0)
        if self.started:
            self.emit(scheduler.NodeRemoved(name))

    def rules_changed(self) -> None:
        """Emit all nodes again if devices are shared by other rules, or other resources count as GPUs.

        Begin to count what is borrowed, if that is new.
        """
        if self.complete:
            self.borrowed.recall()
        if self._counting != (counting := (self.rules.rules.sharing, self.rules.rules.gpu_weights)):
            self._counting = counting
            self._outdated.update(dict.fromkeys(self.emitted_nodes))

    def _emit_node(self, name: str) -> None:
        node = self.nodes.get(name)
        if node is None:
            return
        self.allocator.resize(name, nodes.gpu_count(node))
        self._outdated.pop(name, None)
        pool = node.metadata.labels.get(labels.POOL, "")
        if pool in self.stand_ins.pools:
            self._pool_nodes.setdefault(pool, set()).add(name)
            if self.emitted_nodes.pop(name, None) is not None:
                self.emit(scheduler.NodeRemoved(name))
            self._wake()
            return
        try:
            seen = nodes.node_of(node, self.allocator.unplanned(name), self._non_gpu_pods.on(name), *self._counting)
        except InvalidFieldError as error:
            log.error("node %s is ignored: %s", name, error)
            return
        if self.emitted_nodes.get(name) != seen:
            self.emitted_nodes[name] = seen
            self.emit(scheduler.NodeChanged(seen))

    def catch_up(self) -> None:
        """Emit pending changes of nodes and autoscaled pools; called once before each plan."""
        overfull = [name for name in self.allocator.overfull if name in self.emitted_nodes]
        for name in dict.fromkeys((*self._outdated, *self._overfull, *overfull)):
            self._emit_node(name)
        self._overfull = overfull
        for name, pool in self.stand_ins.pools.items():
            self.stand_ins.adjust(name, pool.stand_ins(self._real_gpus(name), self._guaranteed_demand(name)))

    def _real_gpus(self, pool: str) -> int:
        """Return the GPUs of an autoscaled pool's nodes, without those of pods outside the quota."""
        names = [name for name in self._pool_nodes.get(pool, ()) if name in self.nodes]
        return sum(
            nodes.gpu_count(self.nodes[name]) - len(self.allocator.foreign(name))
            for name in names
            if self.nodes[name].metadata.labels.get(labels.POOL) == pool
        )

    def _guaranteed_demand(self, pool: str) -> float:
        """Return the GPUs that teams request in the pool, each up to its guarantee there."""
        queues = (q for q in self.state.ledger.queues.values() if q.pool == pool and not q.children)
        return sum(min(queue.deserved[0], queue.requested[0]) for queue in queues) / GPU

    def _note_less(self, node: str | None) -> None:
        """Record that a node has fewer resources left, to be emitted before the next plan."""
        if (
            node is not None
            and self.started
            and node in self.nodes
            and nodes.has_gpus(self.nodes[node], self._counting[1])
        ):
            self._outdated[node] = None

    def _note_more(self, node: str | None) -> None:
        """Record that a node has more resources left, and plan if jobs wait."""
        self._note_less(node)
        if self._outdated and self.state.ledger.has_waiting:
            self._wake()

    # Quotas

    def put_quota(self, quota: GpuQuota) -> None:
        """Add or update a quota; an invalid one leaves the last valid one in effect."""
        self.quotas[quota.metadata.name] = quota
        self._quota_names[quota.metadata.uid] = quota.metadata.name
        if self.started:
            self._emit_quota(quota.metadata.name)

    def drop_quota(self, uid: str) -> None:
        """Remove a deleted quota."""
        name = self._quota_names.pop(uid, None)
        if name is None or (name in self.quotas and self.quotas[name].metadata.uid != uid):
            return
        self.quotas.pop(name, None)
        self.refused_quotas.pop(name, None)
        if self.projects.pop(name, None) is not None:
            self.emit(scheduler.QuotaRemoved(name))

    def _emit_quota(self, name: str) -> None:
        try:
            project = quotas.project_of(self.quotas[name])
            changed = self.projects.get(name) != project
            if changed:
                self._apply(scheduler.QuotaChanged(project))
        except GpuQuotaError as error:
            if self.refused_quotas.get(name) != error.message:
                self._wake()  # its status is written with the next plan
            self.refused_quotas[name] = error.message
            return
        if self.refused_quotas.pop(name, None) is not None or changed:
            self._wake()
        newcomer = name not in self.projects
        self.projects[name] = project
        if newcomer:
            self._adopt_foreign(name)

    def held(self, name: str) -> ProjectUsage:
        """Return what a project holds and waits for in all node pools, without the projects below it."""
        held, requested, unmet, waiting = dict[str, float](), 0.0, 0.0, 0
        for queue in self.state.queues_of(name):
            below = queue.children.values()
            here = queue.held[0] + queue.leaving[0] - sum(child.held[0] + child.leaving[0] for child in below)
            wanted = queue.requested[0] - sum(child.requested[0] for child in below)
            held[queue.pool], requested = here / GPU, requested + wanted / GPU
            unmet += max(0.0, min(wanted, queue.deserved[0]) - here) / GPU
            filed = (*queue.waiting.items(), *queue.shelved.items())
            waiting += sum(len(jobs) for shape, jobs in filed if shape.starts)
        borrowed = self.projects.get(name, Project(name=name)).borrowed(held)
        gpus = sum(held.values())
        return ProjectUsage(_shown(gpus), _shown(borrowed), _shown(requested), waiting, _shown(unmet))

    def exceeds_limit(self, name: str) -> bool:
        """Return whether a project holds more than its limit without what is leaving."""
        return any(queue.held[r] > queue.limit[r] for queue in self.state.queues_of(name) for r in range(3))

    # ElasticJobs

    def put_job(self, job: ElasticJob) -> None:
        """Add or update an ElasticJob."""
        if not self.started or job.metadata.uid in self._jobs:
            self._jobs[job.metadata.uid] = job
        elif self.elastic.put_job(job):
            self._wake()

    def drop_job(self, uid: str) -> None:
        """Remove a deleted ElasticJob."""
        untold = self._jobs.pop(uid, None) is not None
        if self.started and not untold:
            self.elastic.drop_job(uid)
            self._wake()

    # Pods

    def put_pod(self, pod: PodView) -> None:
        """Add or update a pod."""
        if pod.uid in self._not_emitted or (self.started and not self._owners_emitted):
            self._not_emitted[pod.uid] = pod
            return
        if pod.stand_in and pool_of(pod.stand_in) in self.stand_ins.pools:
            pod = msgspec.structs.replace(pod, node=pod.stand_in)
        before = self.pods.get(pod.uid)
        if pod.stage is Stage.OUTSIDE and before is None:
            self._put_non_gpu_pod(pod)
            return
        self.pods[pod.uid] = pod
        if not self.started:
            return
        if self.elastic.owns(pod):
            self.elastic.put_pod(pod)
        elif pod.uid in self._foreign or (before is None and self._is_foreign(pod)):
            self._put_foreign(pod)
        else:
            self.elastic.stop_unowned(pod)
            self._put_counted(pod)
        if pod.stage is Stage.ENDED:
            self._forget(pod.uid)

    def drop_pod(self, uid: str) -> None:
        """Remove a deleted pod."""
        self._not_emitted.pop(uid, None)
        pod = self.pods.get(uid)
        if pod is None:
            self._note_more(self._non_gpu_pods.drop(uid))
            return
        if not self.started:
            del self.pods[uid]
            return
        if self.elastic.owns(pod):
            self.elastic.drop_pod(pod)
        elif uid in self._foreign:
            self._release_foreign(uid)
        elif uid not in self.plain.members and self.ray.pods.owns(pod):
            self.ray.pods.drop(uid)
        else:
            self.plain.drop(uid)
            self.unseen.drop(pod)
        self._forget(uid)

    def _put_counted(self, pod: PodView) -> None:
        """Add or update a pod of a team: as a worker of a Ray cluster's unit, or as a job of its own or of a group."""
        self._count_resize(pod)
        if pod.uid not in self.plain.members and self.ray.pods.owns(pod):
            self.ray.pods.put(pod)
        elif not self.unseen.holds_back(pod):
            self.plain.put(self.ray.pods.ungrouped(pod))
            if pod.stage is Stage.WAITING and pod.group:
                self._wake()  # also of an incomplete group, which the scheduler does not see: users see why it waits

    def _count_resize(self, pod: PodView) -> None:
        """Count on its node what the pod requests more than it was planned with, after it was resized in place."""
        planned = self._planned_needs.setdefault(pod.uid, pod.needs)
        if pod.stage is Stage.WAITING:
            self._planned_needs[pod.uid] = pod.needs
        elif pod.holds and pod.needs != planned:
            more = ResourceRequests(pod.needs.cpu - planned.cpu, pod.needs.memory - planned.memory)
            self._note_more(self._non_gpu_pods.put(_resized(pod.uid), pod.node, more, slots=0))

    def _forget(self, uid: str) -> None:
        self.pods.pop(uid, None)
        if self._planned_needs.pop(uid, None) is not None:
            self._note_more(self._non_gpu_pods.drop(_resized(uid)))

    def _put_non_gpu_pod(self, pod: PodView) -> None:
        if pod.node:
            self._note_less(self._non_gpu_pods.put(pod.uid, pod.node, pod.needs))
        else:
            self._note_more(self._non_gpu_pods.drop(pod.uid))

    def _is_foreign(self, pod: PodView) -> bool:
        """Return whether the pod holds GPUs outside of any project."""
        admitted = pod.devices is not None or bool(pod.reserved_on)
        ours = pod.gate is not None or admitted or pod.namespace in self.projects
        return not ours

    def _put_foreign(self, pod: PodView) -> None:
        """Count a foreign pod by its containers' requests: its annotations were not checked by the webhook."""
        self._foreign[pod.uid] = pod
        held = self.allocator.held(pod.uid)
        if pod.holds:
            if held is None and pod.requested:
                self.allocator.take(pod.uid, pod.node, pod.requested, None, foreign=True)
            if self._non_gpu_pods.put(pod.uid, pod.node, pod.needs) is not None:
                self._emit_node(pod.node)
        elif not pod.holds:
            self._release_foreign(pod.uid)

    def _release_foreign(self, uid: str) -> None:
        self._foreign.pop(uid, None)
        node, held = self._non_gpu_pods.drop(uid), self.allocator.release(uid)
        if changed := held[0] if held else node:
            self._emit_node(changed)

    def _adopt_foreign(self, project: str) -> None:
        """Count a team's existing pods against its new quota."""
        for pod in [pod for pod in self._foreign.values() if pod.namespace == project]:
            self._release_foreign(pod.uid)
            self._put_counted(pod)


def _resized(uid: str) -> str:
    return f"{uid}/resized"
