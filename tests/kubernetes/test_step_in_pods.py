"""A compiled step on a real node: its launcher in the step's pod, its workers in pods of their own."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.dsl.pipelines.route import route_documents
from kfp_gpuquota.version import __version__
from tests.kfp_backend.backend import ARGOS_REQUEUE_S, RUNNER, Backend, Run
from tests.kfp_backend.shapes import Step
from tests.kubernetes.conftest import RESTRICTED, address_of, built_or_skip
from tests.kubernetes.controlled import Controlled
from tests.kubernetes.installation import jobs_of
from tests.polling import until
from tools.devcluster import built_images
from tools.devcluster import image as image_archive
from tools.devcluster.api import ApiError
from tools.devcluster.node import host_python

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.devcluster import DevCluster

REPOSITORY = Path(__file__).parents[2]
ROLE = REPOSITORY / "manifests" / "base" / "launcher-role.yaml"
IMAGE = "localhost/base:1"
GATE = "/gate"
CLAIM = "/claim"
WAIT = f"import time\nwhile not pathlib.Path('{GATE}/open').exists(): time.sleep(0.1)"
DATA, MODEL = "/minio/mlpipeline/v2/data", "/minio/mlpipeline/v2/model"
SCRIPT = """
import os, sys, pathlib
data, model = sys.argv[1:]
assert os.environ["KFP_POD_NAME"] == os.uname().nodename, "the variables of KFP are those of the worker's own pod"
print("reading", data, "as worker", os.environ.get("POD_INDEX"))
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


def compiled_step(
    argv: list[str], image: str, launcher: str, cpu: str = "", claim: str = "", **settings: Any
) -> dict[str, Any]:
    """The container of a step that asks for a GPU, as routing leaves it for a KFP backend, with more settings.

    With `claim` it mounts the claim of this name, which only the run knows, at CLAIM.
    """
    container = {
        "image": image,
        "command": argv,
        "resources": {
            "accelerator": {"type": "nvidia.com/gpu", "count": "1"},
            **({"resourceCpuRequest": cpu} if cpu else {}),
        },
    }
    spec = {"deploymentSpec": {"executors": {"exec-shout": {"container": container}}}}
    mounts = [{"pvcNameParameter": {"componentInputParameter": "claim"}, "mountPath": CLAIM}] if claim else []
    config = {"deploymentSpec": {"executors": {"exec-shout": {"pvcMount": mounts} if claim else {}}}}
    routed, _ = route_documents(spec, [{"platforms": {"kubernetes": config}}], launcher_image=launcher)
    made = dict(routed["deploymentSpec"]["executors"]["exec-shout"]["container"])
    made["env"] += [{"name": f"GPUQUOTA_{name.upper()}", "value": value} for name, value in settings.items()]
    return made


def executor_input(attempt: int = 0) -> dict[str, Any]:
    logs = f"minio://mlpipeline/v2/shouts/8c1f0a/shout/executor-logs-{attempt}"
    return {
        "inputs": {
            "artifacts": {"data": {"artifacts": [{"name": "data", "uri": f"minio:/{DATA.removeprefix('/minio')}"}]}}
        },
        "outputs": {
            "outputFile": "/tmp/kfp_outputs/output_metadata.json",
            "artifacts": {
                "model": {
                    "artifacts": [{"name": "model", "uri": f"minio:/{MODEL.removeprefix('/minio')}", "metadata": {}}]
                },
                "executor-logs": {"artifacts": [{"name": "executor-logs", "uri": logs}]},
            },
        },
    }


