"""docs/tutorials/install.md on a real node: chart, doctor, Profile, elastic job, and nothing left after the removal.

Its images are those of images/: both replicas of each process run, pods wait and start, and another replica takes over.
Two things differ from a cluster of people's own: the image is loaded into the node, for there is no registry to pull it
from, and there is no kube-proxy, so that the API server is given by its address. It calls the webhook through the
Service all the same.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.kubernetes.conftest import built_or_skip, start_or_skip
from tests.kubernetes.installation import NAMESPACE, PROFILES, QUOTAS, install_kubeflow, jobs_of
from tests.kubernetes.test_chart import run_helm
from tests.kubernetes.test_manifests import created_in_the_end
from tests.kubernetes.test_uninstall import everything, gpuquota
from tools.chart.__main__ import CHART
from tools.devcluster import DevCluster, Options, binaries, control_plane, image

pytestmark = pytest.mark.xdist_group("installation")

OURS = f"/api/v1/namespaces/{NAMESPACE}/pods"
PROCESSES = (("Deployment", "controller"), ("Deployment", "webhook"), ("StatefulSet", "membership"))
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/gpuquota-controller"
TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorials" / "install.md"


def documents() -> list[dict[str, Any]]:
    """The YAML documents of the tutorial: the Profile and the ElasticJob."""
    return [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)]


def values(cluster: DevCluster) -> dict[str, Any]:
    """What of this machine differs from people's clusters."""
    address = cluster.api.get(f"/api/v1/nodes/{control_plane.NODE}")["status"]["addresses"][0]["address"]
    small = {"resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
    return {
        "image": {"pullPolicy": "Never"},
        "extraEnv": [
            {"name": "KUBERNETES_SERVICE_HOST", "value": address},
            {"name": "KUBERNETES_SERVICE_PORT", "value": cluster.server.rpartition(":")[2]},
        ],
        "kubeflow": {"enabled": True},
        **dict.fromkeys(("controller", "webhook", "membership"), small),
    }


@pytest.mark.slow
def test_the_tutorial_installs_runs_a_job_and_removes_everything_and_another_replica_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = built_or_skip("controller")
    cluster = start_or_skip(tmp_path / "cluster", Options(kubelet=True, gpus=2))
    try:
        cluster.import_image(archive)
        install_kubeflow(cluster)
        given = tmp_path / "values.json"
        given.write_text(json.dumps(values(cluster)))
        run_helm(
            *("install", "gpuquota", str(CHART), "--namespace=default", f"--values={given}"),
            kubeconfig=cluster.kubeconfig,
        )
        for kind, process in PROCESSES:
            path = f"/apis/apps/v1/namespaces/{NAMESPACE}/{kind.lower()}s/gpuquota-{process}"
            cluster.api.until(path, lambda one: one.get("status", {}).get("availableReplicas") == 2)
        verify(cluster, tmp_path)
        profile, job = documents()
        run_in_a_profile(cluster, tmp_path, profile, job)
        take_over(cluster, f"/api/v1/namespaces/{profile['metadata']['name']}/pods")
        replay_state(cluster, tmp_path, monkeypatch)
        code, shown = gpuquota(cluster, tmp_path, "uninstall", "--yes")
        assert code == 0, shown
        assert everything(cluster) == []
    except (AssertionError, TimeoutError) as error:
        raise type(error)(f"{error}\n{logs(cluster)}") from error
    finally:
        cluster.stop()


def take_over(cluster: DevCluster, pods: str) -> None:
    """Another replica continues when the leader's pod is gone; what runs is left alone."""
    made = created_in_the_end(cluster, pods, gpu_pod("first"))
    assert made["spec"]["schedulingGates"] == [{"name": labels.QUOTA_GATE}], "through the Service, with its name"
    cluster.api.until(f"{pods}/first", is_running)
    first = holder(cluster.api.get(LEASE))
    cluster.api.delete(f"{OURS}/{first}", grace_s=0)
    cluster.api.create(pods, gpu_pod("second"))  # reviews do not wait for a leader
    cluster.api.until(LEASE, lambda lease: holder(lease) not in {"", first})
    cluster.api.until(f"{pods}/second", is_running)
    assert is_running(cluster.api.get(f"{pods}/first"))


def gpu_pod(name: str) -> dict[str, Any]:
    """A pod that runs for as long as it may."""
    container = {
        "name": "main",
        "image": image.BASE,
        "imagePullPolicy": "Never",
        "command": ["sleep", "infinity"],
        "resources": {"limits": {labels.GPU_RESOURCE: "1"}},
    }
    return {"metadata": {"name": name}, "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]}}


def is_running(pod: dict[str, Any]) -> bool:
    """Return whether its containers run."""
    return bool(pod["status"].get("phase") == "Running")


def holder(lease: dict[str, Any]) -> str:
    """Return the name of the pod that holds the Lease."""
    return str(lease["spec"]["holderIdentity"]).rpartition("_")[0]


def logs(cluster: DevCluster) -> str:
    """Return the logs of the processes, for a failing test."""
    found = []
    for _, process in PROCESSES:
        selector = f"app.kubernetes.io/name=gpuquota-{process}"
        names = [pod["metadata"]["name"] for pod in cluster.api.items(OURS, labelSelector=selector)]
        found += [cluster.container_log(NAMESPACE, name, process)[-3000:] for name in names]
    return "\n".join(found)


def replay_state(cluster: DevCluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through kubectl's port forward to the leader's pod, which asks the API server with its account's rights."""
    monkeypatch.setenv("PATH", str(binaries.provide()), prepend=os.pathsep)
    code, shown = gpuquota(cluster, folder, "debug", "state")
    assert code == 0, shown
    (folder / "state.json").write_text(shown)
    code, shown = gpuquota(cluster, folder, "simulate", "--state", str(folder / "state.json"))
    assert "The cluster makes the same plan of this state." in shown


def verify(cluster: DevCluster, folder: Path) -> None:
    """charts/verify.sh, with the programs of this machine: doctor, a pod and an elastic job."""
    programs = f"{Path(sys.executable).parent}:{binaries.provide()}"
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "HOME": str(folder)}
    environment["PATH"] = f"{programs}:{os.environ['PATH']}"
    done = subprocess.run(
        [CHART.parent / "verify.sh", image.BASE], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "an elastic job ran" in done.stdout


def run_in_a_profile(cluster: DevCluster, folder: Path, profile: dict[str, Any], job: dict[str, Any]) -> None:
    """The team's quota comes from its Profile, and its job runs to its end."""
    team = cluster.make_namespace(profile["metadata"]["name"])  # Kubeflow makes it
    cluster.api.create(PROFILES, profile)
    cluster.api.until(f"{QUOTAS}/{team}", lambda one: one["spec"].get("limit") == 2)
    cluster.api.until(f"/api/v1/namespaces/{team}", lambda one: one["metadata"]["labels"].get(labels.MANAGED) == "true")
    main = job["spec"]["template"]["spec"]["containers"][0]
    main |= {"image": image.BASE, "imagePullPolicy": "Never"}
    cluster.api.create(jobs_of(team), job)
    path = f"{jobs_of(team)}/{job['metadata']['name']}"
    cluster.api.until(path, lambda one: one.get("status", {}).get("phase") == "Succeeded")
    assert "training on the GPU" in gpuquota(cluster, folder, "logs", "first", "-p", team)[1]
    assert team in gpuquota(cluster, folder, "list", "projects")[1]
