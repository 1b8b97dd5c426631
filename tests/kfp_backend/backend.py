"""KFP's API server and Argo's controller on a real API server: Workflows, their pods, and what becomes of both."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.kfp_backend import shapes, stand_in
from tests.kfp_backend.argo import FINAL, Nodes, Wanted
from tools.devcluster.api import Api, ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tools.devcluster import DevCluster

Json = dict[str, Any]

WORKFLOWS: Final = "/apis/argoproj.io/v1alpha1"
RUNNER: Final = "pipeline-runner"
REQUEUE_S: Final = 1.0
ARGOS_REQUEUE_S: Final = 10.0
"""Argo's own DEFAULT_REQUEUE_TIME: so long it may take until it looks at a changed Workflow or pod again."""
_SOURCE: Final = Path(stand_in.__file__).read_text()
_GRACE_S: Final = 5


@dataclass
class Run:
    """A run of a pipeline. `deleted`: its Workflow was deleted."""

    name: str
    run_id: str
    nodes: Nodes
    deleted: bool = False


class Backend:
    """The backend of one namespace; a thread of its own does what Argo's controller does, until `close`.

    `dressed(pod)` lets a pod run on the test's cluster (images, mounts of this machine's Python, the API server's
    address). `requeue_s` is how long it takes to look at a Workflow again.
    """

    def __init__(
        self,
        cluster: DevCluster,
        namespace: str,
        dressed: Callable[[Json], Json] = lambda pod: pod,
        *,
        defaults: bool = True,
        requeue_s: float = REQUEUE_S,
    ) -> None:
        self.api, self.namespace = Api.of_kubeconfig(cluster.kubeconfig), namespace  # a thread's own connection
        self._cluster, self._dressed, self._defaults = cluster, dressed, defaults
        self.requeue_s = requeue_s
        self.refused: list[str] = []  # pods that the API server did not take
        self._runs: list[Run] = []
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._loop, name="argo", daemon=True)
        install_workflows(cluster)
        self._thread.start()

    # What a user of KFP does

    def start(self, pipeline: str, *steps: shapes.Step) -> Run:
        """Create a run; its steps start together."""
        name, run_id = f"{pipeline}-{uuid.uuid4().hex[:5]}", str(uuid.uuid4())
        body = shapes.workflow(name, run_id, defaults=self._defaults)
        self._cluster.api.create(self._workflows, body)
        run = Run(name, run_id, Nodes(name, steps, defaults=self._defaults))
        with self._lock:
            self._runs.append(run)
        return run

    def terminate(self, run: Run) -> None:
        """Terminate in KFP."""
        self._cluster.api.patch(self.path(run), {"spec": {"activeDeadlineSeconds": 0}})

    def retry(self, run: Run) -> None:
        """Retry of a run that failed: what did not succeed is forgotten, its pods are deleted, and it runs again."""
        with self._lock:
            for node in run.nodes.keep_succeeded():
                self._cluster.api.delete(self._pod_path(run, node), 0)
            labels = {"workflows.argoproj.io/completed": "false", "workflows.argoproj.io/phase": "Running"}
            change = {"spec": {"activeDeadlineSeconds": None}, "status": {"phase": "Running", "finishedAt": None}}
            self._cluster.api.patch(self.path(run), {**change, "metadata": {"labels": labels}})

    def delete(self, run: Run) -> None:
        """The run and its Workflow, with all that it owns."""
        self._cluster.api.delete(self.path(run), propagationPolicy="Background")

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Without Argo's controller for a while: KFP still takes requests."""
        with self._lock:
            yield

    # What a test sees

    def path(self, run: Run) -> str:
        """Of its Workflow."""
        return f"{self._workflows}/{run.name}"

    def node(self, run: Run, step: str, attempt: int | None = None) -> str:
        """The name of the node of a step's executor, of an attempt where there are several."""
        if not self._defaults:
            return f"{run.name}.root.{step}.executor" + ("" if attempt is None else f"({attempt})")
        return f"{run.name}(0).root(0).{step}(0).executor({attempt or 0})"

    def pod(self, run: Run, step: str, attempt: int | None = None) -> str:
        """The name of a step's pod."""
        node = self.node(run, step, attempt)
        return shapes.pod_name(run.name, node, run.nodes.template(node))

    def pod_path(self, run: Run, step: str, attempt: int | None = None) -> str:
        """Of a step's pod."""
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.pod(run, step, attempt)}"

    def until_ended(self, run: Run, seconds: float = 120.0) -> Json:
        """The run's Workflow in its final state."""
        return self._cluster.api.until(self.path(run), lambda one: _phase(one) in FINAL, seconds)

    def close(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self._thread.join()

    # What Argo's controller does

    @property
    def _workflows(self) -> str:
        return f"{WORKFLOWS}/namespaces/{self.namespace}/workflows"

    def _pod_path(self, run: Run, node: str) -> str:
        name = shapes.pod_name(run.name, node, run.nodes.template(node))
        return f"/api/v1/namespaces/{self.namespace}/pods/{name}"

    def _loop(self) -> None:
        while not self._stopped.wait(self.requeue_s):
            with self._lock:
                for run in [run for run in self._runs if not run.deleted]:
                    with contextlib.suppress(ApiError, OSError):  # it looks again
                        self._operate(run)

    def _operate(self, run: Run) -> None:
        try:
            workflow = self.api.get(self.path(run))
        except ApiError as error:
            run.deleted = error.status == 404
            raise
        if _phase(workflow) in FINAL:
            return
        ended = workflow["spec"].get("activeDeadlineSeconds") == 0 or "shutdown" in workflow["spec"]
        pods = self._pods(run)
        for wanted in run.nodes.operate(pods, time.time(), ended=ended):
            self._create(workflow, wanted)
        if ended:
            self._signal([pod for pod in pods.values() if pod["status"].get("phase") not in FINAL])
        self._complete(pods)
        self._write(run)

    def _pods(self, run: Run) -> dict[str, Json]:
        """By the names of their nodes."""
        selector = f"workflows.argoproj.io/workflow={run.name}"
        found = self.api.items(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=selector)
        return {pod["metadata"]["annotations"]["workflows.argoproj.io/node-name"]: pod for pod in found}

    def _create(self, workflow: Json, wanted: Wanted) -> None:
        made = shapes.executor_pod(workflow, wanted.node, wanted.step, template=wanted.template)
        pod = self._dressed(runnable(made))
        try:
            self.api.create(f"/api/v1/namespaces/{self.namespace}/pods", pod)
        except ApiError as error:
            self.refused.append(str(error))

    def _signal(self, pods: Sequence[Json]) -> None:
        """Terminate containers as Argo does, by a signal to each: the pod's object stays."""
        for pod in pods:
            for one in pod["status"].get("containerStatuses", []):
                if container := one.get("containerID", "").removeprefix("containerd://"):
                    self._cluster.signal_container(container)

    def _complete(self, pods: dict[str, Json]) -> None:
        for pod in pods.values():
            label = pod["metadata"]["labels"]["workflows.argoproj.io/completed"]
            if pod["status"].get("phase") in FINAL and label == "false":
                path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}"
                self.api.patch(path, {"metadata": {"labels": {"workflows.argoproj.io/completed": "true"}}})

    def _write(self, run: Run) -> None:
        root = run.nodes.root
        labels = {
            "workflows.argoproj.io/completed": str(root.phase in FINAL).lower(),
            "workflows.argoproj.io/phase": root.phase,
        }
        status = {
            "phase": root.phase,
            "message": root.message,
            "startedAt": shapes.moment(root.started),
            "finishedAt": None if root.finished is None else shapes.moment(root.finished),
            "nodes": run.nodes.status(),
        }
        self.api.patch(self.path(run), {"metadata": {"labels": labels}, "status": status})