class Steps:
    """A team whose pipelines have one step, under KFP's backend.

    The images are those of the workers and of the launcher; where none are given, this machine's Python in both.
    `defaults`: Argo has the retry strategy that KFP ships.
    """

    def __init__(
        self,
        controlled: Controlled,
        argv: list[str],
        image: str = IMAGE,
        launcher: str = IMAGE,
        *,
        guaranteed: int = 1,
        cpu: str = "",
        claim: str = "",
        defaults: bool = True,
        retries: int | None = None,
        timeout_s: int | None = None,
        **settings: Any,
    ) -> None:
        self.controlled, self.api = controlled, controlled.cluster.api
        self.claim, self.defaults, self.retries, self.timeout_s = claim, defaults, retries, timeout_s
        self.team = controlled.team(guaranteed=guaranteed)
        self.container = compiled_step(argv, image, launcher, cpu, claim, **settings)
        self.gate = controlled.folder / "gate"
        self.gate.mkdir(exist_ok=True)
        self.api.create(f"/api/v1/namespaces/{self.team}/serviceaccounts", {"metadata": {"name": RUNNER}})
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "launcher"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "gpuquota-launcher"},
            "subjects": [{"kind": "ServiceAccount", "name": RUNNER, "namespace": self.team}],
        }
        self.api.create(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.team}/rolebindings", binding)
        self.backend = Backend(controlled.cluster, self.team, self.dressed, defaults=defaults)
        controlled.on_close.append(self.backend.close)

    def run(self) -> Run:
        """Start a run; its controller must have been started."""
        inputs = executor_input()
        inputs["inputs"]["parameterValues"] = {"gpuquota-volume-0": self.claim}
        step = Step("shout", self.container, inputs, retries=self.retries, timeout_s=self.timeout_s)
        return self.backend.start("shouts", step)

    def dressed(self, pod: dict[str, Any]) -> dict[str, Any]:
        """The pod with this machine's Python where its image has none, and what a pod finds of the cluster."""
        (main,) = pod["spec"]["containers"]
        volumes, mounts = host_python() if main["image"] == IMAGE else ([], [])
        path = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)} if mounts else {}
        server = urlsplit(self.controlled.cluster.server)
        found = {
            **path,
            "KUBERNETES_SERVICE_HOST": self.controlled.address,
            "KUBERNETES_SERVICE_PORT": str(server.port),
            "GPUQUOTA_TEST_INPUTS": json.dumps({DATA: "hello"}),
        }
        main["env"] += [{"name": name, "value": value} for name, value in found.items()]
        main["volumeMounts"] += [*mounts, {"name": "gate", "mountPath": GATE}]
        main["imagePullPolicy"] = "Never"
        pod["spec"]["volumes"] += [*volumes, {"name": "gate", "hostPath": {"path": str(self.gate)}}]
        return pod

    def open_gate(self) -> None:
        """Let the workers that wait for it go on."""
        (self.gate / "open").touch()

    def node(self, run: Run, attempt: int = 0) -> dict[str, Any]:
        """Return the Workflow's node of an attempt of the step."""
        found = self.api.get(self.backend.path(run))["status"]["nodes"].values()
        name = self.backend.node(run, "shout", attempt if self._repeats else None)
        return next(node for node in found if node["name"] == name)

    def result_worker(self) -> dict[str, Any]:
        """Return the pod whose outputs are the job's; the step may end before the controller has named it."""

        def named() -> str | None:
            (job,) = self.jobs().values()
            return (job.get("status") or {}).get("resultWorker")

        return self.controlled.pods(self.team)[until(named, "the job's result")]

    @property
    def _repeats(self) -> bool:
        """Argo numbers the step's attempts."""
        return self.defaults or self.retries is not None

    def until_working(self, run: Run, attempt: int = 0) -> str:
        """Return the path of the step's pod once its log has the worker's output."""
        path = self.backend.pod_path(run, "shout", attempt)
        self.until_said(run, "as worker 0", attempt)
        return path

    def until_said(self, run: Run, text: str, attempt: int = 0) -> None:
        """Return when the step's log has this."""
        self.controlled.wait(lambda: text in self.log(run, attempt), lambda: self.log(run, attempt), 90)

    def until_ended(self, run: Run, attempt: int = 0) -> tuple[str, str]:
        """(phase of the run's Workflow, log of the step's attempt) at the end."""
        workflow = self.backend.until_ended(run)
        return str(workflow["status"]["phase"]), self.log(run, attempt)

    def log(self, run: Run, attempt: int = 0) -> str:
        """Of the step's pod; "" while it has none."""
        try:
            pod = self.backend.pod(run, "shout", attempt if self._repeats else None)
            return self.controlled.cluster.container_log(self.team, pod, "main")
        except ApiError:
            return ""

    def jobs(self) -> dict[str, dict[str, Any]]:
        return {job["metadata"]["name"]: job for job in self.api.items(jobs_of(self.team))}


def shout(*more: str, python: str = sys.executable) -> list[str]:
    model = "{{$.outputs.artifacts['model'].path}}"
    return [python, "-u", "-c", SCRIPT + "\n".join(more), DATA, model]


