"""What the accounts of the controller and the nodes' agents cannot do with their rights, were their tokens stolen."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.sharing import reservation_pods
from tests.kubernetes.gpu_exporter import install_notebooks
from tests.kubernetes.installation import (
    CONTROLLER,
    KEYS,
    MANIFESTS,
    NAMESPACE,
    QUOTAS,
    WEBHOOK_ACCOUNT,
    batch_jobs_of,
    jobs_of,
)
from tests.kubernetes.test_crds import job, quota
from tests.kubernetes.test_managed_jobs import job_body
from tests.kubernetes.test_rbac import denied, may
from tests.kubernetes.test_webhook import pod
from tests.kubernetes.trainer import install_kinds, path_of
from tests.polling import until
from tools.devcluster import ApiError
from tools.devcluster.api import APPLY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.devcluster import DevCluster
    from tools.devcluster.api import Api

AGENT = f"system:serviceaccount:{reservation_pods.AGENTS_NAMESPACE}:gpuquota-node-agent"
NODE_OF_TOKEN = "authentication.kubernetes.io/node-name"
RESERVATIONS = f"/api/v1/namespaces/{reservation_pods.NAMESPACE}/pods"
ELASTIC_OWNER = {"apiVersion": labels.API_VERSION, "kind": "ElasticJob", "name": "j", "uid": "1", "controller": True}
DEVICES = {labels.DEVICES: "0"}


@pytest.fixture
def controller(kubeflow_cluster: DevCluster) -> Api:
    return kubeflow_cluster.api.as_user(CONTROLLER)


@pytest.fixture
def team(kubeflow_cluster: DevCluster) -> str:
    return kubeflow_cluster.make_namespace(f"a-{uuid.uuid4().hex[:8]}")


def pods_of(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


def worker(name: str = "j-0") -> dict[str, Any]:
    return pod(name=name, labels={labels.JOB: "j"}, ownerReferences=[ELASTIC_OWNER])


def test_the_webhook_reads_policies_and_its_certificate_and_has_no_right_on_pods(
    kubeflow_cluster: DevCluster, team: str
) -> None:
    webhook = kubeflow_cluster.api.as_user(f"system:serviceaccount:{NAMESPACE}:{WEBHOOK_ACCOUNT}")
    assert webhook.get(f"/apis/{labels.API_VERSION}/workloadpolicies")["kind"] == "WorkloadPolicyList"
    assert "cannot create resource" in denied(webhook.create, pods_of(team), worker())
    assert "cannot list resource" in denied(webhook.get, pods_of(team))
    assert "cannot get resource" in denied(webhook.get, f"/api/v1/namespaces/{KEYS}/secrets/gpuquota-membership")


def test_it_creates_workers_and_reservations_and_no_other_pods(controller: Api, team: str) -> None:
    sentence = "the controller creates workers of ElasticJobs and pods that reserve GPUs, and no others"
    assert sentence in denied(controller.create, pods_of("kube-system"), pod(""))
    assert sentence in denied(controller.create, pods_of(team), pod(labels={labels.JOB: "j"}))
    others = [{**ELASTIC_OWNER, "apiVersion": "elastic.iml.github.io/v1alpha1"}]
    assert sentence in denied(controller.create, pods_of(team), pod(labels={labels.JOB: "j"}, ownerReferences=others))
    assert controller.create(pods_of(team), worker(), dryRun="All")


def test_it_deletes_what_holds_gpus_under_the_quota_and_nothing_else(
    kubeflow_cluster: DevCluster, controller: Api, team: str
) -> None:
    kubeflow_cluster.api.create(pods_of(team), pod("", name="web"))
    assert "the controller deletes pods that hold GPUs under the quota" in denied(
        controller.delete, f"{pods_of(team)}/web"
    )
    kubeflow_cluster.api.create(pods_of(team), pod(name="held", annotations=DEVICES))
    controller.delete(f"{pods_of(team)}/held")
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "web"}}
    for namespace in ("kube-system", NAMESPACE):
        path = f"{pods_of(namespace)}/web/eviction"
        assert "the controller evicts no pods of the cluster's own namespaces" in denied(
            controller.create, path, {**eviction, "metadata": {"name": "web", "namespace": namespace}}
        ) or not kubeflow_cluster.api.exists(f"{pods_of(namespace)}/web")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"spec": {"containers": [{"name": "main", "image": "evil"}]}}, "only its gate, its node and annotations"),
        ({"metadata": {"labels": {"app": "other"}}}, "changes no labels of pods"),
        ({"metadata": {"annotations": {"other": "x"}}}, "changes only annotations of gpuquota.dev"),
        ({"metadata": {"finalizers": ["a.b/c"]}}, "only its gate, its node and annotations"),
    ],
)
def test_of_a_pod_it_changes_what_the_plan_writes(
    kubeflow_cluster: DevCluster, controller: Api, team: str, change: dict[str, Any], sentence: str
) -> None:
    path = f"{pods_of(team)}/a"
    kubeflow_cluster.api.create(pods_of(team), pod(labels={"app": "x"}))
    kind = "application/strategic-merge-patch+json"
    with pytest.raises(ApiError) as refused:
        controller.patch(path, change, kind)
    assert sentence in refused.value.message
    controller.patch(path, {"metadata": {"annotations": {labels.REASON: "because"}}})


def test_it_writes_no_secret_but_its_own_and_those_of_workers(controller: Api, team: str) -> None:
    sentence = "the controller writes its own Secrets"
    path = f"/api/v1/namespaces/{team}/secrets"
    owned = {"ownerReferences": [ELASTIC_OWNER]}
    assert sentence in denied(controller.create, path, {"metadata": {"name": "x"}})
    token = {"type": "kubernetes.io/service-account-token"}
    stolen = {"annotations": {"kubernetes.io/service-account.name": "default"}, **owned}
    assert sentence in denied(controller.create, path, {"metadata": {"name": "j-membership", **stolen}, **token})
    assert sentence in denied(
        controller.create, path, {"metadata": {"name": "j-membership", **owned}, "stringData": {"other": "x"}}
    )
    assert sentence in denied(controller.create, f"/api/v1/namespaces/{NAMESPACE}/secrets", {"metadata": {"name": "x"}})
    made = {"metadata": {"name": "j-1-membership", **owned}, "stringData": {"token": "x", "ca.crt": "y"}}
    assert controller.create(path, made, dryRun="All")


def test_it_deletes_no_secret_but_those_of_workers(kubeflow_cluster: DevCluster, controller: Api, team: str) -> None:
    path = f"/api/v1/namespaces/{team}/secrets"
    kubeflow_cluster.api.create(path, {"metadata": {"name": "password-membership"}})
    assert "the controller writes its own Secrets" in denied(controller.delete, f"{path}/password-membership")
    made = {"metadata": {"name": "j-2-membership", "ownerReferences": [ELASTIC_OWNER]}, "stringData": {"token": "x"}}
    controller.create(path, made)
    controller.delete(f"{path}/j-2-membership")


def test_it_writes_no_config_map_but_those_of_sharers(controller: Api, team: str) -> None:
    path, name = f"/api/v1/namespaces/{team}/configmaps", "gpuquota-gpu-0123456789abcdef"
    sentence = "the controller writes the ConfigMaps gpuquota-gpu-* of pods that share GPUs, and gpuquota-authority"
    owner = [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "1"}]
    fine = {"metadata": {"name": name, "ownerReferences": owner}, "data": {"NVIDIA_VISIBLE_DEVICES": "GPU-1"}}
    assert controller.create(path, fine, dryRun="All")
    for change in ({"metadata": {"name": name}}, {"data": {"x": "y"}}, {"metadata": {"name": "x"}}):
        assert sentence in denied(controller.create, path, {**fine, **change})
    authority, system = {"metadata": {"name": "gpuquota-authority"}, "data": {"ca.crt": "x"}}, "gpuquota-system"
    assert controller.create(f"/api/v1/namespaces/{system}/configmaps", authority, dryRun="All")
    assert sentence in denied(controller.create, path, authority)


def test_it_writes_no_network_policy_but_those_of_workers(
    kubeflow_cluster: DevCluster, controller: Api, team: str
) -> None:
    path = f"/apis/networking.k8s.io/v1/namespaces/{team}/networkpolicies"
    sentence = "the controller creates NetworkPolicies for the workers of ElasticJobs (JOB-workers, owned by the job)"
    workers = {"podSelector": {"matchLabels": {labels.JOB: "j"}}}
    fine: dict[str, Any] = {"metadata": {"name": "j-1-workers", "ownerReferences": [ELASTIC_OWNER]}, "spec": workers}
    assert controller.create(path, fine, dryRun="All")
    changes: list[dict[str, Any]] = [
        {"metadata": {"name": "j-1-workers"}},
        {"metadata": {**fine["metadata"], "name": "x"}},
        {"spec": {"podSelector": {}}},
        {"spec": {"podSelector": {"matchLabels": {labels.JOB: "other"}}}},
        {"spec": {"podSelector": {"matchLabels": {"app": "web"}}}},
    ]
    for change in changes:
        assert sentence in denied(controller.create, path, {**fine, **change}), change
    kubeflow_cluster.api.create(path, fine)
    for verb in ("get", "list", "patch", "delete"):
        assert not may(kubeflow_cluster, verb, "networkpolicies", team, group="networking.k8s.io")


def test_of_a_namespace_it_sets_one_label(controller: Api, team: str) -> None:
    path = f"/api/v1/namespaces/{team}"
    sentence = "the controller sets the label gpuquota.dev/managed of a namespace, and changes nothing else of it"
    for change in (
        {"labels": {"pod-security.kubernetes.io/enforce": "privileged"}},
        {"annotations": {"x": "y"}},
    ):
        assert sentence in denied(controller.patch, path, {"metadata": change}), change
    controller.patch(path, {"metadata": {"labels": {labels.MANAGED: "true"}}})


def test_of_a_job_it_changes_only_whether_it_is_suspended(
    kubeflow_cluster: DevCluster, controller: Api, team: str
) -> None:
    jobs = batch_jobs_of(team)
    pod = {"containers": [{"name": "main", "image": "none"}], "restartPolicy": "Never"}
    kubeflow_cluster.api.create(jobs, {"metadata": {"name": "j"}, "spec": {"suspend": True, "template": {"spec": pod}}})
    marks = {"metadata": {"labels": {labels.SUSPENDED: "true"}, "annotations": {labels.SUSPENDED: "why"}}}
    controller.patch(f"{jobs}/j", {**marks, "spec": {"suspend": True}}, dryRun="All")
    controller.patch(f"{jobs}/j", {**marks, "spec": {"suspend": False}}, dryRun="All")
    only = "only whether it is suspended"
    more = {"template": {"spec": {"nodeSelector": {"a": "b"}}}}
    for change, sentence in (
        ({"spec": {"parallelism": 3}}, only),
        ({"spec": more}, only),
        ({"metadata": {"finalizers": ["example.com/x"]}}, only),
        ({"spec": {"ttlSecondsAfterFinished": 0}}, only),
        ({"spec": {"backoffLimit": 0}}, only),
        ({"metadata": {"labels": {"app": "x"}}}, "changes no label of an owner of pods"),
        ({"metadata": {"annotations": {"app": "x"}}}, "changes no annotation of an owner of pods"),
    ):
        assert sentence in denied(controller.patch, f"{jobs}/j", change), change
    kubeflow_cluster.api.delete(f"{jobs}/j?propagationPolicy=Background")


def test_of_other_owners_it_changes_no_field_that_a_later_version_of_theirs_may_have(
    kubeflow_cluster: DevCluster, controller: Api, team: str
) -> None:
    """Such as a TrainJob's podTemplateOverrides, with a service account."""
    admin = kubeflow_cluster.api
    install_kinds(admin)
    path = path_of("trainjobs", team, "t")
    body = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "t"}}
    admin.create(path_of("trainjobs", team), {**body, "spec": {"runPolicy": {"ttl": 1}, "suspend": False}})
    controller.patch(path, {"spec": {"suspend": True, "runPolicy": {"suspend": True}}}, dryRun="All")
    overrides = {"podTemplateOverrides": [{"spec": {"serviceAccountName": "admin"}}]}
    for change in (overrides, {"runPolicy": {"ttl": 2}}, {"runPolicy": {"ttl": None}}, {"runPolicy": None}):
        assert "only whether it is suspended" in denied(controller.patch, path, {"spec": change}), change
    admin.delete(path)