def runnable(pod: Json) -> Json:
    """The pod with the stand-in as its only container: see the package's docstring."""
    main = next(one for one in pod["spec"]["containers"] if one["name"] == "main")
    options = main["command"][main["command"].index("/kfp-launcher/launch") + 1 :]
    left_out = {"mlpipeline-minio-artifact", "tmp-dir-argo"}
    spec = {
        **{name: value for name, value in pod["spec"].items() if name != "initContainers"},
        "containers": [{**main, "command": ["python3", "-I", "-c", _SOURCE, *options]}],
        "terminationGracePeriodSeconds": _GRACE_S,
        "volumes": [volume for volume in pod["spec"]["volumes"] if volume["name"] not in left_out],
    }
    return {**pod, "spec": spec}


def install_workflows(cluster: DevCluster) -> None:
    """Argo's kind, with any content: its own definition, too, lets every field be."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "workflows.argoproj.io"},
        "spec": {
            "group": "argoproj.io",
            "scope": "Namespaced",
            "names": {"kind": "Workflow", "plural": "workflows", "singular": "workflow", "shortNames": ["wf"]},
            "versions": [version],
        },
    }
    cluster.api.apply("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/workflows.argoproj.io", definition)
    cluster.api.until_served(f"{WORKFLOWS}/namespaces/default/workflows")


def _phase(workflow: Json) -> str:
    return str(workflow.get("status", {}).get("phase", ""))
