"""KubeRay's operator, a double of it, and one of Ray's autoscaler, on a real API server with KubeRay's own definitions.

The double does what KubeRay's API documents, and no more: it creates a head pod and the workers of each group with
KubeRay's labels, deletes the pods of `workersToDelete`, and arbitrary ones where `replicas` falls without them; with
Ray's autoscaler only that deletes workers. `suspend` of a RayJob deletes its RayCluster, that of a RayCluster or of a
group its pods. The head of a RayJob is not
created again: the job fails. The same tests run with KubeRay's operator (test_kuberay.py). The autoscaler runs in Ray's
head, which these clusters do not have.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.polling import TIMEOUT_S
from tools.devcluster import ApiError
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from tools.devcluster import Api, DevCluster

Object = dict[str, Any]
RAY = "/apis/ray.io/v1"
PAUSE_S = 0.2
IN_TREE = "enableInTreeAutoscaling"


def ray_path(team: str, plural: str, name: str = "") -> str:
    """The path of a team's Ray objects, or of one of them."""
    return f"{RAY}/namespaces/{team}/{plural}" + (f"/{name}" if name else "")


def group(name: str, replicas: int, *, gpus: int = 1, **more: Any) -> Object:
    """A worker group; its pods are gated as the webhook would gate them."""
    limits = {"limits": {labels.GPU_RESOURCE: str(gpus)}} if gpus else {}
    container = {"name": "ray-worker", "image": "none", "resources": limits}
    gates = {"schedulingGates": [{"name": labels.QUOTA_GATE}]} if gpus else {}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 1, **gates}
    sizes = {"replicas": replicas, "minReplicas": replicas, "maxReplicas": replicas, **more}
    return {"groupName": name, **sizes, "template": {"spec": spec}}


def cluster_spec(*groups: Object, head_gpus: int = 0, **more: Any) -> Object:
    """The specification of a RayCluster."""
    head = group("headgroup", 1, gpus=head_gpus)["template"]
    return {"headGroupSpec": {"template": head}, "workerGroupSpecs": list(groups), **more}


def elastic(**more: str) -> Object:
    """Labels of an elastic object."""
    return {labels.ELASTIC: "true", **more}


class RealOperator:
    """KubeRay's operator itself for one namespace, as a process; `program` is the one that `make soak` builds."""

    def __init__(self, program: str, cluster: DevCluster, team: str, folder: Path) -> None:
        self.log = folder / f"kuberay-{team}.log"
        flags = (f"--kubeconfig={cluster.kubeconfig}", f"--watch-namespace={team}", "--enable-leader-election=false")
        ports = ("--metrics-addr=0", f"--health-probe-bind-address=127.0.0.1:{free_port()}")
        with self.log.open("wb") as output:
            self._process = subprocess.Popen((program, *flags, *ports), stdout=output, stderr=output)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Do nothing from now on, as an operator that is down."""
        self._process.send_signal(signal.SIGSTOP)


class Repeating:
    """Repeats `_reconcile` for one namespace in a thread; `close` ends it."""

    def __init__(self, api: Api, team: str, pause_s: float = PAUSE_S) -> None:
        self._api, self._team, self._pause_s = api, team, pause_s
        self._stop, self._round, self._paused = threading.Event(), threading.Lock(), False
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; raises what it has met."""
        self._stop.set()
        self._thread.join(TIMEOUT_S)
        if self.failure is not None:
            raise self.failure

    def pause(self) -> None:
        """Do nothing from now on, as an operator that is down."""
        with self._round:
            self._paused = True

    def _run(self) -> None:
        while not self._stop.wait(self._pause_s):
            try:
                with self._round:
                    if not self._paused:
                        self._reconcile()
            except ApiError as error:
                if error.status not in {404, 409, 422}:  # somebody was quicker: the next round sees it
                    self.failure = error
                    return
            except Exception as error:  # noqa: BLE001 - reported by close
                self.failure = error
                return

    def _reconcile(self) -> None:
        raise NotImplementedError


class Autoscaler(Repeating):
    """Ray's autoscaler: lowers `replicas` to `maxReplicas` by workers of its own choice, the first ones."""

    def _reconcile(self) -> None:
        for cluster in self._api.items(ray_path(self._team, "rayclusters")):
            if cluster["spec"].get(IN_TREE):
                self._lower(cluster)

    def _lower(self, cluster: Object) -> None:
        path = ray_path(self._team, "rayclusters", cluster["metadata"]["name"])
        for one in cluster["spec"]["workerGroupSpecs"]:
            excess = one["replicas"] - one["maxReplicas"]
            if excess > 0:
                workers = self._api.items(f"/api/v1/namespaces/{self._team}/pods")
                names = sorted(pod["metadata"]["name"] for pod in workers if _group(pod) == one["groupName"])
                one["replicas"], one["scaleStrategy"] = one["maxReplicas"], {"workersToDelete": names[:excess]}
                self._api.patch(path, {"spec": {"workerGroupSpecs": cluster["spec"]["workerGroupSpecs"]}})