def test_administrators_quotas_are_not_its_to_change(kubeflow_cluster: DevCluster, controller: Api, team: str) -> None:
    sentence = "the controller writes GpuQuotas that mirror a Profile or are a namespace's default"
    kubeflow_cluster.api.apply(f"{QUOTAS}/{team}", quota(team, guaranteed=1))
    assert sentence in denied(controller.patch, f"{QUOTAS}/{team}", {"spec": {"guaranteed": 9}})
    assert sentence in denied(controller.delete, f"{QUOTAS}/{team}")
    assert sentence in denied(controller.create, QUOTAS, quota(f"{team}-x"))
    kubeflow_cluster.api.delete(f"{QUOTAS}/{team}")


def test_it_deletes_only_elastic_jobs_that_are_to_be_forgotten(
    kubeflow_cluster: DevCluster, controller: Api, team: str
) -> None:
    kubeflow_cluster.api.create(jobs_of(team), job("kept"))
    kubeflow_cluster.api.create(jobs_of(team), job("brief", ttlSecondsAfterFinished=0))
    assert "ttlSecondsAfterFinished" in denied(controller.delete, f"{jobs_of(team)}/kept")
    controller.delete(f"{jobs_of(team)}/brief")


def test_of_elastic_jobs_it_creates_and_changes_those_of_jobs_that_it_runs(
    kubeflow_cluster: DevCluster, controller: Api, team: str
) -> None:
    only = "the controller creates and changes ElasticJobs of the Jobs that it runs, and of others only suspends them"
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "1", "controller": True}
    owned = job("j")
    assert only in denied(controller.create, jobs_of(team), owned)
    owned["metadata"]["ownerReferences"] = [{**owner, "name": "other"}]
    assert only in denied(controller.create, jobs_of(team), owned)
    owned["metadata"]["ownerReferences"] = [owner]
    controller.create(jobs_of(team), owned)
    controller.patch(f"{jobs_of(team)}/j", {"spec": {"suspend": True}})
    assert only in denied(controller.patch, f"{jobs_of(team)}/j", {"metadata": {"ownerReferences": []}})
    kubeflow_cluster.api.create(jobs_of(team), job("users"))
    for more in ({"priority": 3}, {"template": {"spec": {"containers": [{"name": "main", "image": "evil"}]}}}):
        assert only in denied(controller.patch, f"{jobs_of(team)}/users", {"spec": {"suspend": True, **more}})
    for meta in ({"labels": {"app": "x"}}, {"annotations": {"app": "x"}}, {"finalizers": ["example.com/x"]}):
        assert only in denied(controller.patch, f"{jobs_of(team)}/users", {"metadata": meta})
    why = {"metadata": {"annotations": {labels.SUSPENDED: "its GPUs had been unused"}}}
    controller.patch(f"{jobs_of(team)}/users", {**why, "spec": {"suspend": True}})
    assert only in denied(controller.patch, f"{jobs_of(team)}/users", {"spec": {"suspend": False}})
    taken = {"metadata": {"ownerReferences": [{**owner, "name": "users"}]}, "spec": {"suspend": True}}
    assert only in denied(controller.patch, f"{jobs_of(team)}/users", taken)


