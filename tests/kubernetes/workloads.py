"""Random workloads of many kinds, which their users change: what a Kubeflow cluster runs beside each other.

Jobs, Deployments, StatefulSets are those of the real controllers; TrainJobs, JobSets, AppWrappers, TFJobs, Notebooks,
Workspaces and LeaderWorkerSets those of the doubles in `trainer.py`. Pods are written as users write them, without a
gate. Each workload is recorded as its user left it, so that it is known what runs at the end.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.unused_gpus.unused_workloads import STOPPED
from tests.kubernetes.controlled import holds, is_leaving, is_over, pod_body
from tests.kubernetes.trainer import path_of
from tools.devcluster.api import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools.devcluster.api import Api

Object = dict[str, Any]
RESTARTED = {"Deployment", "StatefulSet", "Notebook", "Workspace", "TFJob", "LeaderWorkerSet"}
CLAIMED = "gold"
OTHER_GPUS = "amd.com/gpu"
FEW = 0.7
OTHERS = 0.1
"""The part of the workloads that request GPUs of another vendor."""


@dataclass
class Workload:
    """One workload: its object, and the number of its pods; `suspend` is the path of that field, if it has one."""

    kind: str
    path: str
    pods: int
    suspend: tuple[str, ...] = ()
    suspended: bool = False
    scales: bool = False

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass
class Workloads:
    """The workloads of some teams; `steps` draws what happens to them."""

    api: Api
    teams: list[str]
    seed: int
    made: list[Workload] = field(default_factory=list)
    budgets: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random, self._number = random.Random(self.seed), 0
        self._creations: list[Callable[[str, str], Workload]] = [
            self._job,
            self._queue,
            self._train_job,
            self._app_wrapper,
            self._tf_job,
            self._leader_workers,
            self._claiming_job,
            self._deployment,
            self._stateful_set,
            self._notebook,
            self._workspace,
            self._elastic_job,
            self._cron_job,
            self._pod,
        ]
        self._operations: list[tuple[int, Callable[[], None]]] = [
            (20, self.create),
            (2, self.suspend),
            (3, self.resume),
            (4, self.delete),
            (1, self.orphan),
            (5, self.finish),
            (2, self.scale),
            (1, self.protect),
            (1, self.restart),
            (7, self.change_quota),
        ]

    def step(self) -> None:
        """Carry out one operation; what was deleted or changed meanwhile is no error."""
        weights, operations = zip(*self._operations, strict=True)
        (operation,) = self._random.choices(operations, weights)
        with contextlib.suppress(ApiError):
            operation()

    # What users do

    def create(self) -> None:
        """Create a workload of any kind."""
        team, self._number = self._random.choice(self.teams), self._number + 1
        make = self._random.choice(self._creations)
        if make in (self._notebook, self._workspace, self._pod) and self._random.random() < FEW:
            make = self._job  # what cannot be reclaimed would soon hold all GPUs
        one = make(team, f"{make.__name__.strip('_').replace('_', '-')}-{self._number}")
        self.made.append(one)
        self.done.append(f"create {one.path}")

    def suspend(self) -> None:
        """Suspend a workload, as its user: it is no longer the controller's to resume."""
        self._set(suspended=True)

    def resume(self) -> None:
        """Resume a workload."""
        self._set(suspended=False)

    def delete(self) -> None:
        """Delete a workload with its pods."""
        if one := self._some(lambda _: True):
            self.made.remove(one)
            self.done.append(f"delete {one.path}")
            self.api.delete(one.path, None, propagationPolicy="Background")

    def orphan(self) -> None:
        """Delete a workload without its pods; they are their user's to delete then."""
        if one := self._some(lambda one: one.kind in {"Job", "Deployment", "StatefulSet"}):
            self.made.remove(one)
            self.done.append(f"orphan {one.path}")
            self.api.delete(one.path, None, propagationPolicy="Orphan")

    def finish(self) -> None:
        """Let all pods of a Job succeed, if they run; its controller deletes it then."""
        if one := self._some(lambda one: one.kind == "Job" and not one.suspended):
            pods = list(self.pods_of(one))
            if len(pods) == one.pods and all(pod["status"].get("phase") == "Running" for pod in pods):
                self.made.remove(one)
                self.done.append(f"finish {one.path}")
                for pod in pods:
                    path = f"{self._pods(one)}/{pod['metadata']['name']}/status"
                    self.api.patch(path, {"status": {"phase": "Succeeded"}})

    def scale(self) -> None:
        """Change the number of pods of a workload that scales."""
        if one := self._some(lambda one: one.scales):
            one.pods = self._random.randint(0, 3)
            self.done.append(f"scale {one.path} to {one.pods}")
            self.api.patch(one.path, {"spec": {"replicas": one.pods}})

    def protect(self) -> None:
        """Forbid voluntary disruptions of all of a team's pods."""
        path = f"/apis/policy/v1/namespaces/{self._random.choice(self.teams)}/poddisruptionbudgets"
        self._number += 1
        spec = {"maxUnavailable": 0, "selector": {}}
        self.api.create(path, {"metadata": {"name": f"budget-{self._number}"}, "spec": spec})
        self.budgets.append(f"{path}/budget-{self._number}")

    def restart(self) -> None:
        """Delete a pod whose owner creates another one, as a user does to start it again."""
        if one := self._some(lambda one: one.kind in RESTARTED):
            for pod in list(self.pods_of(one))[:1]:
                self.done.append(f"delete pod {pod['metadata']['name']}")
                self.api.delete(f"{self._pods(one)}/{pod['metadata']['name']}", 1)

    def change_quota(self) -> None:
        """Change what is guaranteed to a team."""
        team, gpus = self._random.choice(self.teams), self._random.choice((0, 8))
        self.done.append(f"quota of {team}: {gpus}")
        self.api.patch(f"/apis/{labels.API_VERSION}/gpuquotas/{team}", {"spec": {"guaranteed": gpus}})

    # What must be

    def pods_of(self, one: Workload) -> Iterator[Object]:
        """Yield the pods of a workload, which have its name before theirs."""
        for pod in self.api.items(self._pods(one)):
            name = pod["metadata"]["name"]
            if (name == one.name or name.startswith(f"{one.name}-")) and not is_over(pod) and not is_leaving(pod):
                yield pod

    def settled(self) -> bool:
        """Return whether all pods wait at the gate, or are bound and run."""
        pods = (pod for team in self.teams for pod in self.api.items(f"/api/v1/namespaces/{team}/pods"))
        return all(pod["spec"].get("schedulingGates") or holds(pod) for pod in pods if not is_leaving(pod))

    def served(self) -> bool:
        """Return whether no team waits that holds less than its guarantee; it need not come true."""
        for team in self.teams:
            pods = self.api.items(f"/api/v1/namespaces/{team}/pods")
            held = sum(holds(pod) and not is_over(pod) for pod in pods)
            quota = self.api.get(f"/apis/{labels.API_VERSION}/gpuquotas/{team}")["spec"]
            if held < quota.get("guaranteed", 0) and any(pod["spec"].get("schedulingGates") for pod in pods):
                return False
        return True

    def wrong(self) -> list[str]:
        """Return which workloads are not as their users want them, once all of them fit."""
        return [f"{one.path}: {why}" for one in self.made if (why := self._wrong(one))]

    def _wrong(self, one: Workload) -> str:
        found, pods = self.api.get(one.path), list(self.pods_of(one))
        if labels.SUSPENDED in found["metadata"].get("labels", {}):
            return "the controller has suspended it"
        if one.suspend and bool(_field(found, one.suspend)) != one.suspended:
            return f"suspended: {not one.suspended}, and its user wants the opposite"
        wanted, bound = 0 if one.suspended else one.pods, sum(map(holds, pods))
        if (len(pods), bound) != (wanted, wanted) and not (one.kind == "ElasticJob" and wanted <= bound):
            return f"{bound} of {len(pods)} pods are bound, and {wanted} must be: {found.get('status')}"
        return ""

    # How each kind is written

    def _job(self, team: str, name: str) -> Workload:
        pods = self._random.randint(1, 3)
        path = self._create("jobs", team, {"metadata": {"name": name}, "spec": self._job_spec(pods)})
        return Workload("Job", path, pods, ("spec", "suspend"))

    def _queue(self, team: str, name: str) -> Workload:
        pods = self._random.randint(1, 3)
        spec = {**self._job_spec(pods), "completionMode": "NonIndexed", "backoffLimit": self._random.choice((0, 6, 99))}
        return Workload(
            "Job", self._create("jobs", team, {"metadata": {"name": name}, "spec": spec}), pods, ("spec", "suspend")
        )

    def _cron_job(self, team: str, name: str) -> Workload:
        """A Job as of `kubectl create job --from=cronjob/x`."""
        path = f"/apis/batch/v1/namespaces/{team}/cronjobs"
        template = {"spec": self._job_spec(1)}
        body = {"metadata": {"name": f"{name}-cron"}, "spec": {"schedule": "0 0 1 1 *", "jobTemplate": template}}
        made = self.api.create(path, body)
        owner = {"apiVersion": "batch/v1", "kind": "CronJob", "name": f"{name}-cron", "controller": True}
        meta = {"name": name, "ownerReferences": [{**owner, "uid": made["metadata"]["uid"]}]}
        path = self._create("jobs", team, {"metadata": meta, "spec": template["spec"]})
        return Workload("Job", path, 1, ("spec", "suspend"))

    def _train_job(self, team: str, name: str) -> Workload:
        body = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": name}}
        path = self._create("trainjobs", team, {**body, "spec": {"runtimeRef": {"name": "torch-distributed"}}})
        return Workload("TrainJob", path, 2, ("spec", "suspend"))

    def _app_wrapper(self, team: str, name: str) -> Workload:
        jobs = [{"metadata": {"name": f"{name}-{part}"}, "spec": self._job_spec(1)} for part in ("a", "b")]
        body = {"apiVersion": "workload.codeflare.dev/v1beta2", "kind": "AppWrapper", "metadata": {"name": name}}
        spec = {"components": [{"template": job} for job in jobs]}
        return Workload("AppWrapper", self._create("appwrappers", team, {**body, "spec": spec}), 2, ("spec", "suspend"))

    def _tf_job(self, team: str, name: str) -> Workload:
        template = {"spec": {**self._pod_spec(), "restartPolicy": "Never"}}
        replicas = {role: {"replicas": 1, "template": template} for role in ("Chief", "Worker")}
        body = {"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": {"name": name}}
        path = self._create("tfjobs", team, {**body, "spec": {"tfReplicaSpecs": replicas}})
        return Workload("TFJob", path, 2, ("spec", "runPolicy", "suspend"))

    def _leader_workers(self, team: str, name: str) -> Workload:
        group = {"size": 2, "workerTemplate": {"spec": self._pod_spec()}}
        body = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "metadata": {"name": name}}
        path = self._create("leaderworkersets", team, {**body, "spec": {"replicas": 1, "leaderWorkerTemplate": group}})
        return Workload("LeaderWorkerSet", path, 2)

    def _claiming_job(self, team: str, name: str) -> Workload:
        """A Job whose pods claim devices by a template."""
        claims = f"/apis/resource.k8s.io/v1/namespaces/{team}/resourceclaimtemplates"
        wanted = {"name": "r", "exactly": {"deviceClassName": CLAIMED, "count": 1}}
        self.api.create(claims, {"metadata": {"name": name}, "spec": {"spec": {"devices": {"requests": [wanted]}}}})
        spec = self._job_spec(2)
        pod = spec["template"]["spec"]
        pod["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": name}]
        pod["containers"][0]["resources"] = {"claims": [{"name": "gpus"}]}
        return Workload(
            "Job", self._create("jobs", team, {"metadata": {"name": name}, "spec": spec}), 2, ("spec", "suspend")
        )

    def _deployment(self, team: str, name: str) -> Workload:
        return self._scaled("Deployment", team, name, self._random.randint(1, 3))

    def _stateful_set(self, team: str, name: str) -> Workload:
        policy = self._random.choice(("OrderedReady", "Parallel"))
        more = {"serviceName": name, "podManagementPolicy": policy}
        return self._scaled("StatefulSet", team, name, self._random.randint(1, 3), more)

    def _notebook(self, team: str, name: str) -> Workload:
        body = {"apiVersion": "kubeflow.org/v1", "kind": "Notebook", "metadata": {"name": name}}
        path = self._create("notebooks", team, {**body, "spec": {"template": {"spec": self._pod_spec()}}})
        return Workload("Notebook", path, 1, ("metadata", "annotations", STOPPED))

    def _workspace(self, team: str, name: str) -> Workload:
        body = {"apiVersion": "kubeflow.org/v1beta1", "kind": "Workspace", "metadata": {"name": name}}
        path = self._create("workspaces", team, {**body, "spec": {"template": {"spec": self._pod_spec()}}})
        return Workload("Workspace", path, 1, ("spec", "paused"))

    def _scaled(self, kind: str, team: str, name: str, pods: int, more: Object | None = None) -> Workload:
        template = {"metadata": {"labels": {"app": name}}, "spec": self._pod_spec()}
        spec = {"replicas": pods, "selector": {"matchLabels": {"app": name}}, "template": template, **(more or {})}
        plural = "deployments" if kind == "Deployment" else "statefulsets"
        path = f"/apis/apps/v1/namespaces/{team}/{plural}"
        self.api.create(path, {"metadata": {"name": name}, "spec": spec})
        return Workload(kind, f"{path}/{name}", pods, scales=True)

    def _elastic_job(self, team: str, name: str) -> Workload:
        path, gpus = f"/apis/{labels.API_VERSION}/namespaces/{team}/elasticjobs", self._random.randint(1, 2)
        template = {"spec": {"containers": [{"name": "main", "image": "none"}]}}
        body = {"apiVersion": labels.API_VERSION, "kind": "ElasticJob", "metadata": {"name": name}}
        sizes = {"gpus": gpus, "minGpus": 1, "maxGpus": gpus + 1, "gpusPerWorker": 1}
        self.api.create(path, {**body, "spec": {**sizes, "template": template}})
        return Workload("ElasticJob", f"{path}/{name}", gpus, ("spec", "suspend"))

    def _pod(self, team: str, name: str) -> Workload:
        """A pod with init containers, which is not preemptible: without an owner its loss would be final."""
        path = f"/api/v1/namespaces/{team}/pods"
        body = pod_body(name, 1, gated=False, labels_={f"{labels.GROUP}/preemptible": "false"})
        extra = {"name": "side", "image": "none", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}}
        first = {"name": "first", "image": "none", "resources": {"limits": {labels.GPU_RESOURCE: "1"}}}
        body["spec"]["initContainers"] = self._random.choice(([], [extra], [first], [extra, first]))
        self.api.create(path, body)
        return Workload("Pod", f"{path}/{name}", 1)

    def _job_spec(self, pods: int) -> Object:
        template = {"spec": {**self._pod_spec(), "restartPolicy": "Never"}}
        mode = {"completionMode": "Indexed", "backoffLimit": 0, "ttlSecondsAfterFinished": 1}
        return {"parallelism": pods, "completions": pods, **mode, "template": template}

    def _pod_spec(self) -> Object:
        spec: Object = pod_body("x", self._random.choice((1, 1, 2)), gated=False)["spec"]
        if self._random.random() < OTHERS:
            spec["containers"][0]["resources"] = {"limits": {OTHER_GPUS: "1"}}
        return spec

    # What they choose from

    def _create(self, plural: str, team: str, body: Object) -> str:
        self.api.create(path_of(plural, team), body)
        return path_of(plural, team, body["metadata"]["name"])

    def _some(self, fits: Callable[[Workload], bool]) -> Workload | None:
        found = [one for one in self.made if fits(one)]
        return self._random.choice(found) if found else None

    def _set(self, *, suspended: bool) -> None:
        if one := self._some(lambda one: bool(one.suspend) and one.suspended is not suspended):
            change: Any = suspended
            if STOPPED in one.suspend:
                change = "2026-01-01T00:00:00Z" if suspended else None
            for name in reversed(one.suspend):
                change = {name: change}
            change.setdefault("metadata", {"labels": {labels.SUSPENDED: None}})
            self.done.append(f"{'suspend' if suspended else 'resume'} {one.path}")
            self.api.patch(one.path, change)
            one.suspended = suspended

    def _pods(self, one: Workload) -> str:
        return f"/api/v1/namespaces/{one.path.split('/namespaces/')[1].split('/')[0]}/pods"


def _field(body: Object, path: tuple[str, ...]) -> object:
    found: Any = body
    for name in path:
        found = (found or {}).get(name)
    return found
