"""GPUs that are shared on a real kubelet: real containers, simulated devices, the node's agent as a process."""

from __future__ import annotations

import re
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml  # type: ignore[import-untyped]

from elastic_runtime.process.simulated_memory import create_device, entries
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.sharing import reservation_pods
from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient
from tests import forked, programs
from tests.kubernetes.conftest import address_of
from tests.kubernetes.controlled import Controlled, holds
from tests.kubernetes.sharing import config_of, reservations, sharing_pod
from tests.kubernetes.test_elastic_job import training
from tests.kubernetes.users import connection_of
from tools.devcluster import image
from tools.devcluster.node import host_python

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.devcluster import DevCluster
    from tools.devcluster.api import Api

pytestmark = pytest.mark.slow  # on a real node


TOTAL = 16_000
REPOSITORY = Path(__file__).parents[2]
NODE = "/api/v1/nodes/real-0"
AGENTS = f"/api/v1/namespaces/{reservation_pods.AGENTS_NAMESPACE}/pods"


# These tests fill a device to the last MiB: nothing of it is reserved for a driver.
POLICIES = f"/apis/{labels.API_VERSION}/quotapolicies"
ALL_MEMORY = {
    "apiVersion": labels.API_VERSION,
    "kind": "QuotaPolicy",
    "metadata": {"name": "default"},
    "spec": {"sharing": {"memoryReserve": 0}},
}


