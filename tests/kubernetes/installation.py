"""A control plane with everything of manifests/ installed, what of Kubeflow matters beside it, and a live webhook."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_gpuquota.cluster.kubernetes.admission import server
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import load_credentials
from kfp_gpuquota.cluster.kubernetes.client.reflector import Reflector
from kfp_gpuquota.cluster.kubernetes.objects import labels, paths
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import PolicyObject, QuotaPolicyObject
from kfp_gpuquota.cluster.kubernetes.objects.paths import QUOTA_POLICIES, WORKLOAD_POLICIES
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules
from kfp_gpuquota.cluster.kubernetes.quota.workload_policies import CurrentPolicies
from tests.polling import TIMEOUT_S
from tools.devcluster.api import JSON_PATCH, ApiError
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.devcluster import DevCluster

MANIFESTS = Path(__file__).parents[2] / "manifests"
NAMESPACE = "gpuquota-system"
KEYS = "gpuquota-keys"
QUOTAS = "/apis/gpuquota.dev/v1alpha1/gpuquotas"
ACCOUNT = "gpuquota-controller"
WEBHOOK_ACCOUNT = "gpuquota-webhook"
CONTROLLER = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/gpuquota"
PROFILES = "/apis/kubeflow.org/v1/profiles"
STOCK_ROLES = ("admin", "edit", "view")
KUBEFLOW_ROLES = ("kubeflow-admin", "kubeflow-edit", "kubeflow-view")
KUBEFLOW_LABEL = "rbac.authorization.kubeflow.org/aggregate-to-kubeflow-"


def jobs_of(namespace: str) -> str:
    """The path of a namespace's ElasticJobs."""
    return f"/apis/gpuquota.dev/v1alpha1/namespaces/{namespace}/elasticjobs"


def batch_jobs_of(namespace: str) -> str:
    """Return the path of a namespace's Jobs, Kubernetes' own."""
    return f"/apis/batch/v1/namespaces/{namespace}/jobs"