def test_a_steps_worker_runs_in_a_pod_of_its_own_and_its_artifacts_are_relayed(controlled: Controlled) -> None:
    steps = Steps(controlled, shout())
    controlled.start("--page-url=https://kubeflow.example.org/gpuquota/")
    phase, log = steps.until_ended(steps.run())
    assert phase == "Succeeded", log
    (job,) = steps.jobs()
    assert f"the job's page: https://kubeflow.example.org/gpuquota/jobs/{steps.team}/{job}" in log
    assert f"[0] reading {DATA} as worker 0" in log
    assert f"{MODEL}: HELLO" in log, log
    assert "gpuquota: succeeded after" in log
    worker = steps.result_worker()
    assert worker["spec"]["containers"][0]["image"] == IMAGE


def test_a_step_that_needs_more_than_half_a_node_runs(controlled: Controlled) -> None:
    (node,) = controlled.cluster.api.items("/api/v1/nodes")
    most = f"{int(node['status']['allocatable']['cpu']) * 750}m"
    steps = Steps(controlled, shout(), cpu=most)
    controlled.start()
    run = steps.run()
    phase, log = steps.until_ended(run)
    assert phase == "Succeeded", log
    worker = steps.result_worker()
    assert worker["spec"]["containers"][0]["resources"]["requests"]["cpu"] == most
    launcher = steps.api.get(steps.backend.pod_path(run, "shout"))
    main = next(one for one in launcher["spec"]["containers"] if one["name"] == "main")
    assert main["resources"]["requests"] == {"cpu": "50m", "memory": "64Mi"}


def test_a_claim_that_one_pod_alone_may_use_is_the_workers(controlled: Controlled, tmp_path: Path) -> None:
    steps = Steps(controlled, shout(f"pathlib.Path('{CLAIM}/model').write_text('kept')"), claim="data")
    folder = tmp_path / "volume"
    folder.mkdir()
    once = {"accessModes": ["ReadWriteOncePod"], "storageClassName": ""}
    volume = {"hostPath": {"path": str(folder)}, "capacity": {"storage": "1Gi"}, **once}
    bound = {"resources": {"requests": {"storage": "1Gi"}}, "volumeName": steps.team, **once}
    steps.api.create("/api/v1/persistentvolumes", {"metadata": {"name": steps.team}, "spec": volume})
    claims = f"/api/v1/namespaces/{steps.team}/persistentvolumeclaims"
    steps.api.create(claims, {"metadata": {"name": "data"}, "spec": bound})
    controlled.start()
    phase, log = steps.until_ended(steps.run())
    assert phase == "Succeeded", log
    assert (folder / "model").read_text() == "kept"


@pytest.fixture(scope="module")
def launchers_image(kubelet_cluster: DevCluster) -> str:
    """Load the image that images/launcher describes, half a gigabyte, and return its name."""
    kubelet_cluster.import_image(built_or_skip("launcher"))
    return f"docker.io/kfp-gpuquota/launcher:{__version__}"


def test_the_launcher_runs_from_its_own_image_and_the_worker_in_one_that_has_python_only(
    controlled: Controlled, launchers_image: str
) -> None:
    controlled.cluster.import_image(built_or_skip("base"))
    image = built_images.base_name()
    seen = "import importlib.util; print('runtime', importlib.util.find_spec('elastic_runtime') is not None)"
    steps = Steps(controlled, shout(seen, python="python3"), image, launchers_image)
    controlled.start()
    phase, log = steps.until_ended(steps.run())
    assert phase == "Succeeded", log
    assert "[0] runtime True" in log
    assert f"{MODEL}: HELLO" in log, log
    worker = steps.result_worker()
    assert worker["spec"]["containers"][0]["image"] == image


class RestrictedSteps(Steps):
    """Steps of a user without rights; `read_only`: on a root file system that is read-only, with the author's /tmp."""

    read_only = False

    def dressed(self, pod: dict[str, Any]) -> dict[str, Any]:
        """The pod as pod-security `restricted` demands it."""
        made = super().dressed(pod)
        (main,) = made["spec"]["containers"]
        main["securityContext"] |= {"runAsNonRoot": True, "runAsUser": 1000, "readOnlyRootFilesystem": self.read_only}
        if self.read_only:
            made["spec"]["volumes"].append({"name": "tmp", "emptyDir": {}})
            main["volumeMounts"].append({"name": "tmp", "mountPath": "/tmp"})
        return made