def test_of_a_notebook_it_changes_only_that_it_is_stopped(
    kubeflow_cluster: DevCluster, controller: Api, team: str
) -> None:
    install_notebooks(kubeflow_cluster.api)
    notebooks = f"/apis/kubeflow.org/v1/namespaces/{team}/notebooks"
    meta = {"name": "nb", "annotations": {"mine": "x"}}
    made = {"apiVersion": "kubeflow.org/v1", "kind": "Notebook", "metadata": meta, "spec": {"template": {}}}
    kubeflow_cluster.api.create(notebooks, made)
    for change in (
        {"spec": {"template": {"spec": {"serviceAccountName": "admin"}}}},
        {"metadata": {"annotations": {"mine": "y"}}},
        {"metadata": {"annotations": {"mine": None}}},
        {"metadata": {"labels": {"app": "x"}}},
        {"metadata": {"finalizers": ["example.com/x"]}},
    ):
        assert "of a Notebook only that it is stopped" in denied(controller.patch, f"{notebooks}/nb", change), change
    notes = {"kubeflow-resource-stopped": "2026-01-01T00:00:00Z", labels.SUSPENDED: "its GPUs had been unused"}
    controller.patch(f"{notebooks}/nb", {"metadata": {"annotations": notes}})
    again = {"metadata": {"annotations": {"kubeflow-resource-stopped": None}}}
    assert "only that it is stopped" in denied(controller.patch, f"{notebooks}/nb", again)
    kubeflow_cluster.api.delete(f"{notebooks}/nb")


