"""Doubles of Kubeflow Trainer and of JobSet: a TrainJob has a JobSet, and that a Job, which pass `suspend` on.

And a double of AppWrapper's controller, which deletes what it wraps while it is suspended, of the training operator for
TFJobs, of LeaderWorkerSet's controller, which creates all pods of a replica again if it has lost one, and of those of
Kubeflow's notebooks, whose StatefulSets have no pod while they are stopped. The kinds are minimal schemas of our own,
from the API documentation of Trainer v2 (trainer.kubeflow.org/v1alpha1), JobSet (jobset.x-k8s.io/v1alpha2), AppWrapper
(workload.codeflare.dev/v1beta2), the training operator and notebooks (kubeflow.org/v1, v2: v1beta1) and LeaderWorkerSet
(leaderworkerset.x-k8s.io/v1). Jobs and StatefulSets are those of the real controllers.
As of the real kinds, the condition Suspended of TrainJob and JobSet follows from the spec alone; here always before
`suspend` is passed on, which is the worst order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kfp_gpuquota.cluster.kubernetes.convert.owners import JOBSET_LABEL, LEADER_WORKER_LABEL, REPLICA_LABEL
from kfp_gpuquota.cluster.kubernetes.objects.labels import NOTEBOOK
from kfp_gpuquota.cluster.kubernetes.unused_gpus.unused_workloads import STOPPED
from tests.kubernetes.kuberay import Repeating

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.devcluster.api import Api

Object = dict[str, Any]
WORKSPACE = "notebooks.kubeflow.org/workspace-name"
_VERSIONS = {
    "trainjobs": "trainer.kubeflow.org/v1alpha1",
    "jobsets": "jobset.x-k8s.io/v1alpha2",
    "jobs": "batch/v1",
    "appwrappers": "workload.codeflare.dev/v1beta2",
    "tfjobs": "kubeflow.org/v1",
    "leaderworkersets": "leaderworkerset.x-k8s.io/v1",
    "notebooks": "kubeflow.org/v1",
    "workspaces": "kubeflow.org/v1beta1",
}
_KINDS = {
    "trainjobs": "TrainJob",
    "jobsets": "JobSet",
    "appwrappers": "AppWrapper",
    "tfjobs": "TFJob",
    "leaderworkersets": "LeaderWorkerSet",
    "notebooks": "Notebook",
    "workspaces": "Workspace",
}


def path_of(plural: str, team: str, name: str = "") -> str:
    """Return the path of an object, or of all of the team."""
    path = f"/apis/{_VERSIONS[plural]}/namespaces/{team}/{plural}"
    return f"{path}/{name}" if name else path


def install_kinds(api: Api) -> None:
    """Install these kinds, as far as they are looked at."""
    for plural, kind in _KINDS.items():
        install_kind(api, _VERSIONS[plural], kind)
        api.until_served(path_of(plural, "default"))


def install_kind(api: Api, api_version: str, kind: str, *, scope: str = "Namespaced") -> str:
    """Install a kind that takes any fields; return the path of its definition."""
    (group, _, version), plural = api_version.partition("/"), f"{kind.lower()}{'es' if kind.endswith('s') else 's'}"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": scope,
            "names": {"kind": kind, "plural": plural},
            "versions": [served],
        },
    }
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{plural}.{group}"
    api.apply(path, definition)
    return path


class Trainer(Repeating):
    """Both controllers. `job` is the spec of each TrainJob's only Job; `changed` are the changes of suspend it saw."""

    def __init__(self, api: Api, team: str, job: Object) -> None:
        self._job = {**job, "template": {**job["template"], "metadata": {"labels": {}}}}
        self.changed: list[str] = []
        super().__init__(api, team)

    def _reconcile(self) -> None:
        for train_job in self._api.items(path_of("trainjobs", self._team)):
            job_set = self._pass_on("trainjobs", train_job, "jobsets", {"replicatedJobs": [self._replicated()]})
            if job_set is not None:
                name = job_set["metadata"]["name"]
                self._job["template"]["metadata"]["labels"] = {JOBSET_LABEL: name}
                self._pass_on("jobsets", job_set, "jobs", self._job)

    def _replicated(self) -> Object:
        return {"name": "node", "replicas": 1, "template": {"spec": self._job}}

    def _pass_on(self, plural: str, owner: Object, below: str, spec: Object) -> Object | None:
        """Create what the owner owns, write its condition, and pass its suspend on; return what it owns."""
        name, suspend = owner["metadata"]["name"], owner["spec"].get("suspend", False)
        found = next((one for one in self._api.items(path_of(below, self._team)) if _is_of(one, owner)), None)
        if found is None:
            reference = {"apiVersion": _VERSIONS[plural], "kind": _KINDS[plural], "name": name, "controller": True}
            meta = {"name": name, "ownerReferences": [{**reference, "uid": owner["metadata"]["uid"]}]}
            kind = {} if below == "jobs" else {"apiVersion": _VERSIONS[below], "kind": _KINDS[below]}
            self._api.create(
                path_of(below, self._team), {**kind, "metadata": meta, "spec": {**spec, "suspend": suspend}}
            )
            return None
        if _has_suspended(owner) != suspend:
            condition = {"type": "Suspended", "status": str(suspend), "reason": "x", "message": ""}
            self._api.patch(f"{path_of(plural, self._team, name)}/status", {"status": {"conditions": [condition]}})
        elif found["spec"].get("suspend", False) != suspend:
            if plural == "trainjobs":
                self.changed.append("suspend" if suspend else "resume")
            self._api.patch(path_of(below, self._team, name), {"spec": {"suspend": suspend}})
        return found


