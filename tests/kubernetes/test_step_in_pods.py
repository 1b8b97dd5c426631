"""A compiled step on a real node: its launcher in the step's pod, its workers in pods of their own."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.cluster.kubernetes import labels
from kfp_gpuquota.dsl.route import route_pipeline
from kfp_gpuquota.version import __version__
from tests.kubernetes.conftest import address_of, built_or_skip
from tests.kubernetes.controlled import Controlled
from tests.kubernetes.installation import jobs_of
from tools.devcluster import built_images
from tools.devcluster.node import host_python

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.devcluster import DevCluster

REPOSITORY = Path(__file__).parents[2]
ROLE = REPOSITORY / "manifests" / "base" / "launcher-role.yaml"
IMAGE = "localhost/base:1"
WORKFLOWS = "/apis/argoproj.io/v1alpha1"
# What KFP's own launcher does before the step starts: the input artifact lies in the pod, and only there.
SCRIPT = """
import os, sys, pathlib
data, model = sys.argv[1:]
assert not pathlib.Path("/tmp/launcher-was-here").exists(), "this is the launcher's pod"
print("reading", data, "as worker", os.environ["POD_INDEX"])
pathlib.Path(model).parent.mkdir(parents=True, exist_ok=True)
pathlib.Path(model).write_text(pathlib.Path(data).read_text().upper())
"""


@pytest.fixture
def controlled(kubelet_system: DevCluster, tmp_path: Path) -> Iterator[Controlled]:
    running = Controlled(kubelet_system, tmp_path, address=address_of(kubelet_system))
    running.cluster.api.apply(
        "/apis/rbac.authorization.k8s.io/v1/clusterroles/gpuquota-launcher", yaml.safe_load(ROLE.read_text())
    )
    yield running
    running.close()


def compiled_step(argv: list[str], image: str, launcher: str) -> dict[str, Any]:
    """The container of a step that asks for a GPU, as routing leaves it for a KFP backend."""
    container = {
        "image": image,
        "command": argv,
        "resources": {"accelerator": {"type": "nvidia.com/gpu", "count": "1"}},
    }
    spec = {"deploymentSpec": {"executors": {"exec-shout": {"container": container}}}}
    routed = route_pipeline(spec, launcher_image=launcher)
    return dict(routed["deploymentSpec"]["executors"]["exec-shout"]["container"])


def executor_input(attempt: int = 0) -> dict[str, Any]:
    data, model = "/tmp/kfp/in/data", "/tmp/kfp/out/model"
    return {
        "inputs": {"artifacts": {"data": {"artifacts": [{"name": "data", "uri": data}]}}},
        "outputs": {
            "outputFile": "/tmp/kfp/out/executor_output.json",
            "artifacts": {
                "model": {"artifacts": [{"name": "model", "uri": model, "metadata": {}}]},
                "executor-logs": {"artifacts": [{"name": "executor-logs", "uri": f"/tmp/kfp/out/logs-{attempt}"}]},
            },
        },
    }


class Steps:
    """A team whose pipeline runs one step, as KFP's backend would: `run` makes the step's pod.

    The images are those of the workers and of the launcher; where none are given, this machine's Python in both.
    """

    def __init__(self, controlled: Controlled, argv: list[str], image: str = IMAGE, launcher: str = IMAGE) -> None:
        self.controlled, self.api = controlled, controlled.cluster.api
        self.team = controlled.team(guaranteed=1)
        self.step = compiled_step(argv, image, launcher)
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "launcher"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "gpuquota-launcher"},
            "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": self.team}],
        }
        self.api.create(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.team}/rolebindings", binding)

    def run(self, name: str, attempt: int = 0, workflow: str = "") -> str:
        """The path of the step's pod. Its shell stands for KFP's own launcher: it brings the input artifact."""
        # KFP's launcher fills in the executor input, but no placeholder of the run or the task.
        filled = json.dumps(executor_input(attempt))
        argv = [element.replace("{{$}}", filled) for element in (*self.step["command"], *self.step["args"])]
        volumes, mounts = host_python() if self.step["image"] == IMAGE else ([], [])
        found = (
            {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)} if mounts else {}
        )
        before = "mkdir -p /tmp/kfp/in /tmp/kfp/out && touch /tmp/launcher-was-here && echo hello > /tmp/kfp/in/data"
        run = '"$@" & pid=$!; trap "kill -TERM $pid" TERM; wait $pid; wait $pid; code=$?'
        after = "cat /tmp/kfp/out/model /tmp/kfp/out/executor_output.json"
        server = urlsplit(self.controlled.cluster.server)
        container = {
            "name": "main",
            "image": self.step["image"],
            "imagePullPolicy": "Never",
            "command": ["sh", "-c", f"{before}; {run}; {after}; exit $code", "kfp-launcher", *argv],
            "env": [
                *self.step["env"],
                *({"name": name, "value": value} for name, value in found.items()),
                {"name": "KUBERNETES_SERVICE_HOST", "value": self.controlled.address},
                {"name": "KUBERNETES_SERVICE_PORT", "value": str(server.port)},
                {"name": "KFP_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                {"name": "KFP_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
            ],
            "volumeMounts": mounts,
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": {"pipeline/runid": "8c1f0a", "workflows.argoproj.io/workflow": workflow or "shouts-x7v6d"},
                "annotations": {
                    "workflows.argoproj.io/node-name": f"shouts-x7v6d(0).root(0).shout(0).executor({attempt})"
                },
            },
            "spec": {
                "containers": [container],
                "volumes": volumes,
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 5,
            },
        }
        self.api.create(f"/api/v1/namespaces/{self.team}/pods", pod)
        return f"/api/v1/namespaces/{self.team}/pods/{name}"

    def until_ended(self, path: str) -> dict[str, Any]:
        """The step's pod when it has ended."""
        return self.controlled.until(path, lambda pod: pod["status"].get("phase") in {"Succeeded", "Failed"}, 120)

    def log(self, pod: str) -> str:
        return self.controlled.cluster.container_log(self.team, pod, "main")

    def jobs(self) -> dict[str, dict[str, Any]]:
        return {job["metadata"]["name"]: job for job in self.api.items(jobs_of(self.team))}