class Operator(Repeating):
    """A double of KubeRay's operator. `arbitrary` are workers that it chose itself to delete."""

    def __init__(self, api: Api, team: str, pause_s: float = PAUSE_S) -> None:
        self._heads: set[str] = set()
        self.arbitrary: list[str] = []
        super().__init__(api, team, pause_s)

    def _reconcile(self) -> None:
        for job in self._api.items(ray_path(self._team, "rayjobs")):
            self._job(job)
        pods = self._api.items(f"/api/v1/namespaces/{self._team}/pods")
        clusters = self._api.items(ray_path(self._team, "rayclusters"))
        for cluster in clusters:
            self._cluster(cluster, [pod for pod in pods if _owner(pod) == cluster["metadata"]["uid"]])
        known = {cluster["metadata"]["uid"] for cluster in clusters}
        for pod in pods:  # what the garbage collector does
            if "ray.io/group" in pod["metadata"].get("labels", {}) and _owner(pod) not in known:
                self._delete(pod)

    # RayJobs

    def _job(self, job: Object) -> None:
        state = job.get("status", {}).get("jobDeploymentStatus", "")
        suspend, name = job["spec"].get("suspend", False), job.get("status", {}).get("rayClusterName", "")
        if suspend and not job["spec"].get("shutdownAfterJobFinishes"):
            self._set(job, jobDeploymentStatus="ValidationFailed")
        elif state in {"", "Suspended"} and not suspend:
            self._make_cluster(job)
        elif state == "" and suspend:
            self._set(job, jobDeploymentStatus="Suspended")
        elif state == "Running" and suspend:
            self._set(job, jobDeploymentStatus="Suspending")
        elif state == "Suspending":
            with suppress(ApiError):
                self._api.delete(ray_path(self._team, "rayclusters", name))
            self._set(job, jobDeploymentStatus="Suspended", rayClusterName="")

    def _make_cluster(self, job: Object) -> None:
        meta, name = job["metadata"], f"{job['metadata']['name']}-{uuid.uuid4().hex[:5]}"
        body = {
            "apiVersion": "ray.io/v1",
            "kind": "RayCluster",
            "metadata": {
                "name": name,
                "labels": {**meta.get("labels", {}), "ray.io/originated-from-crd": "RayJob"},
                "annotations": meta.get("annotations", {}),
                "ownerReferences": [_reference("RayJob", job)],
            },
            "spec": job["spec"]["rayClusterSpec"],
        }
        self._api.create(ray_path(self._team, "rayclusters"), body)
        self._set(job, jobDeploymentStatus="Running", rayClusterName=name)

    def _set(self, job: Object, **status: str) -> None:
        path = ray_path(self._team, "rayjobs", job["metadata"]["name"])
        if any(job.get("status", {}).get(name) != value for name, value in status.items()):
            self._api.patch(f"{path}/status", {"status": status})

    # RayClusters

    def _cluster(self, cluster: Object, pods: list[Object]) -> None:
        uid = cluster["metadata"]["uid"]
        if cluster["spec"].get("suspend"):
            for pod in pods:
                self._delete(pod)
            return
        if not any(_group(pod) == "headgroup" for pod in pods):
            if uid in self._heads and _owner_kind(cluster) == "RayJob":
                self._fail_job(cluster)
                return
            self._heads.add(uid)
            self._create(cluster, "headgroup", cluster["spec"]["headGroupSpec"], "head")
        for one in cluster["spec"].get("workerGroupSpecs", []):
            self._group(cluster, one, [pod for pod in pods if _group(pod) == one["groupName"]])

    def _fail_job(self, cluster: Object) -> None:
        name = cluster["metadata"]["ownerReferences"][0]["name"]
        job = self._api.get(ray_path(self._team, "rayjobs", name))
        self._set(job, jobDeploymentStatus="Failed")

    def _group(self, cluster: Object, one: Object, pods: list[Object]) -> None:
        if one.get("suspend"):
            for pod in pods:
                self._delete(pod)
            return
        ended = [pod for pod in pods if pod["status"].get("phase") in {"Failed", "Succeeded"}]
        named = set(one.get("scaleStrategy", {}).get("workersToDelete", []))
        for pod in pods:
            if pod in ended or pod["metadata"]["name"] in named:
                self._delete(pod)
        left = [pod for pod in pods if pod not in ended and pod["metadata"]["name"] not in named]
        there = [pod for pod in left if "deletionTimestamp" not in pod["metadata"]]
        wanted = min(max(one.get("replicas", 0), one["minReplicas"]), one["maxReplicas"]) * one.get("numOfHosts", 1)
        for _ in range(wanted - len(there)):
            self._create(cluster, one["groupName"], one, "worker")
        if not cluster["spec"].get(IN_TREE):
            for pod in there[: max(0, len(there) - wanted)]:
                self.arbitrary.append(pod["metadata"]["name"])
                self._delete(pod)

    # Pods

    def _create(self, cluster: Object, name: str, spec: Object, kind: str) -> None:
        template = spec["template"]
        meta = template.get("metadata", {})
        written = {"ray.io/cluster": cluster["metadata"]["name"], "ray.io/group": name, "ray.io/node-type": kind}
        body = {
            "metadata": {
                "name": f"{cluster['metadata']['name']}-{name}-{kind}-{uuid.uuid4().hex[:5]}",
                "labels": {**meta.get("labels", {}), **written},
                "annotations": meta.get("annotations", {}),
                "ownerReferences": [_reference("RayCluster", cluster)],
            },
            "spec": template["spec"],
        }
        self._api.create(f"/api/v1/namespaces/{self._team}/pods", body)

    def _delete(self, pod: Object) -> None:
        if "deletionTimestamp" not in pod["metadata"]:
            with suppress(ApiError):
                self._api.delete(f"/api/v1/namespaces/{self._team}/pods/{pod['metadata']['name']}")


def _reference(kind: str, owner: Object) -> Object:
    meta = owner["metadata"]
    return {
        "apiVersion": "ray.io/v1",
        "kind": kind,
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
    }


def _owner(pod: Object) -> str:
    return next((str(o["uid"]) for o in pod["metadata"].get("ownerReferences", []) if o.get("controller")), "")


def _owner_kind(found: Object) -> str:
    return next((str(o["kind"]) for o in found["metadata"].get("ownerReferences", []) if o.get("controller")), "")


def _group(pod: Object) -> str:
    return str(pod["metadata"].get("labels", {}).get("ray.io/group", ""))
