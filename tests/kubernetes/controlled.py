"""A controller as a process of its own on a test's cluster, and the teams, pods and jobs that tests make for it."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests import forked, programs
from tests.kubernetes.installation import QUOTAS, batch_jobs_of, jobs_of
from tests.polling import TIMEOUT_S, until
from tools.devcluster import DevCluster, fake_nodes, image
from tools.devcluster.api import ApiError
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Object = dict[str, Any]

forked.preload(
    "tests.programs",
    "tests.kubernetes.users",
    "kfp_gpuquota.cluster.kubernetes.__main__",
    "kfp_gpuquota.cluster.kubernetes.shards.__main__",
)


class Process(Protocol):
    """A controller, of this version or of another one."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def send_signal(self, number: int) -> None:
        """Send a signal."""


LEASE = "/apis/coordination.k8s.io/v1/namespaces/gpuquota-system/leases/gpuquota-controller"


@dataclass
class Controlled:
    """A cluster, its controller, and what the test made; `close` takes everything away and checks it first."""

    cluster: DevCluster
    folder: Path
    address: str = "127.0.0.1"
    arguments: list[str] = field(default_factory=list)
    kubeconfig: Path | None = None
    teams: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    port: int = field(default_factory=free_port)  # the same for each, as behind a Service
    on_close: list[Callable[[], object]] = field(default_factory=list)

    # The controller

    def start(self, *more: str, source: Path | None = None) -> Process:
        """Start a controller, of the packages in `source` if given; returns when it leads, or stands by."""
        log = self.folder / f"controller-{len(self.processes)}.log"
        port = self.port if all(process.poll() is not None for process in self.processes) else free_port()
        arguments = [
            f"--kubeconfig={self.kubeconfig or self.cluster.kubeconfig}",
            f"--membership-port={port}",
            f"--advertise=https://{self.address}:{port}",
            f"--reservation-image={image.BASE}",
            *self.arguments,
            *more,
        ]
        process: Process
        with log.open("wb") as output:
            if source is None:
                to = output.fileno()
                process = forked.Program(programs.controller, *arguments, stdout=to, stderr=to)
            else:
                command = [sys.executable, "-m", "kfp_gpuquota.cluster.kubernetes", *arguments]
                environment = {**os.environ, "PYTHONPATH": str(source)}
                process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=source)
        self.processes.append(process)
        self.wait(lambda: _is_ready(process, log), log.read_text)
        return process

    def kill(self) -> None:
        """SIGKILL the newest controller."""
        self.processes[-1].kill()
        self.processes[-1].wait()

    def stop(self) -> None:
        """End all controllers as a kubelet does."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(TIMEOUT_S)

    def log(self) -> str:
        """Return the log of the controllers."""
        return "\n".join(log.read_text() for log in sorted(self.folder.glob("controller-*.log")))

    # What a test makes

    def add_nodes(self, count: int, gpus: int = 8) -> list[str]:
        """Fake nodes of this test's own: a pod of an earlier one that is still being deleted is on none of them."""
        taken = [n["metadata"]["name"] for n in self.cluster.api.items("/api/v1/nodes")]
        taken += [pod["spec"].get("nodeName", "") for pod in self.cluster.api.items("/api/v1/pods")]
        first = max((int(n.removeprefix("fake-")) + 1 for n in taken if n.startswith("fake-")), default=0)
        fake_nodes.add(self.cluster.api, count, gpus, first)
        made = [f"fake-{n}" for n in range(first, first + count)]
        for name in made:
            self.cluster.api.until(f"/api/v1/nodes/{name}", lambda node: not node["spec"].get("taints"))
        self.nodes += made
        return made

    def team(self, prefix: str = "team", **quota: object) -> str:
        """A namespace with a quota."""
        name = self.cluster.make_namespace(f"{prefix}-{uuid.uuid4().hex[:6]}")
        self.cluster.api.create(
            QUOTAS, {"apiVersion": labels.API_VERSION, "kind": "GpuQuota", "metadata": {"name": name}, "spec": quota}
        )
        self.teams.append(name)
        return name

    def borrower_and_owner(self, gpus: int) -> tuple[str, str]:
        """A team that borrows, and the owner of all GPUs of a new node."""
        self.add_nodes(1, gpus)
        return self.team("borrower", guaranteed=0), self.team("owner", guaranteed=gpus)

    def pod(self, team: str, name: str, gpus: int = 1, **more: Any) -> str:
        """Create a pod, gated as the webhook would gate it; its path."""
        body = pod_body(name, gpus, **more)
        self.cluster.api.create(f"/api/v1/namespaces/{team}/pods", body)
        return f"/api/v1/namespaces/{team}/pods/{name}"

    def job(self, team: str, name: str, template: Object | None = None, **spec: object) -> str:
        """Create an ElasticJob; its path."""
        body = {
            "apiVersion": labels.API_VERSION,
            "kind": "ElasticJob",
            "metadata": {"name": name, "namespace": team},
            "spec": {"template": template or {"spec": {"containers": [{"name": "main", "image": "none"}]}}, **spec},
        }
        self.cluster.api.create(jobs_of(team), body)
        return f"{jobs_of(team)}/{name}"

    # What a test sees

    def pods(self, team: str) -> dict[str, Object]:
        """A team's pods by name."""
        return {p["metadata"]["name"]: p for p in self.cluster.api.items(f"/api/v1/namespaces/{team}/pods")}

    def bound(self, team: str) -> set[str]:
        """Names of its pods that have a node and are not ending."""
        return {name for name, pod in self.pods(team).items() if holds(pod) and not is_leaving(pod)}

    def waiting(self, team: str) -> set[str]:
        """Names of its pods that are gated."""
        return {name for name, pod in self.pods(team).items() if pod["spec"].get("schedulingGates")}

    def wait(self, condition: Callable[[], object], what: object = "", seconds: float = TIMEOUT_S) -> None:
        """Return when it holds."""
        until(condition, what, seconds)

    def until(self, path: str, condition: Callable[[Object], object], seconds: float = TIMEOUT_S) -> Object:
        """The object, as soon as it is so."""
        try:
            return self.cluster.api.until(path, condition, seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.log()[-6000:]}") from None

    def until_bound(self, path: str) -> Object:
        """The pod, once it has a node."""
        return self.until(path, holds)

    def until_phase(self, path: str, phase: str, seconds: float = TIMEOUT_S) -> Object:
        """The ElasticJob, once it is there."""
        return self.until(path, lambda job: job.get("status", {}).get("phase") == phase, seconds)

    def finish(self, path: str, exit_code: int = 0) -> None:
        """Let a pod of a fake node end, once its container has a status."""
        pod = self.until(path, lambda one: one["status"].get("containerStatuses"))
        ended = {"terminated": {"exitCode": exit_code, "reason": "Completed" if exit_code == 0 else "Error"}}
        statuses = [{**s, "ready": False, "state": ended} for s in pod["status"]["containerStatuses"]]
        status = {"phase": "Failed" if exit_code else "Succeeded", "containerStatuses": statuses}
        self.cluster.api.patch(f"{path}/status", {"status": status})

    # The end

    def check(self) -> None:
        """What holds at all times: no node holds more than it has, no team more than its limit."""
        pods = self.cluster.api.items("/api/v1/pods")
        for node in self.cluster.api.items("/api/v1/nodes"):
            here = [p for p in pods if p["spec"].get("nodeName") == node["metadata"]["name"] and not is_over(p)]
            sent = [p for p in here if labels.OPENED not in p["metadata"].get("annotations", {})]
            devices = [d for p in sent if gpus_of(p) for d in _devices(p)]
            assert len(devices) == len(set(devices)), (node["metadata"]["name"], devices)
            assert sum(map(gpus_of, here)) <= int(node["status"]["allocatable"].get(labels.GPU_RESOURCE, "0"))
        for quota in self.cluster.api.items(QUOTAS):
            team = quota["metadata"]["name"]
            held = sum(gpus_of(p) for p in pods if p["metadata"]["namespace"] == team and holds(p) and not is_over(p))
            assert held <= quota["spec"].get("limit", held), (team, held)

    def close(self) -> None:
        """End the controllers, and take away what was made."""
        for end in self.on_close:
            end()
        try:
            self.check()
        finally:
            self.stop()
            for team in list(self.teams):
                self.remove(team)
            for node in self.nodes:
                self.cluster.api.delete(f"/api/v1/nodes/{node}")

    def remove(self, team: str) -> None:
        """Delete a team with all that it has."""
        self.teams.remove(team)
        for job in self.cluster.api.items(batch_jobs_of(team)):  # first: its controller would create its pods again
            self.cluster.api.delete(f"{batch_jobs_of(team)}/{job['metadata']['name']}?propagationPolicy=Background")
        for job in self.cluster.api.items(jobs_of(team)):
            self.cluster.api.delete(f"{jobs_of(team)}/{job['metadata']['name']}")
        for name, pod in self.pods(team).items():
            path = f"/api/v1/namespaces/{team}/pods/{name}"
            if pod["metadata"].get("finalizers"):  # of a test that has failed: its GPUs would be held in all others
                with suppress(ApiError):  # its Job's controller was faster
                    self.cluster.api.patch(path, {"metadata": {"finalizers": []}})
            self.cluster.api.delete(path, 0)
        self.cluster.api.delete(f"{QUOTAS}/{team}")
        self.cluster.api.delete(f"/api/v1/namespaces/{team}")


