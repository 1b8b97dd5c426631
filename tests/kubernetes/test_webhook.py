"""The webhook as the API server calls it, installed as manifests/ have it."""

from __future__ import annotations

import base64
import http.client
import ssl
import urllib.parse
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.kubernetes.installation import CONFIGURATION, await_gate, live_webhook, point_to, refused_in_the_end
from tests.polling import TIMEOUT_S
from tools.devcluster import ApiError

if TYPE_CHECKING:
    from tools.devcluster import DevCluster

GATE = [{"name": labels.QUOTA_GATE}]
MANAGED = {labels.MANAGED: "true"}


def pod(gpus: str = "1", name: str = "a", **changes: Any) -> dict[str, Any]:
    resources = {"limits": {labels.GPU_RESOURCE: gpus}} if gpus else {}
    spec = {"containers": [{"name": "main", "image": "x", "resources": resources}], **changes.pop("spec", {})}
    return {"metadata": {"name": name, **changes}, "spec": spec}


@pytest.fixture
def managed(kubeflow_cluster: DevCluster) -> str:
    """The path of the pods of a namespace under the quota."""
    name = kubeflow_cluster.make_namespace(f"m-{uuid.uuid4().hex[:8]}", MANAGED)
    return f"/api/v1/namespaces/{name}/pods"


@pytest.fixture
def unmanaged(kubeflow_cluster: DevCluster) -> str:
    """The path of the pods of a namespace that has not opted in."""
    return f"/api/v1/namespaces/{kubeflow_cluster.make_namespace(f'u-{uuid.uuid4().hex[:8]}')}/pods"


def test_a_gpu_pod_of_a_managed_namespace_is_gated(kubeflow_cluster: DevCluster, managed: str) -> None:
    assert kubeflow_cluster.api.create(managed, pod())["spec"]["schedulingGates"] == GATE
    assert "schedulingGates" not in kubeflow_cluster.api.create(managed, pod("", name="b"))["spec"]


def test_elsewhere_a_pod_is_gated_if_it_says_so(kubeflow_cluster: DevCluster, unmanaged: str) -> None:
    assert kubeflow_cluster.api.create(unmanaged, pod(labels=MANAGED))["spec"]["schedulingGates"] == GATE
    assert "schedulingGates" not in kubeflow_cluster.api.create(unmanaged, pod(name="b"))["spec"]


def test_a_share_of_a_gpu_is_gated(kubeflow_cluster: DevCluster, managed: str) -> None:
    made = kubeflow_cluster.api.create(managed, pod("", annotations={"gpu-fraction": "0.5"}))
    assert made["spec"]["schedulingGates"] == GATE


def test_the_user_reads_our_sentence(kubeflow_cluster: DevCluster, managed: str) -> None:
    with pytest.raises(ApiError) as refused:
        kubeflow_cluster.api.create(managed, pod(labels={labels.PRIORITY: "high"}))
    assert refused.value.status == 422
    assert refused.value.message.endswith(
        "gpuquota.dev/priority is 'high', but it must be a whole number, in digits"
    ), refused.value.message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/apis/batch/v1/namespaces/{}/jobs", {"kind": "Job", "spec": {"parallelism": 2, "completions": 2}}),
        ("/apis/apps/v1/namespaces/{}/statefulsets", {"kind": "StatefulSet", "spec": {"serviceName": "s"}}),
        ("/apis/apps/v1/namespaces/{}/deployments", {"kind": "Deployment", "spec": {}}),
    ],
    ids=["Job", "StatefulSet", "Deployment"],
)
def test_whoever_makes_the_pods_they_are_gated(
    kubeflow_cluster: DevCluster, managed: str, path: str, body: dict[str, Any]
) -> None:
    template = pod() | {"metadata": {"labels": {"app": "x"}}}
    if body["kind"] == "Job":
        template["spec"]["restartPolicy"] = "Never"
    else:
        body["spec"]["selector"] = {"matchLabels": {"app": "x"}}
    namespace = managed.split("/")[4]
    body = {"metadata": {"name": "a"}, "spec": {**body["spec"], "template": template}}
    kubeflow_cluster.api.create(path.format(namespace), body)
    _, found = next(iter(kubeflow_cluster.api.watch(managed)))
    assert found["spec"]["schedulingGates"] == GATE


def test_a_gated_pod_waits_with_kubernetes_own_reason(kubeflow_cluster: DevCluster, managed: str) -> None:
    kubeflow_cluster.api.create(managed, pod())
    found = kubeflow_cluster.api.until(f"{managed}/a", lambda one: one["status"].get("conditions"))
    assert found["status"]["conditions"][0]["reason"] == "SchedulingGated"


def test_while_no_replica_answers_gpu_pods_are_refused_and_others_are_not(
    kubeflow_cluster: DevCluster, managed: str
) -> None:
    url = kubeflow_cluster.api.get(CONFIGURATION)["webhooks"][0]["clientConfig"]["url"]
    point_to(kubeflow_cluster, "https://127.0.0.1:1/admission/pods")
    try:
        assert 'failed calling webhook "namespaces.gpuquota.dev"' in refused_in_the_end(
            kubeflow_cluster, managed, pod()
        )
        kubeflow_cluster.api.create(managed, pod("", name="b"))
    finally:
        point_to(kubeflow_cluster, url)
        await_gate(kubeflow_cluster)


def test_another_replica_serves_with_the_same_certificate(kubeflow_cluster: DevCluster, managed: str) -> None:
    before = kubeflow_cluster.api.get(CONFIGURATION)["webhooks"][0]["clientConfig"]
    with live_webhook(kubeflow_cluster):
        now = kubeflow_cluster.api.get(CONFIGURATION)["webhooks"][0]["clientConfig"]
        assert now["url"] != before["url"]
        assert now["caBundle"] == before["caBundle"]
        assert kubeflow_cluster.api.create(managed, pod())["spec"]["schedulingGates"] == GATE


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "", b"", 400),
        ("POST", "", b'{"request": {}}', 400),
        ("POST", "", bytes(range(256)), 400),
        ("POST", "", b" " * (9 << 20), 413),
        ("GET", "", b"", 405),
        ("POST", "/else", b"", 404),
    ],
    ids=["empty", "no uid", "no text", "too much", "GET", "elsewhere"],
)
def test_a_call_that_is_no_review_is_refused_and_the_next_one_answered(
    kubeflow_cluster: DevCluster, managed: str, method: str, path: str, body: bytes, status: int
) -> None:
    client = kubeflow_cluster.api.get(CONFIGURATION)["webhooks"][0]["clientConfig"]
    context = ssl.create_default_context(cadata=base64.b64decode(client["caBundle"]).decode())
    url = urllib.parse.urlsplit(client["url"])
    connection = http.client.HTTPSConnection(url.netloc, context=context, timeout=TIMEOUT_S)
    connection.request(method, url.path + path, body)
    assert connection.getresponse().status == status
    connection.close()
    assert kubeflow_cluster.api.create(managed, pod())["spec"]["schedulingGates"] == GATE
