"""Doubles of Kubeflow Trainer and of JobSet: a TrainJob has a JobSet, and that a Job, which pass `suspend` on.

And a double of AppWrapper's controller, which deletes what it wraps while it is suspended, and of the training
operator for TFJobs. The kinds are minimal schemas of our own, from the API documentation of Trainer v2
(trainer.kubeflow.org/v1alpha1), JobSet (jobset.x-k8s.io/v1alpha2), AppWrapper (workload.codeflare.dev/v1beta2) and the
training operator (kubeflow.org/v1). Jobs are those of the real Job controller.
As of the real kinds, the condition Suspended of TrainJob and JobSet follows from the spec alone; here always before
`suspend` is passed on, which is the worst order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kfp_gpuquota.cluster.kubernetes.convert.owners import JOBSET_LABEL
from tests.kubernetes.kuberay import Repeating

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.devcluster.api import Api

Object = dict[str, Any]
_VERSIONS = {
    "trainjobs": "trainer.kubeflow.org/v1alpha1",
    "jobsets": "jobset.x-k8s.io/v1alpha2",
    "jobs": "batch/v1",
    "appwrappers": "workload.codeflare.dev/v1beta2",
    "tfjobs": "kubeflow.org/v1",
}
_KINDS = {"trainjobs": "TrainJob", "jobsets": "JobSet", "appwrappers": "AppWrapper", "tfjobs": "TFJob"}


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
