"""Random operations of users, kubelets and administrators, at a rate: what a shared cluster does all day."""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tools.devcluster.api import Api, ApiError
from tools.observer.rules import FRACTION, GATE, GPU, GROUP

if TYPE_CHECKING:
    from collections.abc import Callable

Object = dict[str, Any]
ZONES: Final = ("a", "b")
QUOTAS: Final = f"/apis/{GROUP}/v1alpha1/gpuquotas"
MOST_PODS: Final = 120
UNMODELLED: Final = 0.15  # the part of pods whose node kube-scheduler chooses
APART: Final = {"labelSelector": {"matchLabels": {"app": "loud"}}, "topologyKey": "kubernetes.io/hostname"}


@dataclass
class Churn:
    """Operations on the teams and nodes that are given. The same seed draws the same operations.

    With `ray` there are RayClusters, too; the cluster must have KubeRay's kinds, and something that operates them.
    """

    api: Api
    teams: list[str]
    nodes: list[str]
    seed: int = 0
    ray: bool = False
    done: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random, self._made = random.Random(self.seed), 0  # noqa: S311 - a simulation
        self._operations: list[tuple[int, Callable[[], None]]] = [
            (6, self.create_pod),
            (1, self.create_group),
            (2, self.create_deployment),
            (1, self.create_job),
            (2, self.create_batch_job),
            (2, self.create_share),
            (int(self.ray), self.create_ray_cluster),
            (4, self.finish_pod),
            (4, self.delete_pod),
            (2, self.delete_owner),
            (1, self.change_quota),
            (1, self.cordon),
        ]
        for position, node in enumerate(self.nodes):
            api_path, zone = f"/api/v1/nodes/{node}", ZONES[position % len(ZONES)]
            self.api.patch(api_path, {"metadata": {"labels": {"zone": zone}}})

    def run(self, seconds: float, per_second: float, beside: Callable[[float], None] = lambda _: None) -> None:
        """Carry out operations for that time; `beside(elapsed)` is called after each."""
        began = time.monotonic()
        number = 0
        while (elapsed := time.monotonic() - began) < seconds:
            self.step()
            number += 1
            beside(elapsed)
            time.sleep(max(0.0, began + number / per_second - time.monotonic()))

    def step(self) -> None:
        """Carry out one operation; what was deleted meanwhile is no error."""
        weights, operations = zip(*self._operations, strict=True)
        (operation,) = self._random.choices(operations, weights)
        with contextlib.suppress(ApiError):
            operation()
            name = operation.__name__
            self.done[name] = self.done.get(name, 0) + 1

    def settle(self) -> None:
        """Undo what keeps pods off nodes."""
        for node in self.nodes:
            self.api.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": None}})

    # Users

    def create_pod(self) -> None:
        """Create a pod without an owner."""
        team = self._team()
        if len(self._pods(team)) < MOST_PODS:
            self.api.create(f"/api/v1/namespaces/{team}/pods", {"metadata": self._meta("pod"), **self._spec()})

    def create_group(self) -> None:
        """Create pods that start together."""
        team, size = self._team(), self._random.randint(2, 4)
        meta, spec = self._meta("group"), self._spec(selects=False)
        for number in range(size):
            marked = {
                "name": f"{meta['name']}-{number}",
                "labels": {f"{GROUP}/group": meta["name"]},
                "annotations": {f"{GROUP}/group-size": str(size)},
            }
            self.api.create(f"/api/v1/namespaces/{team}/pods", {"metadata": marked, **spec})

    def create_deployment(self) -> None:
        """Create a Deployment, whose pods are created again after each eviction."""
        team, meta = self._team(), self._meta("deployment")
        if len(self.api.items(_deployments(team))) > 4:
            return
        labels = {"app": meta["name"]}
        template = {"metadata": {"labels": labels}, **self._spec()}
        spec = {"replicas": self._random.randint(1, 4), "selector": {"matchLabels": labels}, "template": template}
        self.api.create(_deployments(team), {"metadata": meta, "spec": spec})

    def create_job(self) -> None:
        """Create an ElasticJob."""
        team, gpus = self._team(), self._random.randint(1, 3)
        jobs = f"/apis/{GROUP}/v1alpha1/namespaces/{team}/elasticjobs"
        if len(self.api.items(jobs)) > 3:
            self.api.delete(f"{jobs}/{self._random.choice(self.api.items(jobs))['metadata']['name']}")
            return
        template = {"spec": {"containers": [{"name": "main", "image": "none"}]}}
        spec = {"gpus": gpus, "minGpus": 1, "maxGpus": gpus + 2, "template": template}
        body = {"apiVersion": f"{GROUP}/v1alpha1", "kind": "ElasticJob", "metadata": self._meta("job"), "spec": spec}
        self.api.create(jobs, body)

    def create_batch_job(self) -> None:
        """Create a Job that fails by the loss of one pod, or delete one: its pods start together, or each alone."""
        team, pods = self._team(), self._random.randint(1, 3)
        jobs = f"/apis/batch/v1/namespaces/{team}/jobs"
        if len(found := self.api.items(jobs)) > 3:
            name = self._random.choice(found)["metadata"]["name"]
            self.api.delete(f"{jobs}/{name}", None, propagationPolicy="Background")
            return
        template = self._spec()
        template["spec"]["restartPolicy"] = "Never"
        mode = self._random.choice(("Indexed", "NonIndexed"))
        spec = {"parallelism": pods, "completions": pods, "completionMode": mode, "backoffLimit": 0}
        self.api.create(jobs, {"metadata": self._meta("batch"), "spec": {**spec, "template": template}})

    def create_share(self) -> None:
        """Create a pod with a part of a GPU."""
        team = self._team()
        if len(self._pods(team)) < MOST_PODS:
            meta, spec = self._meta("share"), self._spec(selects=False)
            spec["spec"]["containers"][0]["resources"] = {}
            notes = {FRACTION: self._random.choice(("0.25", "0.5"))}
            self.api.create(f"/api/v1/namespaces/{team}/pods", {"metadata": {**meta, "annotations": notes}, **spec})

    def create_ray_cluster(self) -> None:
        """Create an elastic RayCluster, or delete one if there are several."""
        team, replicas = self._team(), self._random.randint(1, 3)
        clusters = f"/apis/ray.io/v1/namespaces/{team}/rayclusters"
        if len(found := self.api.items(clusters)) > 1:
            self.api.delete(f"{clusters}/{self._random.choice(found)['metadata']['name']}")
            return
        template = self._spec()
        template["spec"]["containers"][0]["resources"]["limits"][GPU] = "1"
        head = {"spec": {"containers": [{"name": "head", "image": "none"}], "terminationGracePeriodSeconds": 1}}
        sizes = {"replicas": replicas, "minReplicas": 1, "maxReplicas": replicas + 1}
        spec = {
            "headGroupSpec": {"template": head},
            "workerGroupSpecs": [{"groupName": "g", **sizes, "template": template}],
        }
        meta = {**self._meta("ray"), "labels": {f"{GROUP}/elastic": "true"}}
        self.api.create(clusters, {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": meta, "spec": spec})

    def delete_pod(self) -> None:
        """Delete any pod but a Job's, which would fail by that."""
        if (pod := self._some_pod()) and not is_of_job(pod):
            self.api.delete(f"{_pods(pod)}/{pod['metadata']['name']}", 1)

    def delete_owner(self) -> None:
        """Delete a Deployment."""
        team = self._team()
        if found := self.api.items(_deployments(team)):
            self.api.delete(f"{_deployments(team)}/{self._random.choice(found)['metadata']['name']}")

    # Kubelets

    def finish_pod(self) -> None:
        """End a running pod that has no owner, with success."""
        pod = self._some_pod()
        if pod and pod["status"].get("phase") == "Running" and not pod["metadata"].get("ownerReferences"):
            self.api.patch(f"{_pods(pod)}/{pod['metadata']['name']}/status", {"status": {"phase": "Succeeded"}})

    # Administrators

    def change_quota(self) -> None:
        """Change a team's guarantee; limits are only raised."""
        team = self._team()
        self.api.patch(f"{QUOTAS}/{team}", {"spec": {"guaranteed": self._random.randint(0, 6)}})

    def cordon(self) -> None:
        """Cordon a node, or admit pods to it again."""
        node = self._random.choice(self.nodes)
        cordoned = self._random.random() < 0.3
        self.api.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": cordoned or None}})

    # What they choose from

    def _team(self) -> str:
        return self._random.choice(self.teams)

    def _meta(self, what: str) -> Object:
        self._made += 1
        return {"name": f"{what}-{self._made}"}

    def _spec(self, *, selects: bool = True) -> Object:
        gpus = self._random.choice([1, 1, 1, 2, 4])
        selector = {"zone": self._random.choice(ZONES)} if selects and self._random.random() < 0.4 else {}
        container = {"name": "main", "image": "none", "resources": {"limits": {GPU: str(gpus)}}}
        spec = {"schedulingGates": [{"name": GATE}], "nodeSelector": selector, "containers": [container]}
        if self._random.random() < UNMODELLED:
            spec["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [APART]}}
        return {"spec": {**spec, "terminationGracePeriodSeconds": 1}}

    def _pods(self, team: str) -> list[Object]:
        return self.api.items(f"/api/v1/namespaces/{team}/pods")

    def _some_pod(self) -> Object | None:
        pods = self._pods(self._team())
        return self._random.choice(pods) if pods else None


def is_of_job(pod: Object) -> bool:
    """Return whether a Job has created the pod."""
    return any(owner["kind"] == "Job" for owner in pod["metadata"].get("ownerReferences", []))


def _pods(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods"


def _deployments(team: str) -> str:
    return f"/apis/apps/v1/namespaces/{team}/deployments"