def shout(*more: str, python: str = sys.executable) -> list[str]:
    model = "{{$.outputs.artifacts['model'].path}}"
    return [python, "-u", "-c", SCRIPT + "\n".join(more), "/tmp/kfp/in/data", model]


def test_a_steps_worker_runs_in_a_pod_of_its_own_and_its_artifacts_are_relayed(controlled: Controlled) -> None:
    steps = Steps(controlled, shout())
    controlled.start()
    ended = steps.until_ended(steps.run("step-0"))
    said = steps.log("step-0")
    assert ended["status"]["phase"] == "Succeeded", said
    assert "[0] reading /tmp/kfp/in/data as worker 0" in said
    assert "HELLO" in said, said
    assert "gpuquota: succeeded after" in said
    (job,) = steps.jobs().values()
    assert job["status"]["phase"] == "Succeeded"
    worker = controlled.pods(steps.team)[job["status"]["resultWorker"]]
    assert worker["spec"]["containers"][0]["image"] == IMAGE


def test_the_launcher_runs_from_its_own_image_and_the_worker_in_one_that_has_python_only(
    controlled: Controlled,
) -> None:
    for name in ("launcher", "base"):
        controlled.cluster.import_image(built_or_skip(name))
    image = built_images.base_name()
    seen = "import importlib.util; print('runtime', importlib.util.find_spec('elastic_runtime') is not None)"
    steps = Steps(controlled, shout(seen, python="python3"), image, f"docker.io/kfp-gpuquota/launcher:{__version__}")
    controlled.start()
    ended = steps.until_ended(steps.run("step-0"))
    said = steps.log("step-0")
    assert ended["status"]["phase"] == "Succeeded", said
    assert "[0] runtime True" in said
    assert "HELLO" in said, said
    (job,) = steps.jobs().values()
    worker = controlled.pods(steps.team)[job["status"]["resultWorker"]]
    assert worker["spec"]["containers"][0]["image"] == image


@pytest.mark.slow
def test_a_step_that_is_made_anew_takes_its_running_job_over(controlled: Controlled) -> None:
    steps = Steps(controlled, shout("import time", "time.sleep(12)"))
    controlled.start()
    first = steps.run("step-0")
    controlled.wait(lambda: "as worker 0" in steps.log("step-0") if _runs(steps, first) else False, seconds=90)
    steps.api.delete(first, grace_s=1)
    steps.api.until_gone(first)
    ended = steps.until_ended(steps.run("step-0", attempt=1))
    said = steps.log("step-0")
    assert ended["status"]["phase"] == "Succeeded", said
    assert "HELLO" in said, said
    (job,) = steps.jobs().values()
    assert job["status"]["attempt"] == 1


