"""manifests/ on a real node: both replicas run as they are described, and pods wait and start through them.

Two things differ from a cluster of people's own. No image can be pulled, so that the containers run this machine's
Python and repository, mounted by hostPath, which pod-security `restricted` would forbid: it only warns here. And there
is no kube-proxy, so that the API server is given by its address; it calls the webhook through the Service all the same.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.cluster.kubernetes import labels
from tests.kubernetes.conftest import QUOTAS, start_or_skip
from tests.kubernetes.installation import MANIFESTS, NAMESPACE
from tests.kubernetes.test_crds import quota
from tests.kubernetes.test_manifests import created_in_the_end, relative
from tools.devcluster import DevCluster, Options, control_plane, image, node

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("kubelet")

OURS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SELECTOR = "app.kubernetes.io/name=gpuquota-controller"


def kustomization(folder: Path, cluster: DevCluster) -> Path:
    """The standalone overlay, with what this machine needs patched."""
    address = cluster.api.get(f"/api/v1/nodes/{control_plane.NODE}")["status"]["addresses"][0]["address"]
    volumes, mounts = node.host_python()
    container = {
        "name": "controller",
        "image": image.BASE,
        "imagePullPolicy": "Never",
        "command": [sys.executable, "-m", "kfp_gpuquota.cluster.kubernetes"],
        "workingDir": str(MANIFESTS.parent),
        "volumeMounts": mounts,
        "env": [
            {"name": "KUBERNETES_SERVICE_HOST", "value": address},
            {"name": "KUBERNETES_SERVICE_PORT", "value": cluster.server.rpartition(":")[2]},
            {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
        ],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "gpuquota-controller"},
        "spec": {"template": {"spec": {"volumes": volumes, "containers": [container]}}},
    }
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": NAMESPACE,
            "labels": {
                "pod-security.kubernetes.io/enforce": "privileged",
                "pod-security.kubernetes.io/warn": "restricted",
            },
        },
    }
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [relative(folder, MANIFESTS / "overlays" / "standalone")],
        "patches": [{"patch": yaml.safe_dump(one)} for one in (deployment, namespace)],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return folder


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
    """What the replicas said, for a test that fails."""
    names = [pod["metadata"]["name"] for pod in cluster.api.items(OURS, labelSelector=SELECTOR)]
    return "\n".join(cluster.container_log(NAMESPACE, name, "controller")[-3000:] for name in names)


def leaders(cluster: DevCluster) -> list[str]:
    """Names of the pods to which the Service of the membership leads."""
    path = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
    slices = cluster.api.items(path, labelSelector="kubernetes.io/service-name=gpuquota-membership")
    return [
        one["targetRef"]["name"]
        for part in slices
        for one in part.get("endpoints") or []
        if one["conditions"].get("ready")
    ]


def test_the_installed_controller_gates_and_admits_and_another_replica_takes_over(tmp_path: Path) -> None:
    cluster = start_or_skip(tmp_path / "cluster", Options(kubelet=True, gpus=2))
    try:
        cluster.kubectl("apply", "-k", str(kustomization(tmp_path, cluster)))
        deployment = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/gpuquota-controller"
        cluster.api.until(deployment, lambda one: one.get("status", {}).get("availableReplicas") == 2, 90.0)
        team = cluster.make_namespace("team-a", {labels.MANAGED: "true"})
        cluster.api.create(QUOTAS, quota(team, guaranteed=2))
        pods = f"/api/v1/namespaces/{team}/pods"
        made = created_in_the_end(cluster, pods, gpu_pod("first"))
        assert made["spec"]["schedulingGates"] == [{"name": labels.QUOTA_GATE}], "through the Service, with its name"
        cluster.api.until(f"{pods}/first", is_running)
        (leader,) = leaders(cluster)
        cluster.api.delete(f"{OURS}/{leader}", grace_s=0)
        cluster.api.create(pods, gpu_pod("second"))
        cluster.api.until(f"{pods}/second", is_running, timeout_s=30.0)
        assert is_running(cluster.api.get(f"{pods}/first"))
        assert leader not in leaders(cluster)
    except (AssertionError, TimeoutError) as error:
        raise AssertionError(f"{error}\n{logs(cluster)}") from error
    finally:
        cluster.stop()