class AppWrappers(Repeating):
    """AppWrapper's controller, for wrappers of Jobs; `phases` are the phases that it has written."""

    def __init__(self, api: Api, team: str) -> None:
        self.phases: list[str] = []
        super().__init__(api, team)

    def _reconcile(self) -> None:
        for wrapper in self._api.items(path_of("appwrappers", self._team)):
            spec, phase = wrapper["spec"], wrapper.get("status", {}).get("phase", "Suspended")
            wrapped = [one for one in self._api.items(path_of("jobs", self._team)) if _is_of(one, wrapper)]
            if phase == "Suspending":
                for one in wrapped:
                    path = path_of("jobs", self._team, one["metadata"]["name"])
                    self._api.delete(f"{path}?propagationPolicy=Foreground")
                if not wrapped:
                    self._enter(wrapper, "Suspended")
            elif spec.get("suspend") and phase != "Suspended":
                self._enter(wrapper, "Suspending")
            elif not spec.get("suspend") and len(wrapped) < len(spec["components"]):
                self._deploy(wrapper)
            elif not spec.get("suspend") and phase != "Running":
                self._enter(wrapper, "Running")

    def _deploy(self, wrapper: Object) -> None:
        name = wrapper["metadata"]["name"]
        reference = {"apiVersion": _VERSIONS["appwrappers"], "kind": "AppWrapper", "name": name, "controller": True}
        for component in wrapper["spec"]["components"]:
            job = component["template"]
            meta = {**job["metadata"], "ownerReferences": [{**reference, "uid": wrapper["metadata"]["uid"]}]}
            template = {**job["spec"]["template"], "metadata": {"labels": {"workload.codeflare.dev/appwrapper": name}}}
            self._api.create(
                path_of("jobs", self._team), {"metadata": meta, "spec": {**job["spec"], "template": template}}
            )

    def _enter(self, wrapper: Object, phase: str) -> None:
        self.phases.append(phase)
        path = path_of("appwrappers", self._team, wrapper["metadata"]["name"])
        self._api.patch(f"{path}/status", {"status": {"phase": phase}})


class TrainingOperator(Repeating):
    """The controller of TFJobs, which creates and deletes the pods itself."""

    def _reconcile(self) -> None:
        for job in self._api.items(path_of("tfjobs", self._team)):
            suspend = job["spec"].get("runPolicy", {}).get("suspend", False)
            pods, path = f"/api/v1/namespaces/{self._team}/pods", path_of("tfjobs", self._team, job["metadata"]["name"])
            found = {one["metadata"]["name"] for one in self._api.items(pods) if _is_of(one, job)}
            if suspend:
                for name in found:
                    self._api.delete(f"{pods}/{name}", 0)
            else:
                for body in _pods_of(job):
                    if body["metadata"]["name"] not in found:
                        self._api.create(pods, body)
            if _has_suspended(job) != suspend:
                condition = {"type": "Suspended", "status": str(suspend), "reason": "x", "message": ""}
                self._api.patch(f"{path}/status", {"status": {"conditions": [condition]}})