@pytest.mark.slow
def test_a_step_goes_on_through_an_api_server_that_is_away(controlled: Controlled) -> None:
    steps = Steps(controlled, shout("import time", "for i in range(25): print('line', i); time.sleep(1)"))
    controlled.start()
    path = steps.run("step-0")
    controlled.wait(lambda: "as worker 0" in steps.log("step-0") if _runs(steps, path) else False, seconds=90)
    with controlled.cluster.away("kube-apiserver"):
        time.sleep(10)  # how long it is away is what is tested
    controlled.cluster.await_healthy()
    ended = steps.until_ended(path)
    said = steps.log("step-0")
    assert ended["status"]["phase"] == "Succeeded", said
    assert [line for line in said.splitlines() if "] line " in line] == [f"[0] line {i}" for i in range(25)], said
    assert "HELLO" in said


def test_a_steps_exit_code_is_its_workers(controlled: Controlled) -> None:
    steps = Steps(controlled, shout("sys.exit(7)"))
    controlled.start()
    ended = steps.until_ended(steps.run("step-0"))
    (status,) = ended["status"]["containerStatuses"]
    assert status["state"]["terminated"]["exitCode"] == 7, steps.log("step-0")


def test_workers_that_start_after_a_take_over_find_the_steps_file(controlled: Controlled) -> None:
    holder = controlled.team(guaranteed=2)
    controlled.start()
    session = controlled.pod(holder, "session", 2, labels_={labels.KIND: "build"}, containers=[session_container()])
    controlled.until_bound(session)
    steps = Steps(controlled, shout())
    first = steps.run("step-0")
    controlled.wait(steps.jobs, controlled.log, seconds=90)
    steps.api.delete(first, grace_s=1)
    steps.api.until_gone(first)
    second = steps.run("step-0", attempt=1)
    controlled.wait(lambda: "gpuquota: job" in steps.log("step-0") if _runs(steps, second) else False, seconds=90)
    steps.api.delete(session, grace_s=1)
    ended = steps.until_ended(second)
    said = steps.log("step-0")
    assert ended["status"]["phase"] == "Succeeded", said
    assert "HELLO" in said, said
    assert len(steps.jobs()) == 1


def session_container() -> dict[str, Any]:
    """Holds both GPUs until it is deleted."""
    gpus = {"limits": {labels.GPU_RESOURCE: "2"}}
    command = ["sh", "-c", "trap 'exit 0' TERM; sleep 600 & wait"]
    return {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": command, "resources": gpus}


@pytest.mark.parametrize("ended", [{"activeDeadlineSeconds": 0}, {"shutdown": "Terminate"}], ids=["kfp", "argo"])
def test_a_run_that_is_terminated_cancels_its_job_at_once(controlled: Controlled, ended: dict[str, Any]) -> None:
    steps = Steps(controlled, shout("import time", "time.sleep(300)"))
    install_workflows(controlled.cluster)
    workflow = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"name": "run-1"}, "spec": {}}
    steps.api.create(f"{WORKFLOWS}/namespaces/{steps.team}/workflows", workflow)
    controlled.start()
    path = steps.run("step-0", workflow="run-1")
    controlled.wait(lambda: "as worker 0" in steps.log("step-0") if _runs(steps, path) else False, seconds=90)
    steps.api.patch(f"{WORKFLOWS}/namespaces/{steps.team}/workflows/run-1", {"spec": ended})
    steps.api.delete(path, grace_s=2)
    (name,) = steps.jobs()
    cancelled = controlled.until_phase(f"{jobs_of(steps.team)}/{name}", "Cancelled")
    assert "for 0 s" in cancelled["status"]["message"]  # where another attempt might come the job lives on for 15


def install_workflows(cluster: DevCluster) -> None:
    """Argo's kind, as far as a step looks at it."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "workflows.argoproj.io"},
        "spec": {
            "group": "argoproj.io",
            "scope": "Namespaced",
            "names": {"kind": "Workflow", "plural": "workflows", "singular": "workflow"},
            "versions": [
                {"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}},
            ],
        },
    }
    cluster.api.apply("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/workflows.argoproj.io", definition)
    cluster.api.until_served(f"{WORKFLOWS}/namespaces/default/workflows")


def _runs(steps: Steps, path: str) -> bool:
    return bool(steps.api.get(path)["status"].get("phase") == "Running")