def test_it_writes_the_status_of_jobs_that_it_runs_and_those_have_the_label(
    kubeflow_cluster: DevCluster, controller: Api, team: str
) -> None:
    api, jobs = kubeflow_cluster.api, batch_jobs_of(team)
    own = job_body(1, name="own")
    assert 'needs the label gpuquota.dev/elastic: "true"' in denied(
        api.create, jobs, {**own, "metadata": {"name": "own"}}
    )
    api.create(jobs, own)
    controller.patch(f"{jobs}/own/status", {"status": {"active": 1}})
    api.create(jobs, job_body(1, name="other", managedBy=None, suspend=True))
    assert "the controller writes the status of Jobs that it runs" in denied(
        controller.patch, f"{jobs}/other/status", {"status": {"active": 1}}
    )


@pytest.mark.parametrize(
    ("verb", "resource", "group"),
    [
        ("patch", "secrets", ""),
        ("patch", "events", ""),
        ("patch", "persistentvolumeclaims", ""),
        ("patch", "quotapolicies", labels.GROUP),
    ],
)
def test_it_has_no_right_that_it_does_not_need(
    kubeflow_cluster: DevCluster, team: str, verb: str, resource: str, group: str
) -> None:
    assert not may(kubeflow_cluster, verb, resource, team, group=group)