@pytest.mark.parametrize(
    ("read_only", "command"),
    [(False, ("/cp", DATA)), (True, ("/bin/busybox", "cp", DATA))],
    ids=["scratch", "busybox"],
)
def test_a_step_in_an_image_without_python_has_its_inputs_and_its_outputs(
    controlled: Controlled, launchers_image: str, tmp_path: Path, read_only: bool, command: tuple[str, ...]
) -> None:
    image = IMAGE
    if not read_only:
        image = "localhost/scratch:1"
        program = Path(shutil.which("busybox") or "/bin/busybox")  # and no folder, no shell and no user
        image_archive.write(tmp_path / "scratch.tar", image, {"cp": program}, [])
        controlled.cluster.import_image(tmp_path / "scratch.tar")
    model = "{{$.outputs.artifacts['model'].path}}"
    steps = RestrictedSteps(controlled, [*command, model], image, launchers_image)
    steps.read_only = read_only
    controlled.start()
    phase, log = steps.until_ended(steps.run())
    assert phase == "Succeeded", log
    assert f"{MODEL}: hello" in log, log
    worker = steps.result_worker()
    assert worker["spec"]["containers"][0]["image"] == image
    restricted = controlled.cluster.make_namespace(f"{steps.team}-restricted", RESTRICTED)
    volumes = [one for one in worker["spec"]["volumes"] if "hostPath" not in one]  # the gate of these tests
    names = {volume["name"] for volume in volumes}
    for container in (*worker["spec"]["containers"], *worker["spec"]["initContainers"]):
        container["volumeMounts"] = [one for one in container["volumeMounts"] if one["name"] in names]
    spec = {**worker["spec"], "volumes": volumes, "nodeName": None, "serviceAccountName": None, "serviceAccount": None}
    steps.api.create(f"/api/v1/namespaces/{restricted}/pods", {"metadata": {"name": "w"}, "spec": spec}, dryRun="All")


def test_a_step_whose_run_asks_for_no_gpu_runs_in_a_pod_without_a_job(controlled: Controlled) -> None:
    steps = Steps(controlled, shout())
    steps.container["args"].insert(0, "--gpus=0")
    controlled.start()
    phase, log = steps.until_ended(steps.run())
    assert phase == "Succeeded", log
    assert "gpuquota: the step asks for 0 GPUs" in log
    assert f"{MODEL}: HELLO" in log, log
    assert steps.jobs() == {}


@pytest.mark.parametrize("requeue_s", [0.02, ARGOS_REQUEUE_S])
def test_a_step_whose_pod_is_drained_goes_on_in_another_one_whenever_argo_looks(
    controlled: Controlled, requeue_s: float
) -> None:
    steps = Steps(controlled, shout(WAIT))
    controlled.start()
    run = steps.run()
    path = steps.until_working(run)
    steps.backend.requeue_s = requeue_s  # at 0.02 a pod that was Failed for a moment would be seen
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": path.rpartition("/")[2]}}
    steps.api.create(f"{path}/eviction", eviction)
    steps.until_said(run, "gpuquota: job", attempt=1)
    steps.open_gate()
    phase, log = steps.until_ended(run, attempt=1)
    assert phase == "Succeeded", log
    assert steps.node(run)["message"] == "pod deleted"
    assert f"{MODEL}: HELLO" in log, log
    (job,) = steps.jobs().values()
    assert job["status"]["attempt"] == 1


@pytest.mark.slow
def test_a_job_outlives_its_lease_while_its_run_waits_for_the_step_and_grows_after_the_take_over(
    controlled: Controlled,
) -> None:
    elastic: dict[str, Any] = {"gpus": "2", "min_gpus": "1", "max_gpus": "2", "gpus_per_worker": "1", "lease_s": "1"}
    steps = Steps(controlled, shout(WAIT), guaranteed=2, **elastic)
    session = hold_gpus(controlled, 1)
    run = steps.run()
    path = steps.until_working(run)
    with steps.backend.away():
        steps.api.delete(path, grace_s=0)  # its launcher cannot react
        time.sleep(4)  # four times the lease: the test needs this time without a renewal
    steps.until_said(run, "gpuquota: job", attempt=1)
    (job,) = steps.jobs().values()
    assert job["status"]["phase"] == "Running"
    controlled.cluster.api.delete(session, grace_s=1)
    controlled.wait(lambda: len(controlled.bound(steps.team) & set(workers_of(steps))) == 2, controlled.log)
    steps.open_gate()
    phase, log = steps.until_ended(run, attempt=1)
    assert phase == "Succeeded", log
    assert f"{MODEL}: HELLO" in log, log
    assert len(steps.jobs()) == 1


