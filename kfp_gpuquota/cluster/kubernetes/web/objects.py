"""The cluster's objects, as watches report them, and what the pages show of them.

Only pods that belong to a job or hold GPUs are kept. Views are converted when they are read, and only those whose
objects have changed since.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from msgspec.structs import replace

from kfp_gpuquota.api.history import Report
from kfp_gpuquota.api.lending import with_lent
from kfp_gpuquota.cluster.kubernetes.client.reflector import Object, Reflector, version_of
from kfp_gpuquota.cluster.kubernetes.convert.known_gpus import divided_of
from kfp_gpuquota.cluster.kubernetes.convert.published_devices import Allocations, PublishedDevices
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import gpus_of
from kfp_gpuquota.cluster.kubernetes.elasticjob.status.size_history import progress_of
from kfp_gpuquota.cluster.kubernetes.elasticjob.workflows import EXECUTOR, pipeline_of, place_of, without_attempts
from kfp_gpuquota.cluster.kubernetes.objects import device_types, labels, paths
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Node, Pod
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob, GpuQuota, GpuResource, QuotaPolicyObject
from kfp_gpuquota.cluster.kubernetes.objects.device_types import DeviceClass, ResourceClaim, ResourceSlice
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import gpu_use_rules
from kfp_gpuquota.cluster.kubernetes.sharing import gpu_ledger
from kfp_gpuquota.cluster.kubernetes.user_client import views
from kfp_gpuquota.cluster.kubernetes.web.rights import Bindings, RoleBinding
from kfp_gpuquota.cluster.kubernetes.web.usage_history import UsageHistory
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.web.source import RunStep

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.wire import NodeView, ProjectView
    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
    from kfp_gpuquota.cluster.kubernetes.convert.published_devices import Pool, Shown
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import GpuUseRules

MAX_REPORTS: Final = 400
RUN_LABEL: Final = "pipeline/runid"
WORKFLOW_LABEL: Final = "workflows.argoproj.io/workflow"
NODE_ANNOTATION: Final = "workflows.argoproj.io/node-name"
_DRIVER: Final = "-driver"
LONGEST_NODE_NAME: Final = 2000
"""The creator of a pod writes its annotations, of up to 256 KiB."""
O = TypeVar("O", bound=Object)  # noqa: E741 - an object, as the API calls it

log = logging.getLogger(__name__)


class Watch(Protocol):
    """The watch of one kind; `synced` is set when all objects were listed."""

    synced: asyncio.Event

    async def run(self) -> None:
        """List and watch until cancelled."""


class Objects:
    """All objects that the pages show, regardless of permissions."""

    def __init__(self) -> None:
        self._jobs: dict[str, ElasticJob] = {}
        self._uids: dict[tuple[str, str], str] = {}
        self._pods: dict[str, Pod] = {}
        self._pods_of: dict[tuple[str, str], dict[str, Pod]] = {}
        self._steps: dict[str, RunStep] = {}
        self._run_steps: tuple[RunStep, ...] | None = None
        self._nodes: dict[str, Node] = {}
        self._quotas: dict[str, GpuQuota] = {}
        self._reports: dict[str, list[Report]] = {}
        self._views: dict[str, Job] = {}
        self._listed: tuple[int, tuple[Job, ...]] = (-1, ())
        self._projects: tuple[tuple[float, ...], tuple[ProjectView, ...]] = ((), ())
        self._pods_on: dict[str, dict[str, Pod]] = {}
        self._view_of: dict[str, NodeView] = {}  # of each node by its name, until it or a pod on it changes
        self._node_views: tuple[int, tuple[NodeView, ...]] = (-1, ())
        self._table: tuple[GpuResource, ...] = ()  # resources that count as GPUs
        self.gpu_use: GpuUseRules | None = None
        self.devices = PublishedDevices(lambda node: self._node_changed(node.metadata.name), lambda *_: None)
        self._allocations = Allocations(with_namespace=True)
        self._versions = {"nodes": 0, "quotas": 0}
        self._changed = asyncio.Event()
        self.idle_since: dict[tuple[str, int], float] = {}  # when the last pod left a device of a node
        self.bindings = Bindings()
        self.usage = UsageHistory()
        self.revision = _now_ms()

    def watches(self, connection: Connection) -> tuple[Watch, ...]:
        """Return the watches of all kinds."""

        def of(
            path: str, kind: type[O], put: Callable[[O], None], drop: Callable[[str], None], *, optional: bool = False
        ) -> Reflector[O]:
            return Reflector(connection, path, kind, changed=put, deleted=drop, optional=optional)

        bindings, devices = self.bindings, self.devices
        return (
            of(paths.JOBS, ElasticJob, self.put_job, self.drop_job),
            of(paths.QUOTAS, GpuQuota, self.put_quota, self.drop_quota),
            of("/api/v1/nodes", Node, self.put_node, self.drop_node),
            of(paths.QUOTA_POLICIES, QuotaPolicyObject, self.put_policy, self.drop_policy),
            of("/api/v1/pods", Pod, self.put_pod, self.drop_pod),
            of("/apis/rbac.authorization.k8s.io/v1/rolebindings", RoleBinding, bindings.put, bindings.drop),
            # an older API server does not have these, and an older role may not read them
            of(device_types.CLASSES, DeviceClass, devices.put_class, devices.drop_class, optional=True),
            of(device_types.SLICES, ResourceSlice, devices.put_slice, devices.drop_slice, optional=True),
            of(device_types.CLAIMS, ResourceClaim, self.put_claim, self.drop_claim, optional=True),
        )

    async def changed(self, after: int, timeout_s: float) -> None:
        """Return once the revision is not `after` any more, or the time is over."""
        if after == self.revision:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)

    # What the pages show

    def jobs(self) -> tuple[Job, ...]:
        """Return all jobs but invalid ones, oldest first; one that did not change is the same object as before."""
        if self._listed[0] != self.revision:
            found = (self._view(uid) for uid in self._jobs)
            ordered = sorted(
                (job for job in found if job is not None), key=lambda job: (job.status.submitted_at, job.uid)
            )
            self._listed = self.revision, tuple(ordered)
        return self._listed[1]

    def job(self, namespace: str, name: str) -> Job | None:
        """Return one job; None if it does not exist or is invalid."""
        uid = self._uids.get((namespace, name))
        return None if uid is None else self._view(uid)

    def stored(self, uid: str) -> ElasticJob | None:
        """Return a job's object."""
        return self._jobs.get(uid)

    def quota(self, project: str) -> GpuQuota | None:
        """Return a project's quota, as it was last seen."""
        return next((quota for quota in self._quotas.values() if quota.metadata.name == project), None)

    async def shown(self, uid: str, timeout_s: float) -> None:
        """Return once the watch has reported a job, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while uid not in self._jobs:
                    await self.changed(self.revision, timeout_s)

    def pod(self, namespace: str, job: str, name: str) -> Pod | None:
        """Return a pod of a job."""
        pods = self._pods_of.get((namespace, job), {}).values()
        return next((pod for pod in pods if pod.metadata.name == name), None)

    def run_steps(self) -> tuple[RunStep, ...]:
        """Return the steps of runs as their pods show them; of several attempts the last one."""
        if self._run_steps is None:
            ordered = sorted(self._steps.values(), key=lambda step: (step.submitted_at, step.attempt))
            self._run_steps = tuple({(step.project, step.run, step.task): step for step in ordered}.values())
        return self._run_steps

    def projects(self) -> tuple[ProjectView, ...]:
        """Return all quotas by name, without invalid ones."""
        gpus = sum(view.gpus for view in self.nodes())
        if self._projects[0] != (self._versions["quotas"], gpus):
            found = []
            for quota in self._quotas.values():
                with suppress(InvalidFieldError):
                    found.append(views.project_view(quota))
            found.sort(key=lambda view: view.project.name)
            self._projects = (self._versions["quotas"], gpus), with_lent(found, gpus)
        return self._projects[1]

    def nodes(self) -> tuple[NodeView, ...]:
        """Return the nodes with GPUs by name, with the pods that hold these as "namespace/name".

        One that did not change is the same object as before.
        """
        if self._node_views[0] != self._versions["nodes"]:
            views_now = map(self._view_of_node, self._nodes.values())
            shown = sorted((view for view in views_now if view.has_gpus), key=lambda view: view.node.name)
            self._node_views = self._versions["nodes"], tuple(shown)
        return self._node_views[1]

    def reports_of(self, uid: str) -> tuple[Report, ...]:
        """Return what a training has reported since this process runs, oldest first."""
        return tuple(self._reports.get(uid, ()))

    def namespaces(self) -> set[str]:
        """Return the namespaces with a quota or a job; departments, which have none, may be among them."""
        return {quota.metadata.name for quota in self._quotas.values()} | {namespace for namespace, _ in self._uids}

    # What the watches report

    def put_job(self, job: ElasticJob) -> None:
        """Take a new or changed job."""
        uid = job.metadata.uid
        before = self._jobs.get(uid)
        self._jobs[uid] = job
        self._uids[_key(job)] = uid
        self._views.pop(uid, None)
        if job.status.progress is not None and (before is None or before.status.progress != job.status.progress):
            self._report(uid, job)
        self._changes()

    def note_job(self, job: ElasticJob) -> None:
        """Take a job that a write has returned, unless the watch has reported its deletion or something newer."""
        before = self._jobs.get(job.metadata.uid)
        if before is not None and version_of(before.metadata) < version_of(job.metadata):
            self.put_job(job)

    def drop_job(self, uid: str) -> None:
        """Forget a deleted job."""
        if (job := self._jobs.pop(uid, None)) is None:
            return
        self._views.pop(uid, None)
        self._reports.pop(uid, None)
        if self._uids.get(_key(job)) == uid:
            del self._uids[_key(job)]
        self._changes()

    def put_pod(self, pod: Pod) -> None:
        """Take a new or changed pod."""
        uid = pod.metadata.uid
        if (step := step_of(pod)) is not None and self._steps.get(uid) != step:
            self._steps[uid], self._run_steps = step, None
            self._changes()
        if (before := self._pods.get(uid)) is not None and views.holds_devices(before) and not views.holds_devices(pod):
            self._left(before)
        if not (labels.JOB in pod.metadata.labels or labels.RESERVES in pod.metadata.labels or _holds_gpus(pod)):
            if uid in self._pods:
                self.drop_pod(uid)
            return
        if before is not None:
            self._leaves_node(before)
        self._pods[uid] = pod
        self._pods_of.setdefault(_job_of(pod), {})[uid] = pod
        self._pods_on.setdefault(_node_of(pod), {})[uid] = pod
        self._pod_changed(pod)

    def drop_pod(self, uid: str) -> None:
        """Forget a deleted pod."""
        if self._steps.pop(uid, None) is not None:
            self._run_steps = None
            self._changes()
        if (pod := self._pods.pop(uid, None)) is not None:
            if views.holds_devices(pod):
                self._left(pod)
            others = self._pods_of[_job_of(pod)]
            others.pop(uid, None)
            if not others:
                del self._pods_of[_job_of(pod)]
            self._leaves_node(pod)
            self._pod_changed(pod)

    def put_node(self, node: Node) -> None:
        """Take a new or changed node; its heartbeats change nothing that is shown."""
        before = self._nodes.get(node.metadata.uid)
        self._nodes[node.metadata.uid] = node
        self.devices.apply(node)
        if before is None or _shown(before) != _shown(node):
            self._node_changed(node.metadata.name)

    def drop_node(self, uid: str) -> None:
        """Forget a node."""
        self.devices.drop_node(uid)
        if (node := self._nodes.pop(uid, None)) is not None:
            self._view_of.pop(node.metadata.name, None)
            self.idle_since = {
                place: since for place, since in self.idle_since.items() if place[0] != node.metadata.name
            }
        self._changes("nodes")

    def put_policy(self, policy: QuotaPolicyObject) -> None:
        """Take the resources that count as GPUs, and where their use is read."""
        self._set_table(policy.spec.gpu_resources or ())
        self.gpu_use = None
        with suppress(InvalidFieldError):
            self.gpu_use = gpu_use_rules(policy.spec.gpu_use)

    def drop_policy(self, _uid: str) -> None:
        """Forget the rules of a deleted policy."""
        self._set_table(())
        self.gpu_use = None

    def put_claim(self, claim: ResourceClaim) -> None:
        """Take a new or changed claim for devices."""
        self._allocated(self._allocations.put(claim))

    def drop_claim(self, uid: str) -> None:
        """Forget a deleted claim."""
        self._allocated(self._allocations.drop(uid))

    def put_quota(self, quota: GpuQuota) -> None:
        """Take a new or changed quota."""
        self._quotas[quota.metadata.uid] = quota
        with suppress(InvalidFieldError):
            self.usage.note(views.project_view(quota), time.time())
        self._changes("quotas")

    def drop_quota(self, uid: str) -> None:
        """Forget a deleted quota."""
        if (quota := self._quotas.pop(uid, None)) is not None:
            self.usage.forget(quota.metadata.name)
        self._changes("quotas")

    # Inside

    def _view(self, uid: str) -> Job | None:
        if uid not in self._views:
            job = self._jobs[uid]
            try:
                self._views[uid] = views.job_of(job, list(self._pods_of.get(_key(job), {}).values()))
            except InvalidFieldError as error:
                log.info("%s/%s is not shown: %s", *_key(job), error.message)
                return None
        return self._views[uid]

    def _view_of_node(self, node: Node) -> NodeView:
        name = node.metadata.name
        if name not in self._view_of:
            published = self.devices.shown_on(name, self._allocations)
            self._view_of[name] = _node_view(node, list(self._pods_on.get(name, {}).values()), self._table, published)
        return self._view_of[name]

    def _set_table(self, table: tuple[GpuResource, ...]) -> None:
        self._table = table
        self.devices.set_counted([row.name for row in table], dict(divided_of(table)))
        self._view_of.clear()
        self._changes("nodes")

    def _allocated(self, pools: Collection[Pool]) -> None:
        for name in self.devices.nodes_with(pools):
            self._node_changed(name)

    def _node_changed(self, name: str) -> None:
        self._view_of.pop(name, None)
        self._changes("nodes")

    def _report(self, uid: str, job: ElasticJob) -> None:
        """Note a report of the training; of too many every second one is kept."""
        progress, found = progress_of(job.status.progress), self._reports.setdefault(uid, [])
        if progress is not None:
            found.append(
                Report(
                    time.time(),
                    progress.step,
                    progress.metrics,
                    not_finite=progress.not_finite,
                    noise_scale=progress.noise_scale,
                )
            )
        if len(found) > MAX_REPORTS:
            del found[1::2]

    def _left(self, pod: Pod) -> None:
        """Note that the pod's devices are idle from now on, where no other pod holds them."""
        for device in views.devices_of(pod):
            self.idle_since[_node_of(pod), device] = time.time()

    def _leaves_node(self, pod: Pod) -> None:
        """Take a pod, as it was, from its node."""
        name = _node_of(pod)
        here = self._pods_on[name]
        del here[pod.metadata.uid]
        if not here:
            del self._pods_on[name]
        self._view_of.pop(name, None)

    def _pod_changed(self, pod: Pod) -> None:
        self._view_of.pop(_node_of(pod), None)
        if (uid := self._uids.get(_job_of(pod))) is not None:
            self._views.pop(uid, None)
        self._changes("nodes")

    def _changes(self, kind: str = "") -> None:
        """Count a change. The revision is a time, so that it also grows over restarts of this process."""
        self.revision = max(self.revision + 1, _now_ms())
        if kind:
            self._versions[kind] = self.revision
        event, self._changed = self._changed, asyncio.Event()
        event.set()