@dataclass
class Node:
    """The real node with two simulated GPUs, a controller, and an agent where a test starts one."""

    controlled: Controlled
    folder: Path
    team: str = ""
    agents: list[forked.Program] = field(default_factory=list)

    @property
    def api(self) -> Api:
        return self.controlled.cluster.api

    def run(self, name: str, share: dict[str, str], *command: str, **spec: Any) -> str:
        """Create a sharing pod that runs this machine's Python; return its path. Simulated devices use its pid."""
        volumes, mounts = host_python()
        volumes.append({"name": "devices", "hostPath": {"path": str(self.folder)}})
        container = {
            "imagePullPolicy": "Never",
            "command": [sys.executable, "-m", "tests.kubernetes.borrower", *command],
            "workingDir": str(REPOSITORY),
            "env": [{"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}],
            "volumeMounts": [*mounts, {"name": "devices", "mountPath": str(self.folder)}],
        }
        body = sharing_pod(
            name,
            share,
            image=image.BASE,
            container=container,
            volumes=volumes,
            hostPID=True,
            restartPolicy="Never",
            **spec,
        )
        self.api.create(f"/api/v1/namespaces/{self.team}/pods", body)
        return self.path(name)

    def path(self, name: str) -> str:
        return f"/api/v1/namespaces/{self.team}/pods/{name}"

    def log(self, name: str) -> str:
        return self.controlled.cluster.container_log(self.team, name, "main")

    def used(self, gpu: str = "SIM-0") -> list[int]:
        """What living processes hold of a device."""
        return sorted(mib for _, mib in entries(self.folder / gpu) if mib)

    def until(self, condition: Any) -> None:
        text = lambda: f"{self.used()}; {self.controlled.log()[-3000:]}; {self.agent_log()}"  # noqa: E731
        self.controlled.wait(condition, text)

    def start_agent(self, *options: str) -> forked.Program:
        """Start an agent beside the kubelet, and its pod, by which the controller detects it."""
        log = self.folder.parent / f"agent-{len(self.agents)}.log"
        with log.open("wb") as output:
            process = forked.Program(
                programs.node_agent,
                "--node=real-0",
                f"--kubeconfig={self.controlled.cluster.kubeconfig}",
                f"--kubelet-root={self.controlled.cluster.layout.sockets / 'kubelet'}",
                f"--simulated={self.folder}",
                *options,
                stdout=output.fileno(),
                stderr=output.fileno(),
            )
        self.agents.append(process)
        self.controlled.wait(lambda: "on node real-0 it" in self.agent_log(), self.agent_log)
        return process

    def note_agent(self) -> None:
        """A stand-in for the DaemonSet's pod."""
        container = {"name": "main", "image": image.BASE, "imagePullPolicy": "Never", "command": ["sleep", "100000"]}
        named = {"name": "node-agent", "labels": {"app.kubernetes.io/name": "gpuquota-node-agent"}}
        spec = {"nodeName": "real-0", "terminationGracePeriodSeconds": 1, "containers": [container]}
        self.api.create(AGENTS, {"metadata": named, "spec": spec})

    def agent_log(self) -> str:
        return "\n".join(log.read_text() for log in sorted(self.folder.parent.glob("agent-*.log")))

    def events(self, name: str) -> list[str]:
        found = self.api.items(f"/api/v1/namespaces/{self.team}/events")
        return [f"{one['reason']}: {one['message']}" for one in found if one["involvedObject"]["name"] == name]

    def close(self) -> None:
        for process in self.agents:
            process.kill()
            process.wait()
        for pod in self.api.items(AGENTS):
            if pod["metadata"]["name"] == "node-agent":
                self.api.delete(f"{AGENTS}/node-agent", 0)
        for name in self.controlled.pods(self.team):
            self.api.delete(self.path(name), 0)
        self.controlled.wait(lambda: not reservations(self.controlled))
        self.controlled.close()
        self.api.patch(NODE, {"metadata": {"annotations": {labels.SIMULATED: None}}})
        self.api.delete(f"{POLICIES}/default")


@pytest.fixture
def node(kubelet_system: DevCluster, tmp_path: Path) -> Iterator[Node]:
    controlled = Controlled(kubelet_system, tmp_path, address=address_of(kubelet_system))
    folder = tmp_path / "devices"
    names = ["SIM-0", "SIM-1"]
    for name in names:
        create_device(folder / name, TOTAL)
    devices = ",".join(str(folder / name) for name in names)
    kubelet_system.api.patch(NODE, {"metadata": {"annotations": {labels.SIMULATED: devices}}})
    kubelet_system.api.create(POLICIES, ALL_MEMORY)
    running = Node(controlled, folder, controlled.team(guaranteed=2))
    controlled.start()
    yield running
    running.close()


def test_two_sharers_see_one_gpu_and_a_third_pod_has_it_whole_only_when_they_have_ended(node: Node) -> None:
    half = {"gpu-fraction": "0.5"}
    paths = [node.run(name, half, "take", "0.1") for name in ("first", "second")]
    node.until(lambda: node.used() == [1600, 1600])
    assert {node.log(name).split()[1] for name in ("first", "second")} == {"SIM-0"}
    ((_, reservation),) = reservations(node.controlled).items()
    assert reservation["status"]["initContainerStatuses"][0]["state"]["terminated"]["message"] == "SIM-0"
    assert all(config_of(node.controlled, path)["CUDA_VISIBLE_DEVICES"] == "SIM-0" for path in paths)
    assert labels.GPU_RESOURCE not in str(node.api.get(paths[0])["spec"])
    container = {
        "name": "main",
        "image": image.BASE,
        "imagePullPolicy": "Never",
        "command": ["sleep", "1000"],
        "resources": {"limits": {labels.GPU_RESOURCE: "1"}},
    }
    node.controlled.until_bound(node.controlled.pod(node.team, "beside", containers=[container]))
    later = node.controlled.pod(node.team, "later", containers=[container])
    # kube-scheduler, independent of us, finds no GPU either
    foreign = node.controlled.cluster.make_namespace("foreign")
    body = {"metadata": {"name": "alone"}, "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]}}
    node.api.create(f"/api/v1/namespaces/{foreign}/pods", body)
    alone = f"/api/v1/namespaces/{foreign}/pods/alone"
    node.controlled.until(alone, lambda pod: "Insufficient nvidia.com/gpu" in str(pod["status"]))
    node.api.delete(alone, 0)
    node.api.delete(paths[0])
    node.api.until_gone(paths[0])
    assert not holds(node.api.get(later))
    assert reservations(node.controlled)
    node.api.delete(paths[1])
    node.controlled.until(later, lambda pod: pod["status"].get("phase") == "Running")
    assert not reservations(node.controlled)


def test_a_borrower_gives_back_what_a_newcomer_has_requested_before_that_starts(node: Node) -> None:
    node.start_agent("--killer")
    node.note_agent()
    node.run("trainer", {"gpu-fraction": "0.25", "gpu-fraction-limit": "0.8"}, "listen")
    node.until(lambda: node.used() == [0.8 * TOTAL])
    node.until(lambda: ledger_of(node) == {"trainer": (0.8 * TOTAL, 0.25 * TOTAL, 0.8 * TOTAL, True)})
    owner = node.run("owner", {"gpu-fraction": "0.75"}, "take", "0.75")
    node.until(lambda: node.used() == [0.25 * TOTAL, 0.75 * TOTAL])
    assert node.api.get(node.path("trainer"))["status"]["phase"] == "Running"
    node.api.delete(owner, 0)
    node.until(lambda: node.used() == [0.8 * TOTAL])


def ledger_of(node: Node) -> dict[str, tuple[int, int, int, bool]]:
    """What `gpuquota top --gpus` shows: by pod (used, request, limit, listens)."""
    (view,) = KubernetesClient(connection_of(node.controlled.cluster.kubeconfig)).list_nodes()
    return {one.job: (one.used_mib, one.request_mib, one.limit_mib, one.listens) for one in view.shares}


def test_one_that_does_not_listen_loses_the_process_and_keeps_the_pod(node: Node) -> None:
    node.start_agent("--killer", "--term-s=0.5")
    node.note_agent()
    node.run("deaf", {"gpu-fraction": "0.25", "gpu-fraction-limit": "0.8"}, "waste", "0.8")
    node.until(lambda: node.used() == [0.8 * TOTAL])
    node.run("owner", {"gpu-fraction": "0.75"}, "take", "0.75")
    node.until(lambda: node.used() == [0.75 * TOTAL])
    assert node.api.get(node.path("deaf"))["status"]["phase"] == "Running"
    node.until(lambda: "child ended by signal 15" in node.log("deaf"))
    node.until(lambda: node.events("deaf"))
    (reported,) = [event for event in node.events("deaf") if event.startswith("GpuMemoryReclaimed")]
    over = "in container main was ended: it held 8800Mi of GPU memory above its request"
    assert re.fullmatch(
        rf"GpuMemoryReclaimed: its process \d+ {over}, which pod {node.team}/owner has asked for", reported
    )
    assert f'gpuquota_gpu_memory_over_mib_total{{namespace="{node.team}",pod="deaf"}} 8800.0' in scraped(node)


def scraped(node: Node) -> str:
    """The agent's metrics."""
    found = re.search(r"metrics and probes on port (\d+)", node.agent_log())
    assert found
    with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/metrics") as answer:
        return str(answer.read().decode())


def test_with_the_killer_off_the_newcomer_waits_and_is_told_for_what(node: Node) -> None:
    node.start_agent()
    assert "it sends GPU memory limits to workloads that listen; ends no process" in node.agent_log()
    node.note_agent()
    node.run("deaf", {"gpu-fraction": "0.25", "gpu-fraction-limit": "0.8"}, "take", "0.8")
    node.until(lambda: node.used() == [0.8 * TOTAL])
    owner = node.run("owner", {"gpu-fraction": "0.75"}, "take", "0.75")
    node.until(lambda: any("would be ended, were the killer on" in event for event in node.events("deaf")))
    assert node.api.get(owner)["spec"]["schedulingGates"]
    node.until(lambda: any("WaitsForGpuMemory" in event for event in node.events("owner")))
    node.api.delete(node.path("deaf"), 0)
    node.until(lambda: node.used() == [0.75 * TOTAL])


def test_an_agent_and_a_controller_that_are_killed_find_everything_again(node: Node) -> None:
    agent = node.start_agent("--killer")
    node.note_agent()
    node.run("trainer", {"gpu-fraction": "0.25", "gpu-fraction-limit": "0.8"}, "listen")
    node.until(lambda: node.used() == [0.8 * TOTAL])
    agent.kill()
    node.controlled.kill()
    owner = node.run("owner", {"gpu-fraction": "0.75"}, "take", "0.75")
    node.controlled.start()
    node.until(lambda: "owner" in str(reservations(node.controlled)))
    assert node.api.get(owner)["spec"]["schedulingGates"], "nobody has said that its memory is free"
    node.start_agent("--killer")
    node.until(lambda: node.used() == [0.25 * TOTAL, 0.75 * TOTAL])
    assert node.api.get(node.path("trainer"))["status"]["phase"] == "Running"


def test_a_real_training_gives_memory_back_between_two_steps_and_goes_on(node: Node) -> None:
    node.start_agent("--killer")
    node.note_agent()
    template = training(100_000)
    pod = template["spec"]
    pod["hostPID"] = True
    pod["volumes"].append({"name": "devices", "hostPath": {"path": str(node.folder)}})
    pod["containers"][0]["volumeMounts"].append({"name": "devices", "mountPath": str(node.folder)})
    spec = {"gpuFraction": 0.25, "gpuFractionLimit": 0.8, "gracePeriodSeconds": 2}
    job = node.controlled.job(node.team, "digits", template, **spec)
    node.controlled.until(job, lambda one: _steps(one) > 20)
    node.until(lambda: node.used() == [0.8 * TOTAL])
    owner = node.run("owner", {"gpu-fraction": "0.75"}, "take", "0.75")
    node.until(lambda: node.used() == [0.25 * TOTAL, 0.75 * TOTAL])
    yielded = _steps(node.api.get(job))
    node.controlled.until(job, lambda one: _steps(one) > yielded + 20)
    node.api.delete(owner)
    node.until(lambda: node.used() == [0.8 * TOTAL])
    status = node.api.get(job)["status"]
    assert (status["restarts"], status["evictions"], status["phase"]) == (0, 0, "Running")
    node.api.delete(job)


def _steps(job: dict[str, Any]) -> int:
    return int((job.get("status", {}).get("progress") or {}).get("step", 0))


def daemon_set(node: Node, component: str) -> list[dict[str, Any]]:
    """What a component installs, with what this machine needs: its own Python, devices, kubelet and API server."""
    rendered = node.controlled.cluster.kubectl("kustomize", str(REPOSITORY / "manifests" / "components" / component))
    objects = [one for one in yaml.safe_load_all(rendered) if one["kind"] != "Namespace"]  # others use it, too
    (found,) = [one for one in objects if one["kind"] == "DaemonSet"]
    spec, root = found["spec"]["template"]["spec"], node.controlled.cluster.layout.sockets / "kubelet"
    (container,) = spec["containers"]
    volumes, mounts = host_python()
    container |= {"image": image.BASE, "imagePullPolicy": "Never", "workingDir": str(REPOSITORY)}
    container["command"][0] = sys.executable
    container["args"] += [f"--simulated={node.folder}", f"--kubelet-root={root}"]
    container["env"] += [
        {"name": "KUBERNETES_SERVICE_HOST", "value": node.controlled.address},
        {"name": "KUBERNETES_SERVICE_PORT", "value": node.controlled.cluster.server.rpartition(":")[2]},
        {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
    ]
    container["volumeMounts"] = [
        *mounts,
        {"name": "pods", "mountPath": f"{root}/pods"},
        {"name": "devices", "mountPath": str(node.folder)},
    ]
    pods, devices = {"path": f"{root}/pods"}, {"path": str(node.folder)}
    spec["volumes"] = [*volumes, {"name": "pods", "hostPath": pods}, {"name": "devices", "hostPath": devices}]
    return objects


def test_the_daemon_set_has_the_rights_that_it_needs_and_the_killer_is_a_component_of_its_own(node: Node) -> None:
    cluster = node.controlled.cluster
    manifest = yaml.safe_dump_all(daemon_set(node, "node-agent-killer"))
    cluster.kubectl("apply", "-f", "-", stdin=manifest)
    try:
        path = "/apis/apps/v1/namespaces/gpuquota-node-agents/daemonsets/gpuquota-node-agent"
        node.controlled.until(path, lambda one: one.get("status", {}).get("numberReady") == 1)
        node.run("trainer", {"gpu-fraction": "0.25", "gpu-fraction-limit": "0.6"}, "listen")
        node.run("deaf", {"gpu-fraction": "0.25", "gpu-fraction-limit": "0.8"}, "waste", "0.3")
        node.until(lambda: node.used() == [0.3 * TOTAL, 0.6 * TOTAL])
        node.run("owner", {"gpu-fraction": "0.5"}, "take", "0.5")
        node.until(lambda: node.used() == [0.25 * TOTAL, 0.5 * TOTAL])
        assert node.api.get(node.path("trainer"))["status"]["phase"] == "Running"
        node.until(lambda: any("in container main was ended" in event for event in node.events("deaf")))
    except AssertionError as error:
        (pod,) = node.api.items(AGENTS)
        log = cluster.container_log("gpuquota-node-agents", pod["metadata"]["name"], "agent")
        raise AssertionError(f"{error}\n{log[-4000:]}") from None
    finally:
        cluster.kubectl("delete", "--wait=false", "-f", "-", stdin=manifest)