# The nodes' agents


@pytest.fixture(scope="module")
def agents_cluster(kubeflow_cluster: DevCluster) -> Iterator[DevCluster]:
    """With the rights and the policy of the nodes' agents, and no agent."""
    folder = MANIFESTS / "components" / "node-agent"
    for name in ("namespace", "rbac", "policy"):
        kubeflow_cluster.kubectl("apply", "-f", str(folder / f"{name}.yaml"))
    yield kubeflow_cluster
    for name in ("policy", "rbac", "namespace"):
        kubeflow_cluster.kubectl("delete", "--wait=false", "-f", str(folder / f"{name}.yaml"))


@pytest.fixture
def reservation(agents_cluster: DevCluster) -> Iterator[str]:
    """The path of a reservation on fake-0."""
    made = reservation_pods.creation("fake-0", 0, reservation_pods.ReservationSettings()).body
    agents_cluster.api.as_user(CONTROLLER).create(RESERVATIONS, made)
    path = f"{RESERVATIONS}/{made['metadata']['name']}"
    agents_cluster.api.until(path, lambda one: one["spec"].get("nodeName") == "fake-0")
    yield path
    agents_cluster.api.delete(path, 0)


def on_node(cluster: DevCluster, node: str) -> Api:
    return cluster.api.as_user(AGENT, extra={NODE_OF_TOKEN: node})


