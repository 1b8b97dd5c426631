"""What an editor of a namespace tries (Kubernetes' own role `edit`, impersonated), and the answers that it gets.

The cluster has everything of manifests/ installed, and a webhook that is served with the controller's rights only.
"""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.paths import QUOTA_POLICIES
from tests.kubernetes.controlled import Controlled
from tests.kubernetes.installation import ACCOUNT, CONTROLLER, KEYS, NAMESPACE, PROFILES, QUOTAS
from tests.kubernetes.test_crds import job
from tests.kubernetes.test_rbac import denied, profile, user
from tests.kubernetes.test_webhook import MANAGED, pod
from tests.polling import until
from tools.devcluster import ApiError
from tools.devcluster.api import JSON_PATCH

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.devcluster import DevCluster
    from tools.devcluster.api import Api

DAY_S = 86_400


@pytest.fixture(scope="module")
def hostile_cluster(kubeflow_cluster: DevCluster) -> DevCluster:
    """With the policy that the controller would have created."""
    body = {"apiVersion": labels.API_VERSION, "kind": "QuotaPolicy", "metadata": {"name": "default"}, "spec": {}}
    kubeflow_cluster.api.apply(f"{QUOTA_POLICIES}/default", body)
    return kubeflow_cluster


@pytest.fixture
def namespace(hostile_cluster: DevCluster) -> str:
    return hostile_cluster.make_namespace(f"h-{uuid.uuid4().hex[:8]}", MANAGED)


@pytest.fixture
def pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


@pytest.fixture
def tenant(hostile_cluster: DevCluster, namespace: str) -> Api:
    return user(hostile_cluster, "edit", namespace)


def refused_in_the_end(tenant: Api, path: str, body: dict[str, Any]) -> str:
    """Return the message of the refusal, once the API server applies its policies."""

    def words() -> str:
        try:
            tenant.create(path, body, dryRun="All")
        except ApiError as error:
            return error.message
        return ""

    return until(words)


# Grace periods: a borrowed GPU is back within the bound


def test_a_day_of_grace_is_given_to_no_pod_that_may_borrow(tenant: Api, pods: str) -> None:
    made = tenant.create(pods, pod(spec={"terminationGracePeriodSeconds": DAY_S}))
    assert made["spec"]["terminationGracePeriodSeconds"] == 60


def test_a_day_of_grace_is_not_asked_for_by_a_deletion_or_an_eviction_either(
    hostile_cluster: DevCluster, tenant: Api, pods: str
) -> None:
    running_with_gpu(hostile_cluster, tenant, pods)
    sentence = "gracePeriodSeconds is 86400, but a pod that holds GPUs under the quota ends within 60"
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "a"},
        "deleteOptions": {"gracePeriodSeconds": DAY_S},
    }
    assert sentence in refused_in_the_end(tenant, f"{pods}/a/eviction", eviction)
    assert sentence in denied(tenant.delete, f"{pods}/a", DAY_S)
    tenant.delete(f"{pods}/a", 30)


def running_with_gpu(cluster: DevCluster, tenant: Api, pods: str) -> None:
    """Create the pod a, and admit it as the controller does."""
    tenant.create(pods, pod())
    operations = [
        {"op": "remove", "path": "/spec/schedulingGates/0"},
        {"op": "add", "path": "/metadata/annotations", "value": {labels.DEVICES: "0"}},
    ]
    cluster.api.as_user(CONTROLLER).patch(f"{pods}/a", operations, JSON_PATCH)
    cluster.api.until(f"{pods}/a", lambda one: one["status"].get("phase") == "Running")


def test_the_note_of_a_reclaim_is_the_controllers_to_write(tenant: Api, pods: str) -> None:
    noted: dict[str, Any] = {"annotations": {labels.RECLAIMED_AT: "99999999999"}}
    made = tenant.create(pods, pod(**noted))
    assert labels.RECLAIMED_AT not in made["metadata"].get("annotations", {})
    assert "cannot be changed on a pod that exists" in denied(tenant.patch, f"{pods}/a", {"metadata": noted})


# Devices that the quota does not count


def container(**fields: Any) -> dict[str, Any]:
    """A pod's spec of one container."""
    return {"containers": [{"name": "main", "image": "x", **fields}]}


def asking(resource: str) -> dict[str, Any]:
    return container(resources={"limits": {resource: "1"}})


def variable(**value: Any) -> dict[str, Any]:
    return container(env=[{"name": "NVIDIA_VISIBLE_DEVICES", **value}])