def step_of(pod: Pod) -> RunStep | None:
    """Return the step of a run that KFP's executor pod is, or the pod of a driver that has failed; None of others."""
    annotations, found = pod.metadata.annotations or {}, pod.metadata.labels
    run, node = found.get(RUN_LABEL, ""), annotations.get(NODE_ANNOTATION, "")[:LONGEST_NODE_NAME]
    executor = without_attempts(node).endswith(EXECUTOR)
    failed = pod.status.phase == "Failed" and without_attempts(node).endswith(_DRIVER)
    if not run or not (executor or failed):
        return None
    path = place_of(node).removesuffix("" if executor else _DRIVER).split(".")[1:]
    ends = [one.state.terminated.finished_at for one in pod.status.container_statuses if one.state.terminated]
    made, final = pod.metadata.creation_timestamp, pod.status.phase in {"Succeeded", "Failed"}
    return RunStep(
        run=run,
        project=pod.metadata.namespace,
        pipeline=pipeline_of(found.get(WORKFLOW_LABEL, "")),
        task=".".join(path[1:] if path[:1] == ["root"] else path),
        attempt=node,
        phase=pod.status.phase,
        submitted_at=0.0 if made is None else made.timestamp(),
        gpus=gpus_of(pod.spec),
        started_at=None if pod.status.start_time is None else pod.status.start_time.timestamp(),
        finished_at=max((end.timestamp() for end in ends if end is not None), default=None) if final else None,
    )