def pod_body(
    name: str,
    gpus: int = 1,
    *,
    gated: bool = True,
    labels_: Object | None = None,
    annotations: Object | None = None,
    owner: Object | None = None,
    **spec: Any,
) -> Object:
    """A pod that asks for GPUs."""
    return {
        "metadata": {
            "name": name,
            "labels": labels_ or {},
            **({"annotations": annotations} if annotations else {}),
            **({"ownerReferences": [owner]} if owner else {}),
        },
        "spec": {
            **({"schedulingGates": [{"name": labels.QUOTA_GATE}]} if gated else {}),
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {"name": "main", "image": "none", "resources": {"limits": {labels.GPU_RESOURCE: str(gpus)}}}
            ],
            **spec,
        },
    }


def holds(pod: Object) -> bool:
    """kube-scheduler has bound it."""
    return bool(pod["spec"].get("nodeName"))


def is_leaving(pod: Object) -> bool:
    """It is being deleted."""
    return "deletionTimestamp" in pod["metadata"]


def is_over(pod: Object) -> bool:
    """Return whether the pod has ended."""
    return pod["status"].get("phase") in {"Succeeded", "Failed"}


def gpus_of(pod: Object) -> int:
    """GPUs that it asks for."""
    limits = (c.get("resources", {}).get("limits", {}) for c in pod["spec"]["containers"])
    return sum(int(one.get(labels.GPU_RESOURCE, "0")) for one in limits)


def _devices(pod: Object) -> list[str]:
    annotations = pod["metadata"].get("annotations", {})
    noted = annotations.get(labels.DEVICES, "")
    here = annotations.get(labels.RESERVED_ON, pod["spec"]["nodeName"]) == pod["spec"]["nodeName"]
    return noted.split(",") if noted and here else []


def _is_ready(process: Process, log: Path) -> bool:
    text = log.read_text()
    assert process.poll() is None, text
    found = re.search(r"metrics and probes on port (\d+)", text)
    if found is None:
        return False
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
