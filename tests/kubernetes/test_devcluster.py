"""The cluster on which everything else here is tested: it starts, survives what is done to it, and leaves nothing."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.effort import soaked
from tests.kubernetes.conftest import REQUIRED, start_or_skip
from tests.polling import TIMEOUT_S, until
from tools.devcluster import Api, ApiError, DevCluster, Options, binaries, fake_nodes, image, processes
from tools.devcluster.__main__ import main
from tools.devcluster.layout import SUPERVISOR, Layout, free_ports

REPOSITORY = Path(__file__).parents[2]
STARTER = """
import sys
import time
from pathlib import Path
from tools.devcluster import DevCluster, Options
from tests.polling import until
DevCluster.start(Path(sys.argv[1]), Options(kwok_nodes=0))
print("started", flush=True)
sys.stdin.read()
"""


def pod(name: str, **spec: Any) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": image.BASE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", "echo it runs; sleep 1000"],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    return {"metadata": {"name": name}, "spec": {"terminationGracePeriodSeconds": 1, "containers": [container], **spec}}


def running(found: dict[str, Any]) -> bool:
    return bool(found["status"].get("phase") == "Running")


def left_over(root: Path) -> list[str]:
    """Processes that name the folder, and mounts below it."""
    lines = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, check=True, text=True).stdout.splitlines()
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return [line for line in lines + mounts if f"{root}/" in line]


def test_a_pod_is_bound_to_a_fake_node_and_runs(cluster: DevCluster, namespace: str) -> None:
    fake_nodes.add(cluster.api, count=1, gpus=8)
    try:
        pods = f"/api/v1/namespaces/{namespace}/pods"
        cluster.api.create(pods, pod("a"))
        found = cluster.api.until(f"{pods}/a", running)
        assert found["spec"]["nodeName"] == "fake-0"
        cluster.api.delete(f"{pods}/a")
        cluster.api.until_gone(f"{pods}/a")
    finally:
        cluster.api.delete("/api/v1/nodes/fake-0")


def test_a_pod_created_again_with_its_name_is_not_taken_for_the_one_before(cluster: DevCluster, namespace: str) -> None:
    fake_nodes.add(cluster.api, count=1, gpus=16)  # pods that earlier tests have left may take some for a moment
    try:
        pods, names = f"/api/v1/namespaces/{namespace}/pods", [f"a-{number}" for number in range(8)]
        for name in names:
            cluster.api.create(pods, pod(name))
            cluster.api.until(f"{pods}/{name}", running)
        uids = []
        for name in names:
            cluster.api.delete(f"{pods}/{name}", 0)
            gated = pod(name, schedulingGates=[{"name": "example.com/held"}])
            uids.append(cluster.api.create(pods, gated)["metadata"]["uid"])
        cluster.api.create(pods, pod("after"))
        cluster.api.until(f"{pods}/after", running)
        assert [cluster.api.get(f"{pods}/{name}")["metadata"]["uid"] for name in names] == uids
    finally:
        cluster.api.delete("/api/v1/nodes/fake-0")


def test_a_fake_node_goes_on_when_its_program_was_killed(cluster: DevCluster, namespace: str) -> None:
    fake_nodes.add(cluster.api, count=1, gpus=8)
    try:
        pods = f"/api/v1/namespaces/{namespace}/pods"
        cluster.kill("kwok")
        cluster.api.create(pods, pod("a"))
        cluster.api.until(f"{pods}/a", running)
    finally:
        cluster.api.delete("/api/v1/nodes/fake-0")


def test_secrets_of_the_cluster_are_its_owners_only(cluster: DevCluster) -> None:
    folder = cluster.layout.root
    for path in (cluster.kubeconfig, *folder.glob("certificates/*"), *folder.glob("kubeconfigs/*")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_who_is_impersonated_has_no_more_rights_than_they_have(cluster: DevCluster) -> None:
    alice = cluster.api.as_user("alice", "team-a", "system:authenticated")
    me = alice.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", {})["status"]["userInfo"]
    assert (me["username"], me["groups"]) == ("alice", ["team-a", "system:authenticated"])
    with pytest.raises(ApiError) as refused:
        alice.get("/api/v1/pods")
    assert refused.value.status == 403
    again = Api.of_kubeconfig(cluster.kubeconfig_of_user("alice", "team-a", "system:authenticated"))
    assert again.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", {})["status"]["userInfo"] == me


def test_a_service_account_is_itself(cluster: DevCluster, namespace: str) -> None:
    robot = Api.of_kubeconfig(cluster.kubeconfig_of_service_account(namespace, "default"))
    me = robot.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", {})["status"]["userInfo"]
    assert me["username"] == f"system:serviceaccount:{namespace}:default"


def test_kubectl_speaks_to_the_cluster(cluster: DevCluster, namespace: str) -> None:
    cluster.kubectl("create", "configmap", "a", "-n", namespace, "--from-literal=key=value")
    assert cluster.api.get(f"/api/v1/namespaces/{namespace}/configmaps/a")["data"] == {"key": "value"}


@pytest.mark.slow
@soaked
def test_a_program_that_is_away_comes_back_with_its_state_and_a_killed_supervisor_takes_all_with_it(
    tmp_path: Path, cluster: DevCluster
) -> None:
    other = cluster  # two run side by side
    cluster = start_or_skip(tmp_path / "one", Options())
    try:
        cluster.make_namespace("kept")
        with cluster.away("kube-apiserver"), pytest.raises(OSError, match="refused"):
            cluster.api.get("/api/v1/namespaces/kept")
        cluster.await_healthy()
        assert cluster.api.exists("/api/v1/namespaces/kept")
        assert not other.api.exists("/api/v1/namespaces/kept")
        cluster.kill("etcd", signal.SIGKILL)
        cluster.await_healthy()
        assert cluster.api.exists("/api/v1/namespaces/kept")
        pids = [processes.read_pid(path) for path in cluster.layout.root.glob("*.pid")]
        cluster.kill(SUPERVISOR, signal.SIGKILL)
        assert len(pids) == 5
        assert all(pid is not None and processes.await_end(pid, TIMEOUT_S) for pid in pids)
    finally:
        cluster.stop()
    assert not left_over(tmp_path)


@pytest.mark.slow
@soaked
def test_nothing_is_left_when_the_starter_is_killed(tmp_path: Path, cluster: DevCluster) -> None:
    root = tmp_path / "cluster"
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(root)], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert starter.stdout
    assert starter.stdout.readline() == b"started\n"
    supervisor = processes.read_pid(Layout(root=root).pid_file(SUPERVISOR))
    assert supervisor is not None
    starter.kill()
    starter.communicate()
    assert processes.await_end(supervisor, TIMEOUT_S)
    assert not left_over(root)


@pytest.mark.slow
def test_the_command_starts_and_ends_a_cluster(
    tmp_path: Path, cluster: DevCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "cluster"
    assert main(["up", str(folder)]) == 0
    assert capsys.readouterr().out == f"export KUBECONFIG={folder}/kubeconfig\n"
    assert main(["up", str(folder)]) == 1
    assert "a cluster runs" in capsys.readouterr().err
    assert main(["down", str(folder)]) == 0
    assert main(["down", str(folder)]) == 0
    assert not left_over(folder)


def test_a_program_that_does_not_start_is_named_with_the_end_of_its_log(tmp_path: Path, cluster: DevCluster) -> None:
    with pytest.raises(Exception, match=r"(?s)kube-apiserver did not start.*--no-such-flag"):
        DevCluster.start(tmp_path / "cluster", Options(flags={"kube-apiserver": ["--no-such-flag"]}))
    assert not left_over(tmp_path)


def test_a_container_runs_on_the_real_node_and_its_log_is_read(kubelet_cluster: DevCluster) -> None:
    namespace = kubelet_cluster.make_namespace("runs")
    pods = f"/api/v1/namespaces/{namespace}/pods"
    kubelet_cluster.api.create(pods, pod("a"))
    found = kubelet_cluster.api.until(f"{pods}/a", running)
    assert found["spec"]["nodeName"] == "real-0"
    output = until(lambda: kubelet_cluster.container_log(namespace, "a", "main"))  # it runs before it writes
    assert output == "it runs\n"
    kubelet_cluster.api.delete(f"{pods}/a")
    kubelet_cluster.api.until_gone(f"{pods}/a")


@pytest.mark.slow
@pytest.mark.xdist_group("kubelet")
def test_no_container_is_left_when_a_cluster_with_a_node_ends(tmp_path: Path) -> None:
    # in a folder with a long path: a socket's may have 107 characters at most
    cluster = start_or_skip(tmp_path / ("long" * 25) / "cluster", Options(kubelet=True))
    try:
        cluster.api.create("/api/v1/namespaces/default/pods", pod("a"))
        cluster.api.until("/api/v1/namespaces/default/pods/a", running)
        bridge = (cluster.layout.root / "bridge").read_text()
        # killed, so that the pod is not deleted: its container is removed
        cluster.kill(SUPERVISOR, signal.SIGKILL)
    finally:
        cluster.stop()
    assert not left_over(tmp_path)
    assert not Path(f"/sys/class/net/{bridge}").exists()
    assert not cluster.layout.sockets.exists()


def test_what_a_machine_lacks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    nothing = {"GPUQUOTA_CACHE": str(tmp_path)}
    assert "install Go" in binaries.missing(nothing)
    assert "\n" not in binaries.missing(nothing)
    for program in binaries.PROGRAMS:
        (tmp_path / program).touch()
    built = {**nothing, "KUBEBUILDER_ASSETS": str(tmp_path)}
    assert binaries.missing(built) == ""
    assert "install Go" in binaries.missing(built, kubelet=True)
    (tmp_path / "go").touch(mode=0o755)
    assert "apt-get install" in binaries.missing(built, kubelet=True)


def test_a_machine_that_cannot_skips_or_fails_where_it_must_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("GPUQUOTA_CACHE", str(tmp_path))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="install Go"):
        start_or_skip(tmp_path / "cluster", Options())
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match=f"{REQUIRED}=1, but .*install Go"):
        start_or_skip(tmp_path / "cluster", Options())


def test_a_pid_file_is_not_believed_about_another_process(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    processes.write_pid(path, 1)
    assert processes.read_pid(path) == 1
    path.write_text("1 12345678901\n")
    assert processes.read_pid(path) is None
    path.write_text("nonsense")
    assert processes.read_pid(path) is None
    assert processes.read_pid(tmp_path / "none") is None


def test_ports_are_free_and_no_two_the_same() -> None:
    ports = free_ports()
    values = [getattr(ports, name) for name in ports.__struct_fields__]
    assert len(set(values)) == len(values)