def with_annotations(**notes: str) -> dict[str, Any]:
    return {"metadata": {"annotations": {f"{labels.GROUP}/{name}": text for name, text in notes.items()}}}


def test_an_agent_writes_on_its_own_nodes_reservations_only(agents_cluster: DevCluster, reservation: str) -> None:
    sentence = "a node's agent writes on reservations of its own node"
    elsewhere, no_node = on_node(agents_cluster, "fake-1"), agents_cluster.api.as_user(AGENT)
    until(
        lambda: sentence in _answer(elsewhere, reservation, with_annotations(ready="x"))
    )  # the API server takes a moment
    assert sentence in denied(no_node.patch, reservation, with_annotations(ready="x"))
    here = on_node(agents_cluster, "fake-0")
    patched = here.patch(reservation, with_annotations(ready="ticket", ledger="{}"))
    assert patched["metadata"]["annotations"][labels.READY] == "ticket"


def _answer(api: Api, path: str, change: dict[str, Any]) -> str:
    try:
        api.patch(path, change)
    except ApiError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    "change",
    [
        with_annotations(sharers="others"),
        with_annotations(**{"reserves-on": "fake-1"}),
        {"metadata": {"labels": {labels.RESERVES: "7"}}},
        {"metadata": {"finalizers": ["a.b/c"]}},
        {"spec": {"containers": [{"name": "hold", "image": "evil"}]}},
    ],
    ids=["sharers", "node", "device", "finalizer", "image"],
)
def test_an_agent_writes_who_may_start_and_what_is_used_and_nothing_else(
    agents_cluster: DevCluster, reservation: str, change: dict[str, Any]
) -> None:
    here = on_node(agents_cluster, "fake-0")
    until(
        lambda: (
            "a node's agent writes"
            in _answer(on_node(agents_cluster, "other"), reservation, with_annotations(ready="x"))
        )
    )
    with pytest.raises(ApiError, match="a node's agent writes the annotations"):
        here.patch(reservation, change, "application/strategic-merge-patch+json")


def test_an_agent_reports_in_its_own_name(agents_cluster: DevCluster, team: str) -> None:
    path = f"/api/v1/namespaces/{team}/events"
    event = {
        "metadata": {"name": "e", "namespace": team},
        "involvedObject": {"kind": "Pod", "namespace": team, "name": "p"},
        "source": {"component": "kubelet"},
    }
    here = on_node(agents_cluster, "fake-0")
    until(lambda: "in its own name only" in _created(here, path, event))
    assert here.create(path, {**event, "source": {"component": "gpuquota-node-agent"}}, dryRun="All")


def _created(api: Api, path: str, body: dict[str, Any]) -> str:
    try:
        api.create(path, body, dryRun="All")
    except ApiError as error:
        return error.message
    return ""


def test_a_server_side_apply_is_looked_at_like_any_write(kubeflow_cluster: DevCluster, team: str) -> None:
    controller = kubeflow_cluster.api.as_user(CONTROLLER)
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "data": {"x": "y"}}
    path = f"/api/v1/namespaces/{team}/configmaps/x"
    assert "of pods that share GPUs, and gpuquota-authority" in denied(
        controller.patch, path, body, APPLY, fieldManager="x", force="true"
    )
