"""`gpuquota pipeline run --kubeflow` on a real node: kubectl's port forward, and a token of the Profile's account."""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tests.dsl
from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls
from kfp_gpuquota.dsl.pipelines.kfp_server import KfpServer
from kfp_gpuquota.dsl.pipelines.pipeline_file import parse
from kfp_gpuquota.dsl.pipelines.port_forward import PORT, forwarded, profile_token
from kfp_gpuquota.errors import ClusterUnavailableError
from tests.dsl.kfp_server import TOKEN
from tests.kubernetes.users import connection_of
from tools.devcluster import binaries
from tools.devcluster.node import host_python

if TYPE_CHECKING:
    from tools.devcluster import DevCluster

IMAGE = "localhost/base:1"
GOLDEN = Path(str(tests.dsl.__file__)).parent / "golden" / "lightweight.yaml"


def serving_pod(namespace: str) -> dict[str, Any]:
    volumes, mounts = host_python()
    container = {
        "name": "server",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": [sys.executable, "-m", "tests.dsl.kfp_server", "0.0.0.0", str(PORT)],
        "workingDir": str(Path.cwd()),
        "volumeMounts": mounts,
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
    }
    metadata = {"name": "ml-pipeline", "namespace": namespace, "labels": {"app": "ml-pipeline"}}
    spec = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 1}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@pytest.fixture
def kubeflow(kubelet_cluster: DevCluster, monkeypatch: pytest.MonkeyPatch) -> str:
    """The namespace of a multi-user KFP server; its API is reachable by its Service only."""
    api = kubelet_cluster.api
    namespace = kubelet_cluster.make_namespace(f"kubeflow-{uuid.uuid4().hex[:8]}")
    api.create(f"/api/v1/namespaces/{namespace}/pods", serving_pod(namespace))
    service = {"selector": {"app": "ml-pipeline"}, "ports": [{"port": PORT, "targetPort": PORT}]}
    metadata = {"name": "ml-pipeline", "namespace": namespace}
    body = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service}
    api.create(f"/api/v1/namespaces/{namespace}/services", body)
    monkeypatch.setenv("PATH", str(binaries.provide()), prepend=os.pathsep)
    monkeypatch.setenv("KUBECONFIG", str(kubelet_cluster.kubeconfig))
    return namespace


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def test_a_run_is_submitted_through_a_port_forward_as_the_profiles_account(
    kubelet_cluster: DevCluster, kubeflow: str
) -> None:
    kubelet_cluster.api.until(f"/api/v1/namespaces/{kubeflow}/pods/ml-pipeline", is_ready)
    token = profile_token(Calls(connection_of(kubelet_cluster.kubeconfig), retry_for_s=10), kubeflow, "default")
    assert token.count(".") == 2
    package = parse(GOLDEN.read_text(), "lightweight.yaml")
    with forwarded("", kubeflow) as host:
        server = KfpServer(host, token=TOKEN)
        assert server.has_several_users()
        assert server.submit(package, {"epochs": 1}) == "run-1"
    with pytest.raises(ClusterUnavailableError, match="does not answer"):
        server.has_several_users()


def test_a_cluster_without_kfp_gets_kubectls_sentence(kubelet_cluster: DevCluster, kubeflow: str) -> None:
    with (
        pytest.raises(ClusterUnavailableError, match=r"services \"ml-pipeline\" not found"),
        forwarded("", "default"),
    ):
        pass