def install_kubeflow(cluster: DevCluster) -> None:
    """The kind Profile, and the roles that its owners are given, as far as quotas go."""
    plugin = {
        "type": "object",
        "properties": {
            "kind": {"type": "string"},
            "spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        },
    }
    spec = {
        "type": "object",
        "properties": {
            "owner": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            "plugins": {"type": "array", "items": plugin},
            "resourceQuotaSpec": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        },
    }
    names = {"kind": "Profile", "plural": "profiles", "singular": "profile", "listKind": "ProfileList"}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/profiles.kubeflow.org"
    cluster.api.apply(
        path,
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": "profiles.kubeflow.org"},
            "spec": {"group": "kubeflow.org", "scope": "Cluster", "names": names, "versions": [version]},
        },
    )
    cluster.api.until_served(PROFILES)
    for role in ("admin", "edit", "view"):
        cluster.api.create(
            "/apis/rbac.authorization.k8s.io/v1/clusterroles",
            {
                "metadata": {"name": f"kubeflow-{role}"},
                "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {f"{KUBEFLOW_LABEL}{role}": "true"}}]},
            },
        )
    cluster.make_namespace("kubeflow")
    account = {"kind": "ServiceAccount", "name": "profiles-controller-service-account", "namespace": "kubeflow"}
    cluster.api.create(
        f"/api/v1/namespaces/kubeflow/{account['kind'].lower()}s", {"metadata": {"name": account["name"]}}
    )
    cluster.api.create(
        "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
        {
            "metadata": {"name": "profiles-cluster-rolebinding"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [account],
        },
    )


def install(cluster: DevCluster, overlay: str) -> None:
    """Apply an overlay; returns when our kinds are served and the teams' roles have been added to."""
    cluster.kubectl("apply", "-k", str(MANIFESTS / "overlays" / overlay))
    if overlay == "kubeflow":
        cluster.kubectl("apply", "-f", str(MANIFESTS / "components" / "pipeline-runner" / "pipeline-runner.yaml"))
    cluster.api.until_served("/apis/gpuquota.dev/v1alpha1/gpuquotas")
    cluster.api.until_served("/apis/gpuquota.dev/v1alpha1/elasticjobs")
    cluster.api.until_served(WORKLOAD_POLICIES)
    roles = [*STOCK_ROLES, *(KUBEFLOW_ROLES if overlay == "kubeflow" else ())]
    for role in roles:
        cluster.api.until(f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{role}", _names_our_kinds)

    _await_policies(cluster)


def _await_policies(cluster: DevCluster) -> None:
    """Return when the API server applies our policies, which it reads about once a second."""
    worker = {
        "metadata": {"name": "worker", "labels": {"gpuquota.dev/job": "none"}},
        "spec": {"containers": [{"name": "main", "image": "none"}]},
    }
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            cluster.api.create("/api/v1/namespaces/default/pods", worker, dryRun="All")
        except ApiError as error:
            if "gpuquota-pods" in error.message:
                return
        time.sleep(0.05)
    raise TimeoutError("the policies are not gone by")


def _names_our_kinds(role: dict[str, Any]) -> bool:
    return any("gpuquota.dev" in rule.get("apiGroups", ()) for rule in role.get("rules") or ())


@contextmanager
def live_webhook(cluster: DevCluster) -> Iterator[None]:
    """Serve reviews with just the rights of the webhook's account, and have the API server send them here.

    When it ends, they go where they went before.
    """
    port = free_port()
    before = [one["clientConfig"] for one in cluster.api.get(CONFIGURATION)["webhooks"]]
    point_to(cluster, f"https://127.0.0.1:{port}{server.PATH}")
    kubeconfig = cluster.kubeconfig_of_service_account(NAMESPACE, WEBHOOK_ACCOUNT)
    started, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        async with Connection(load_credentials(str(kubeconfig), None)) as connection:
            names = (*paths.service_names(server.SERVICE, NAMESPACE), "127.0.0.1")
            certificates = server.Certificates(connection, KEYS, names)
            await certificates.refresh(time.time())
            book = CurrentPolicies()
            rules = CurrentRules()
            known = Reflector(connection, WORKLOAD_POLICIES, PolicyObject, changed=book.put, deleted=book.drop)
            ruled = Reflector(connection, QUOTA_POLICIES, QuotaPolicyObject, changed=rules.put, deleted=rules.drop)
            serving = [
                asyncio.create_task(server.serve(certificates, CONTROLLER, port, book, rules)),
                asyncio.create_task(known.run()),
                asyncio.create_task(ruled.run()),
            ]
            await known.synced.wait()
            loop.call_soon(started.set)
            await stop.wait()
            for one in serving:
                one.cancel()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert started.wait(90.0)
        await_gate(cluster)
        yield
    finally:
        if all("url" in one for one in before):
            point_to(cluster, before[0]["url"])
            await_gate(cluster)
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def await_gate(cluster: DevCluster) -> None:
    """The API server takes a moment to follow its own configuration: return when it has GPU pods gated."""
    container = {"name": "main", "image": "none", "resources": {"limits": {labels.GPU_RESOURCE: "1"}}}
    pod = {"metadata": {"name": "gate", "labels": {labels.MANAGED: "true"}}, "spec": {"containers": [container]}}
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            made = cluster.api.create("/api/v1/namespaces/default/pods", pod, dryRun="All")
            assert made["spec"]["schedulingGates"]
        except ApiError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def point_to(cluster: DevCluster, url: str) -> None:
    """Make the API server call `url` instead of the Service, which is not routed here; the authority is kept."""
    operations = []
    for index, one in enumerate(cluster.api.get(CONFIGURATION)["webhooks"]):
        known = {name: value for name, value in one["clientConfig"].items() if name == "caBundle"}
        value = {"url": url, **known}
        operations.append({"op": "replace", "path": f"/webhooks/{index}/clientConfig", "value": value})
    cluster.api.patch(CONFIGURATION, operations, JSON_PATCH)


def refused_in_the_end(cluster: DevCluster, path: str, pod: dict[str, Any]) -> str:
    """The words with which the pod is refused, once the API server follows its configuration; nothing is created."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            cluster.api.create(path, pod, dryRun="All")
        except ApiError as error:
            return error.message
        time.sleep(0.05)
    raise TimeoutError("it is taken")