OF_A_CONFIG_MAP = {"configMapKeyRef": {"name": "mine", "key": "x"}}
OF_ANOTHERS = {"configMapKeyRef": {"name": "gpuquota-gpu-0123456789abcdef", "key": "NVIDIA_VISIBLE_DEVICES"}}


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (asking("nvidia.com/mig-1g.10gb"), "nvidia.com/mig-1g.10gb is not counted by the quota"),
        (asking("nvidia.com/gpu.shared"), "nvidia.com/gpu.shared is not counted by the quota"),
        (asking("nvidia.com/gpumem"), "nvidia.com/gpumem is not counted by the quota"),
        (asking("nvidia.com/pgpu"), "nvidia.com/pgpu looks like a GPU"),
        (asking("nvidia.com/GA102GL_A10"), "nvidia.com/GA102GL_A10 looks like a GPU"),
        (asking("volcano.sh/vgpu-number"), "volcano.sh/vgpu-number looks like a GPU"),
        (asking("aliyun.com/gpu-mem"), "aliyun.com/gpu-mem looks like a GPU"),
        (asking("amd.com/GPU"), "amd.com/GPU looks like a GPU"),
        (asking("deviceclass.resource.kubernetes.io/any"), "deviceclass.resource.kubernetes.io/any may be a GPU"),
        (variable(value="all"), "NVIDIA_VISIBLE_DEVICES gives a container GPUs that the quota does not count"),
        (variable(value="0"), "NVIDIA_VISIBLE_DEVICES gives a container GPUs"),
        (variable(valueFrom=OF_A_CONFIG_MAP), "NVIDIA_VISIBLE_DEVICES gives a container GPUs"),
        (variable(valueFrom=OF_ANOTHERS), "NVIDIA_VISIBLE_DEVICES gives a container GPUs"),
        (
            container(
                env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}],
                resources={"limits": {labels.GPU_RESOURCE: "1"}},
            ),
            "NVIDIA_VISIBLE_DEVICES gives a container GPUs",
        ),
        (container(envFrom=[{"prefix": "NVIDIA_", "configMapRef": {"name": "c"}}]), "a prefix of envFrom"),
        *(
            (
                {
                    **container(volumeMounts=[{"name": "v", "mountPath": path}]),
                    "volumes": [{"name": "v", "emptyDir": {}}],
                },
                "mounts below /var/run/nvidia-container-devices",
            )
            for path in (
                "/var/run/nvidia-container-devices/all",
                "/var/run//nvidia-container-devices/all",
                "/run/./nvidia-container-devices/all",
                "/var/run/x/../nvidia-container-devices/0",
            )
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_devices_that_are_not_counted_are_refused(tenant: Api, pods: str, spec: dict[str, Any], sentence: str) -> None:
    body = {"metadata": {"name": "b"}, "spec": spec}
    assert sentence in refused_in_the_end(tenant, pods, body)
    assert sentence in denied(tenant.create, pods, body)


def test_a_resource_that_the_policy_names_as_no_gpu_is_allowed(
    hostile_cluster: DevCluster, tenant: Api, pods: str
) -> None:
    body = {"metadata": {"name": "b"}, "spec": asking("nvidia.com/hostdev")}

    def created() -> bool:
        try:
            tenant.create(pods, body)
        except ApiError:
            return False
        return True

    assert "nvidia.com/hostdev looks like a GPU" in refused_in_the_end(tenant, pods, body)
    hostile_cluster.api.patch(f"{QUOTA_POLICIES}/default", {"spec": {"otherResources": ["nvidia.com/hostdev"]}})
    until(created)
    hostile_cluster.api.patch(f"{QUOTA_POLICIES}/default", {"spec": {"otherResources": None}})


def test_annotations_for_the_container_runtime_are_refused(tenant: Api, pods: str) -> None:
    body = pod("", annotations={"cdi.k8s.io/all": "nvidia.com/gpu=all"})
    assert "annotations of cdi.k8s.io" in refused_in_the_end(tenant, pods, body)


def test_a_pod_without_gpus_sees_none_whatever_its_image_says(
    hostile_cluster: DevCluster, tenant: Api, pods: str
) -> None:
    made = tenant.create(pods, pod(""))
    void = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    assert made["spec"]["containers"][0]["env"] == void
    hostile_cluster.api.until(f"{pods}/a", lambda one: one["spec"].get("nodeName"))
    change = {"spec": {"ephemeralContainers": [{"name": "debug", "image": "nvidia/cuda"}]}}
    kind = "application/strategic-merge-patch+json"
    debugged = hostile_cluster.api.patch(f"{pods}/a/ephemeralcontainers", change, kind)  # the role edit may not
    assert debugged["spec"]["ephemeralContainers"][0]["env"] == void


def test_a_pod_that_shares_a_gpu_is_taken_and_its_config_map_is_not_the_tenants(
    tenant: Api, namespace: str, pods: str
) -> None:
    made = tenant.create(pods, pod("", annotations={"gpu-fraction": "0.5"}))
    name = made["metadata"]["annotations"][labels.GPU_CONFIG]
    config = {"metadata": {"name": name}, "data": {"NVIDIA_VISIBLE_DEVICES": "all"}}
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    sentence = "which GPUs a pod sees is the controller's to say"
    assert sentence in refused_in_the_end(tenant, path, config)
    assert sentence in denied(tenant.create, path, {**config, "metadata": {"name": "mine"}})
    secret = {"metadata": {"name": "mine"}, "stringData": {"NVIDIA_VISIBLE_DEVICES": "all"}}
    assert sentence in denied(tenant.create, f"/api/v1/namespaces/{namespace}/secrets", secret)
    tenant.create(path, {"metadata": {"name": "mine"}, "data": {"LEARNING_RATE": "0.1"}})


def test_an_elastic_job_is_no_way_around_it(hostile_cluster: DevCluster, namespace: str, pods: str) -> None:
    controller = hostile_cluster.api.as_user(CONTROLLER)
    owner = {"apiVersion": labels.API_VERSION, "kind": "ElasticJob", "name": "j", "uid": "1", "controller": True}
    meta = {"name": "j-0", "labels": {labels.JOB: "j"}, "ownerReferences": [owner]}
    body = {"metadata": meta, "spec": variable(value="all")}
    assert "NVIDIA_VISIBLE_DEVICES gives a container GPUs" in refused_in_the_end(controller, pods, body)


@pytest.mark.parametrize("name", ["gpuquota-reservation", "gpuquota-controller"])
def test_our_priority_classes_are_not_the_tenants(
    hostile_cluster: DevCluster, tenant: Api, pods: str, name: str
) -> None:
    body = pod("", spec={"priorityClassName": name})
    assert f"spec.priorityClassName is {name}, which is for pods of gpuquota itself" in refused_in_the_end(
        tenant, pods, body
    )
    plain = hostile_cluster.make_namespace(f"plain-{uuid.uuid4().hex[:6]}")
    assert "which is for pods of gpuquota itself" in denied(
        hostile_cluster.api.create, f"/api/v1/namespaces/{plain}/pods", body
    )


def test_reservations_push_nobody_away(hostile_cluster: DevCluster) -> None:
    path = "/apis/scheduling.k8s.io/v1/priorityclasses/gpuquota-reservation"
    assert hostile_cluster.api.get(path)["preemptionPolicy"] == "Never"


# Unmanaged namespaces


@contextmanager
def unmanaged(cluster: DevCluster, mode: str, **spec: object) -> Iterator[None]:
    """The policy has this mode while it lasts."""
    cluster.api.patch(f"{QUOTA_POLICIES}/default", {"spec": {"unmanaged": mode, **spec}})
    yield
    cluster.api.patch(f"{QUOTA_POLICIES}/default", {"spec": {"unmanaged": "ignore", **dict.fromkeys(spec)}})


def test_a_namespace_without_a_quota_gets_no_gpus_where_the_policy_denies_them(hostile_cluster: DevCluster) -> None:
    name = hostile_cluster.make_namespace(f"nobodys-{uuid.uuid4().hex[:6]}")
    exempt = hostile_cluster.make_namespace(f"operator-{uuid.uuid4().hex[:6]}")
    tenant, path = user(hostile_cluster, "edit", name), f"/api/v1/namespaces/{name}/pods"
    assert "schedulingGates" not in tenant.create(path, pod(), dryRun="All")["spec"], "ignored by default"
    with unmanaged(hostile_cluster, "deny", exemptNamespaces=[exempt]):
        sentence = f"no quota is set for the namespace {name}, so its pods get no GPUs (QuotaPolicy, unmanaged: deny)"
        assert sentence in refused_in_the_end(tenant, path, pod())
        for resource in ("nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared"):
            assert sentence in denied(tenant.create, path, {"metadata": {"name": "b"}, "spec": asking(resource)})
        assert tenant.create(path, pod(labels=MANAGED), dryRun="All")["spec"]["schedulingGates"], "by its own label"
        tenant.create(path, pod(""), dryRun="All")
        hostile_cluster.api.create(f"/api/v1/namespaces/{exempt}/pods", pod(), dryRun="All")


def test_a_namespace_without_a_quota_is_given_the_default_one(hostile_cluster: DevCluster, tmp_path: Path) -> None:
    kubeconfig = hostile_cluster.kubeconfig_of_service_account(NAMESPACE, ACCOUNT)
    arguments = [f"--keys-namespace={KEYS}"]
    world = Controlled(hostile_cluster, tmp_path, arguments=arguments, kubeconfig=kubeconfig)
    name = hostile_cluster.make_namespace(f"nobodys-{uuid.uuid4().hex[:6]}")
    tenant, path = user(hostile_cluster, "edit", name), f"/api/v1/namespaces/{name}/pods"
    try:
        quota = {"guaranteed": 0, "limit": 1}
        with unmanaged(hostile_cluster, "default-quota", defaultQuota=quota):
            assert "is not under its default quota yet" in refused_in_the_end(tenant, path, pod())
            world.start()
            world.until(f"/api/v1/namespaces/{name}", lambda one: one["metadata"]["labels"].get(labels.MANAGED))
            given = hostile_cluster.api.get(f"{QUOTAS}/{name}")
            assert quota.items() <= given["spec"].items()
            assert given["metadata"]["ownerReferences"][0]["kind"] == "Namespace"
            assert until(lambda: gated(tenant, path))
            # a Profile's quota replaces it, instead of being merged with it
            plugins = [{"kind": "GpuQuota", "spec": {"guaranteed": 3}}]
            hostile_cluster.api.create(PROFILES, profile(name, plugins=plugins))
            mirrored = world.until(f"{QUOTAS}/{name}", lambda q: q["metadata"]["labels"][labels.SOURCE] == "profile")
            assert mirrored["spec"]["guaranteed"] == 3
            assert "limit" not in mirrored["spec"]
        assert labels.MANAGED not in hostile_cluster.api.get("/api/v1/namespaces/kube-system")["metadata"]["labels"]
        assert "is forbidden: User" not in world.log(), world.log()  # its own rights are enough
    finally:
        world.close()


def gated(tenant: Api, path: str) -> object:
    try:
        return tenant.create(path, pod(), dryRun="All")["spec"].get("schedulingGates")
    except ApiError:
        return None  # the API server has not seen the namespace's label yet


def test_a_default_quota_is_asked_for_with_its_mode(hostile_cluster: DevCluster) -> None:
    change = {"spec": {"unmanaged": "default-quota"}}
    assert "but no defaultQuota is given" in denied(hostile_cluster.api.patch, f"{QUOTA_POLICIES}/default", change)


def test_the_policy_is_not_the_tenants(tenant: Api) -> None:
    assert denied(tenant.patch, f"{QUOTA_POLICIES}/default", {"spec": {"unmanaged": "ignore"}})
    assert tenant.get(f"{QUOTA_POLICIES}/default")["spec"]["reclaim"]["boundSeconds"] == 120, "but everybody sees it"


# Numbers without a bound


def test_a_group_of_more_pods_than_there_are_digits_is_refused(tenant: Api, pods: str) -> None:
    huge = {labels.POD_GROUP_SIZE: "9" * 5000}
    body = pod(labels={labels.POD_GROUP: "g"}, annotations=huge)
    assert "it must be a whole number, in digits" in denied(tenant.create, pods, body)


# Other teams' objects


def test_reservations_and_what_stands_on_them_are_not_the_tenants(tenant: Api) -> None:
    path = "/api/v1/namespaces/gpuquota-reservations/pods"
    assert denied(tenant.create, path, pod(""))
    assert denied(tenant.items, path)


def test_an_elastic_jobs_worker_is_not_made_by_hand_nor_taken_from_it(tenant: Api, namespace: str, pods: str) -> None:
    sentence = "workers of an ElasticJob are created by the controller only"
    assert sentence in denied(tenant.create, pods, pod(labels={labels.JOB: "j", labels.WORKER: "0"}))
    status = f"/apis/gpuquota.dev/v1alpha1/namespaces/{namespace}/elasticjobs"
    tenant.create(status, job("mine"))
    created = tenant.create(pods, pod())
    owner = {"apiVersion": labels.API_VERSION, "kind": "ElasticJob", "name": "theirs", "uid": "7", "controller": True}
    owned = {"metadata": {"ownerReferences": [owner]}}
    assert "becomes the owner of no pod" in denied(tenant.patch, f"{pods}/{created['metadata']['name']}", owned)
    other = {**owner, "apiVersion": "v1", "kind": "ConfigMap"}
    tenant.patch(f"{pods}/{created['metadata']['name']}", {"metadata": {"ownerReferences": [other]}})
    assert denied(tenant.patch, f"{status}/mine/status", {"status": {"generationReserved": 10**9}})