def _key(job: ElasticJob) -> tuple[str, str]:
    return job.metadata.namespace, job.metadata.name


def _job_of(pod: Pod) -> tuple[str, str]:
    return pod.metadata.namespace, pod.metadata.labels.get(labels.JOB, "")


def _node_of(pod: Pod) -> str:
    """Return the node whose GPUs the pod holds, also before it is bound."""
    return pod.spec.node_name or (pod.metadata.annotations or {}).get(labels.RESERVES_ON, "")


def _holds_gpus(pod: Pod) -> bool:
    """Return whether the pod holds devices, or requests extended resources, of which some count as GPUs."""
    extended = any("/" in name for one in pod.spec.containers for name in one.resources.limits)
    return extended or gpus_of(pod.spec) > 0 or labels.DEVICES in (pod.metadata.annotations or {})


def _shown(node: Node) -> object:
    conditions = {(one.type, one.status) for one in node.status.conditions}
    return node.spec, node.metadata.labels, node.status.allocatable, conditions


def _node_view(node: Node, pods: list[Pod], table: Sequence[GpuResource], published: Mapping[str, Shown]) -> NodeView:
    """Return the view, in which holders are named "namespace/name"."""
    named = [_with_full_name(pod) for pod in pods]
    return views.node_view(node, named, gpu_ledger.views_of(node.metadata.name, pods), table, published)


def _with_full_name(pod: Pod) -> Pod:
    return replace(pod, metadata=replace(pod.metadata, name=f"{pod.metadata.namespace}/{pod.metadata.name}"))


def _now_ms() -> int:
    return int(time.time() * 1000)
