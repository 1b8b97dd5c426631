"""manifests/ on a real node, with the image that images/controller describes: both replicas run, pods wait and start.

Two things differ from a cluster of people's own: the image is loaded into the node, for there is no registry to pull it
from, and there is no kube-proxy, so that the API server is given by its address. It calls the webhook through the
Service all the same, and pod-security `restricted` is enforced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.kubernetes.conftest import built_or_skip, start_or_skip
from tests.kubernetes.installation import MANIFESTS, NAMESPACE, QUOTAS
from tests.kubernetes.test_crds import quota
from tests.kubernetes.test_manifests import created_in_the_end, relative
from tools.devcluster import DevCluster, Options, control_plane, image

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("installation")

OURS = f"/api/v1/namespaces/{NAMESPACE}/pods"
PROCESSES = (("Deployment", "controller"), ("Deployment", "webhook"), ("StatefulSet", "membership"))
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/gpuquota-controller"


def kustomization(folder: Path, cluster: DevCluster) -> Path:
    """The standalone overlay, with what this machine needs patched."""
    address = cluster.api.get(f"/api/v1/nodes/{control_plane.NODE}")["status"]["addresses"][0]["address"]
    server = [
        {"name": "KUBERNETES_SERVICE_HOST", "value": address},
        {"name": "KUBERNETES_SERVICE_PORT", "value": cluster.server.rpartition(":")[2]},
    ]
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [relative(folder, MANIFESTS / "overlays" / "standalone")],
        "patches": [{"patch": yaml.safe_dump(patched(kind, name, server))} for kind, name in PROCESSES],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return folder


def patched(kind: str, process: str, server: list[dict[str, str]]) -> dict[str, Any]:
    container = {
        "name": process,
        "imagePullPolicy": "Never",
        "env": server,
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": f"gpuquota-{process}"},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }


def gpu_pod(name: str) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": image.BASE,
        "imagePullPolicy": "Never",
        "command": ["sleep", "1000"],
        "resources": {"limits": {labels.GPU_RESOURCE: "1"}},
    }
    return {"metadata": {"name": name}, "spec": {"terminationGracePeriodSeconds": 1, "containers": [container]}}


def is_running(pod: dict[str, Any]) -> bool:
    return bool(pod["status"].get("phase") == "Running")


def logs(cluster: DevCluster) -> str:
    """Return the logs of the processes, for a failing test."""
    found = []
    for _, process in PROCESSES:
        selector = f"app.kubernetes.io/name=gpuquota-{process}"
        names = [pod["metadata"]["name"] for pod in cluster.api.items(OURS, labelSelector=selector)]
        found += [cluster.container_log(NAMESPACE, name, process)[-3000:] for name in names]
    return "\n".join(found)


def holder(lease: dict[str, Any]) -> str:
    """The name of the pod that holds the Lease."""
    return str(lease["spec"]["holderIdentity"]).rpartition("_")[0]


@pytest.mark.slow
def test_the_installed_controller_gates_and_admits_and_another_replica_takes_over(tmp_path: Path) -> None:
    archive = built_or_skip("controller")
    cluster = start_or_skip(tmp_path / "cluster", Options(kubelet=True, gpus=2))
    try:
        cluster.import_image(archive)
        cluster.kubectl("apply", "-k", str(kustomization(tmp_path, cluster)))
        for kind, process in PROCESSES:
            path = f"/apis/apps/v1/namespaces/{NAMESPACE}/{kind.lower()}s/gpuquota-{process}"
            cluster.api.until(path, lambda one: one.get("status", {}).get("availableReplicas") == 2, 120.0)
        team = cluster.make_namespace("team-a", {labels.MANAGED: "true"})
        cluster.api.create(QUOTAS, quota(team, guaranteed=2))
        pods = f"/api/v1/namespaces/{team}/pods"
        made = created_in_the_end(cluster, pods, gpu_pod("first"))
        assert made["spec"]["schedulingGates"] == [{"name": labels.QUOTA_GATE}], "through the Service, with its name"
        cluster.api.until(f"{pods}/first", is_running)
        first = holder(cluster.api.get(LEASE))
        cluster.api.delete(f"{OURS}/{first}", grace_s=0)
        cluster.api.create(pods, gpu_pod("second"))  # reviews do not wait for a leader
        cluster.api.until(LEASE, lambda lease: holder(lease) != first)
        cluster.api.until(f"{pods}/second", is_running)
        assert is_running(cluster.api.get(f"{pods}/first"))
    except (AssertionError, TimeoutError) as error:
        raise type(error)(f"{error}\n{logs(cluster)}") from error
    finally:
        cluster.stop()