def workers_of(steps: Steps) -> list[str]:
    """Names of the pods of all jobs."""
    pods = steps.controlled.pods(steps.team)
    return [name for name, pod in pods.items() if labels.JOB in pod["metadata"]["labels"]]


@pytest.mark.slow
def test_a_step_goes_on_through_an_api_server_that_is_away(controlled: Controlled) -> None:
    steps = Steps(controlled, shout("import time", "for i in range(25): print('line', i); time.sleep(1)"))
    controlled.start()
    run = steps.run()
    steps.until_working(run)
    with controlled.cluster.away("kube-apiserver"):
        time.sleep(10)  # how long it is away is what is tested
    controlled.cluster.await_healthy()
    phase, log = steps.until_ended(run)
    assert phase == "Succeeded", log
    assert [line for line in log.splitlines() if "] line " in line] == [f"[0] line {i}" for i in range(25)], log
    assert f"{MODEL}: HELLO" in log


def test_a_failure_shows_its_exit_code_in_the_run_and_a_retry_of_the_run_starts_a_new_job(
    controlled: Controlled,
) -> None:
    again = f"pathlib.Path('{GATE}/open').exists() or sys.exit(7)"
    steps = Steps(controlled, shout(again))
    controlled.start()
    run = steps.run()
    phase, log = steps.until_ended(run)
    assert phase == "Failed", log
    assert "gpuquota: failed with exit code 7" in log
    assert steps.node(run)["message"].startswith("main: Error (exit code 1): gpuquota: failed with exit code 7")
    steps.open_gate()
    steps.backend.retry(run)
    phase, log = steps.until_ended(run)
    assert phase == "Succeeded", log
    assert f"{MODEL}: HELLO" in log, log
    first, second = sorted(steps.jobs())
    assert second == f"{first}-2"


def test_a_step_with_set_retry_and_no_defaults_of_argo_runs_again_as_a_new_job(controlled: Controlled) -> None:
    steps = Steps(controlled, shout(f"pathlib.Path('{GATE}/open').exists() or sys.exit(7)"), defaults=False, retries=1)
    controlled.start()
    run = steps.run()
    steps.until_said(run, "gpuquota: failed with exit code 7")
    steps.open_gate()
    phase, log = steps.until_ended(run, attempt=1)
    assert phase == "Succeeded", log
    assert f"{MODEL}: HELLO" in log, log
    assert steps.node(run)["phase"] == "Failed"
    first, second = sorted(steps.jobs())
    assert second == f"{first}-2"


@pytest.mark.slow  # it takes its timeout
def test_a_step_that_reaches_set_timeout_fails_and_its_job_is_cancelled(controlled: Controlled) -> None:
    steps = Steps(controlled, shout(WAIT), defaults=False, timeout_s=30)
    controlled.start()
    run = steps.run()
    phase, log = steps.until_ended(run)
    assert phase == "Failed", log
    assert "deadline" in steps.node(run)["message"]
    (name,) = steps.jobs()
    cancelled = controlled.until_phase(f"{jobs_of(steps.team)}/{name}", "Cancelled")
    assert "the step has reached its timeout of 30 s" in cancelled["status"]["message"]
    assert "gpuquota: cancelled: the step has reached its timeout of 30 s" in log
    controlled.wait(lambda: not workers_of(steps), lambda: workers_of(steps))