class LeaderWorkers(Repeating):
    """LeaderWorkerSet's controller with the restart policy RecreateGroupOnPodRestart; it creates the pods itself."""

    def __init__(self, api: Api, team: str) -> None:
        self._complete: set[tuple[str, int]] = set()
        super().__init__(api, team)

    def _reconcile(self) -> None:
        pods = f"/api/v1/namespaces/{self._team}/pods"
        for found in self._api.items(path_of("leaderworkersets", self._team)):
            own = {one["metadata"]["name"]: one for one in self._api.items(pods) if _is_of(one, found)}
            for replica, bodies in enumerate(_replicas_of(found)):
                names = {body["metadata"]["name"] for body in bodies}
                there = {name for name in names & own.keys() if "deletionTimestamp" not in own[name]["metadata"]}
                key = found["metadata"]["uid"], replica
                if key in self._complete and there != names:
                    self._complete.discard(key)
                    for name in there:
                        self._api.delete(f"{pods}/{name}", 0)
                elif not names & own.keys() or key not in self._complete:
                    for body in bodies:
                        if body["metadata"]["name"] not in own:
                            self._api.create(pods, body)
                    self._complete.add(key)


class Notebooks(Repeating):
    """The controllers of Notebooks and of Workspaces (notebooks v2): each has a StatefulSet."""

    def _reconcile(self) -> None:
        for plural, label in (("notebooks", NOTEBOOK), ("workspaces", WORKSPACE)):
            for found in self._api.items(path_of(plural, self._team)):
                stopped = STOPPED in found["metadata"].get("annotations", {}) or found["spec"].get("paused", False)
                self._keep(plural, found, label, 0 if stopped else 1)

    def _keep(self, plural: str, found: Object, label: str, replicas: int) -> None:
        """Create the StatefulSet, or scale it."""
        sets = f"/apis/apps/v1/namespaces/{self._team}/statefulsets"
        name, uid = found["metadata"]["name"], found["metadata"]["uid"]
        own = next((one for one in self._api.items(sets) if _is_of(one, found)), None)
        if own is None:
            owner = {"apiVersion": _VERSIONS[plural], "kind": _KINDS[plural], "name": name, "controller": True}
            labelled = {label: name, "statefulset": name}
            template = {"metadata": {"labels": labelled}, "spec": found["spec"]["template"]["spec"]}
            selector = {"matchLabels": {"statefulset": name}}
            spec = {"replicas": replicas, "serviceName": name, "selector": selector, "template": template}
            meta = {"name": name, "ownerReferences": [{**owner, "uid": uid}]}
            self._api.create(sets, {"metadata": meta, "spec": spec})
        elif own["spec"]["replicas"] != replicas:
            self._api.patch(f"{sets}/{name}", {"spec": {"replicas": replicas}})


def _replicas_of(found: Object) -> Iterator[list[Object]]:
    """Yield the pods of each replica: its leader, and its workers."""
    meta, group = found["metadata"], found["spec"]["leaderWorkerTemplate"]
    reference = {"apiVersion": _VERSIONS["leaderworkersets"], "kind": "LeaderWorkerSet", "controller": True}
    owner = {**reference, "name": meta["name"], "uid": meta["uid"]}
    for replica in range(found["spec"]["replicas"]):
        labelled = {LEADER_WORKER_LABEL: meta["name"], REPLICA_LABEL: str(replica)}
        names = [f"{meta['name']}-{replica}", *(f"{meta['name']}-{replica}-{n}" for n in range(1, group["size"]))]
        yield [
            {
                "metadata": {"name": name, "labels": labelled, "ownerReferences": [owner]},
                "spec": group["workerTemplate"]["spec"],
            }
            for name in names
        ]


def _pods_of(job: Object) -> Iterator[Object]:
    meta = job["metadata"]
    reference = {"apiVersion": _VERSIONS["tfjobs"], "kind": "TFJob", "name": meta["name"], "uid": meta["uid"]}
    for role, replicas in job["spec"]["tfReplicaSpecs"].items():
        for index in range(replicas["replicas"]):
            yield {
                "metadata": {
                    "name": f"{meta['name']}-{role.lower()}-{index}",
                    "labels": {"training.kubeflow.org/job-name": meta["name"]},
                    "ownerReferences": [{**reference, "controller": True}],
                },
                "spec": replicas["template"]["spec"],
            }


def _is_of(found: Object, owner: Object) -> bool:
    return any(one["uid"] == owner["metadata"]["uid"] for one in found["metadata"].get("ownerReferences", []))


def _has_suspended(found: Object) -> bool:
    conditions = found.get("status", {}).get("conditions", [])
    return any(one["type"] == "Suspended" and one["status"] == "True" for one in conditions)