def test_workers_that_start_after_a_take_over_find_the_steps_file_and_all_goes_with_the_workflow(
    controlled: Controlled,
) -> None:
    steps = Steps(controlled, shout())
    session = hold_gpus(controlled, 2)
    run = steps.run()
    controlled.wait(steps.jobs, controlled.log)
    path = steps.backend.pod_path(run, "shout")
    waiting = steps.api.until(path, lambda pod: "kfp.gpuquota.dev/state" in pod["metadata"]["annotations"])
    assert waiting["metadata"]["annotations"]["kfp.gpuquota.dev/state"].startswith("waiting: ")
    assert waiting["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
    steps.api.delete(path)
    steps.until_said(run, "gpuquota: job", attempt=1)
    controlled.cluster.api.delete(session, grace_s=1)
    phase, log = steps.until_ended(run, attempt=1)
    assert phase == "Succeeded", log
    assert f"{MODEL}: HELLO" in log, log
    ((name, job),) = steps.jobs().items()
    assert job["spec"]["ttlSecondsAfterFinished"] > 0
    steps.backend.delete(run)
    controlled.cluster.api.until_gone(f"{jobs_of(steps.team)}/{name}")
    controlled.cluster.api.until_gone(f"/api/v1/namespaces/{steps.team}/secrets/{name}-relay")
    controlled.wait(lambda: not workers_of(steps), lambda: workers_of(steps))


def hold_gpus(controlled: Controlled, count: int) -> str:
    """Start the controller; a session holds so many of the two GPUs until it is deleted. Its path."""
    holder = controlled.team(guaranteed=2)
    controlled.start()
    container = session_container(count)
    session = controlled.pod(holder, "session", count, labels_={labels.KIND: "build"}, containers=[container])
    controlled.until_bound(session)
    return session


def session_container(gpus: int) -> dict[str, Any]:
    """It ends when it is asked to."""
    command = ["sh", "-c", "trap 'exit 0' TERM; sleep 600 & wait"]
    resources = {"limits": {labels.GPU_RESOURCE: str(gpus)}}
    return {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": command, "resources": resources}


def test_a_run_that_is_terminated_cancels_its_job_before_argo_has_looked_at_it(controlled: Controlled) -> None:
    steps = Steps(controlled, shout(WAIT))
    controlled.start()
    run = steps.run()
    path = steps.until_working(run)
    (name,) = steps.jobs()
    with steps.backend.away():
        steps.backend.terminate(run)
        cancelled = controlled.until_phase(f"{jobs_of(steps.team)}/{name}", "Cancelled")
        ended = steps.api.until(path, lambda pod: pod["status"]["phase"] == "Failed")
    assert cancelled["status"]["reason"] == "user"
    (status,) = ended["status"]["containerStatuses"]
    assert "cancelled" in status["state"]["terminated"]["message"]


def test_a_step_whose_image_is_missing_says_so_and_ends_with_its_run(controlled: Controlled) -> None:
    steps = Steps(controlled, shout(), image="localhost/missing:1")
    controlled.start()
    run = steps.run()
    steps.until_said(run, "gpuquota: a worker does not start: ")
    log = steps.log(run)
    assert "localhost/missing:1" in log, log
    steps.backend.terminate(run)
    assert steps.backend.until_ended(run)["status"]["phase"] == "Failed"
    controlled.wait(lambda: not workers_of(steps), lambda: workers_of(steps))


class PlainSteps(Steps):
    """Steps that are not routed, and wait at the gate for their GPU."""

    def __init__(self, controlled: Controlled, argv: list[str], **more: Any) -> None:
        super().__init__(controlled, argv, **more)
        self.container = {"image": IMAGE, "command": argv, "resources": {"limits": {labels.GPU_RESOURCE: "1"}}}

    def dressed(self, pod: dict[str, Any]) -> dict[str, Any]:
        """The pod as the webhook lets it in."""
        made = super().dressed(pod)
        return {**made, "spec": {**made["spec"], "schedulingGates": [{"name": labels.QUOTA_GATE}]}}


def test_a_plain_step_whose_borrowed_gpu_is_reclaimed_runs_again(controlled: Controlled) -> None:
    steps = PlainSteps(
        controlled, [sys.executable, "-u", "-c", f"import pathlib; print('begun')\n{WAIT}"], guaranteed=0
    )
    controlled.start()
    run = steps.run()
    steps.until_said(run, "begun")
    holder = controlled.team(guaranteed=2)
    with steps.backend.away():  # Argo does not retry a pod that it sees Failed in the moment before it is deleted
        session = controlled.pod(
            holder, "session", 2, labels_={labels.KIND: "build"}, containers=[session_container(2)]
        )
        steps.api.until_gone(steps.backend.pod_path(run, "shout", 0))
    controlled.until_bound(session)
    controlled.wait(lambda: steps.node(run).get("message") == "pod deleted", lambda: steps.node(run))
    controlled.cluster.api.delete(session, grace_s=1)
    steps.open_gate()
    phase, log = steps.until_ended(run, attempt=1)
    assert phase == "Succeeded", log
    assert "begun" in log
