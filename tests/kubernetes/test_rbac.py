"""No user bypasses the quota: every role, impersonated, against the policies and roles of manifests/."""

from __future__ import annotations

import asyncio
import base64
import re
import urllib.request
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.admission.gate_configuration import MISSING_S, GateConfiguration
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import load_credentials
from kfp_gpuquota.cluster.kubernetes.objects import labels
from tests.kubernetes.controlled import Controlled
from tests.kubernetes.installation import (
    ACCOUNT,
    CONFIGURATION,
    CONTROLLER,
    KEYS,
    NAMESPACE,
    PROFILES,
    QUOTAS,
    WEBHOOK_ACCOUNT,
    await_gate,
    jobs_of,
    refused_in_the_end,
)
from tests.kubernetes.test_crds import TEMPLATE, job, quota
from tests.kubernetes.test_webhook import GATE, MANAGED, pod
from tests.polling import until
from tools.devcluster import Api, ApiError
from tools.devcluster.api import JSON_PATCH

if TYPE_CHECKING:
    from pathlib import Path

    from tools.devcluster import DevCluster

ROLES = "/apis/rbac.authorization.k8s.io/v1"
KFAM = "system:serviceaccount:kubeflow:profiles-controller-service-account"


def user(cluster: DevCluster, role: str, namespace: str = "") -> Api:
    """A user with one ClusterRole, in one namespace or (without one) in all."""
    name = f"{role}-{uuid.uuid4().hex[:6]}"
    where = f"{ROLES}/namespaces/{namespace}/rolebindings" if namespace else f"{ROLES}/clusterrolebindings"
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": name}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    cluster.api.create(where, {"metadata": {"name": name}, "subjects": [subject], "roleRef": reference})
    somebody = cluster.api.as_user(name, "system:authenticated")
    nobody = len(rules_of(cluster.api.as_user("nobody", "system:authenticated"), namespace))
    followed = lambda: len(rules_of(somebody, namespace)) > nobody  # noqa: E731
    until(followed, f"{name} has no right that nobody has")  # the API server takes a moment
    return somebody


def rules_of(somebody: Api, namespace: str) -> list[dict[str, Any]]:
    """What they may do in a namespace."""
    body = {"spec": {"namespace": namespace or "default"}}
    review = somebody.create("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", body)
    return list(review["status"]["resourceRules"])


def denied(call: Any, *arguments: Any, **more: Any) -> str:
    with pytest.raises(ApiError) as refused:
        call(*arguments, **more)
    assert refused.value.status in {403, 422}, refused.value
    return refused.value.message


@pytest.fixture
def namespace(kubeflow_cluster: DevCluster) -> str:
    """A namespace under the quota."""
    return kubeflow_cluster.make_namespace(f"r-{uuid.uuid4().hex[:8]}", MANAGED)


@pytest.fixture
def pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


@pytest.fixture
def owner(kubeflow_cluster: DevCluster, namespace: str) -> Api:
    """The user with the most permissions in a namespace: its administrator by Kubernetes' own role."""
    return user(kubeflow_cluster, "admin", namespace)


@pytest.fixture
def controller(kubeflow_cluster: DevCluster) -> Api:
    return Api.of_kubeconfig(kubeflow_cluster.kubeconfig_of_service_account(NAMESPACE, ACCOUNT))


UNGATE = [{"op": "remove", "path": "/spec/schedulingGates/0"}]


def test_the_gate_is_taken_off_by_the_controller_and_by_nobody_else(
    kubeflow_cluster: DevCluster, owner: Api, controller: Api, pods: str
) -> None:
    owner.create(pods, pod())
    for somebody in (owner, kubeflow_cluster.api):
        message = denied(somebody.patch, f"{pods}/a", UNGATE, JSON_PATCH)
        assert "the gate gpuquota.dev/quota is taken off by the controller" in message
        assert denied(somebody.replace, f"{pods}/a", {**somebody.get(f"{pods}/a"), "spec": ungated(owner, pods)})
    assert owner.get(f"{pods}/a")["spec"]["schedulingGates"] == GATE
    assert "schedulingGates" not in controller.patch(f"{pods}/a", UNGATE, JSON_PATCH)["spec"]


def ungated(api: Api, pods: str) -> dict[str, Any]:
    spec: dict[str, Any] = api.get(f"{pods}/a")["spec"]
    return {name: value for name, value in spec.items() if name != "schedulingGates"}


def test_a_gated_pod_cannot_be_bound_by_hand(owner: Api, kubeflow_cluster: DevCluster, pods: str) -> None:
    owner.create(pods, pod())
    binding = {"metadata": {"name": "a"}, "target": {"kind": "Node", "name": "fake-0"}}
    assert "non-empty .spec.schedulingGates" in denied_with(kubeflow_cluster.api, f"{pods}/a/binding", binding)


def denied_with(api: Api, path: str, body: dict[str, Any]) -> str:
    with pytest.raises(ApiError) as refused:
        api.create(path, body)
    return refused.value.message


def test_a_pod_that_names_its_node_is_refused(owner: Api, pods: str) -> None:
    assert "spec.nodeName" in denied(owner.create, pods, pod(spec={"nodeName": "fake-0"}))
    owner.create(pods, pod("", name="b", spec={"nodeName": "fake-0"}))


def test_nobody_is_an_elastic_jobs_worker_by_his_own_word(owner: Api, pods: str) -> None:
    sentence = "workers of an ElasticJob are created by the controller only"
    owned = [{"kind": "ElasticJob", "apiVersion": labels.API_VERSION, "name": "j", "uid": "1"}]
    for body in (
        pod(labels={labels.JOB: "j"}),
        pod("", labels={labels.WORKER: "0"}),
        pod("", ownerReferences=owned),
        pod(labels={labels.JOB: "j", labels.WORKER: "0"}, spec={"schedulingGates": GATE}),
    ):
        assert sentence in denied(owner.create, pods, body)


@pytest.mark.parametrize(
    ("before", "change"),
    [
        ({}, {"labels": {labels.PRIORITY: "1000"}}),
        ({"labels": {labels.KIND: "train"}}, {"labels": {labels.KIND: "build"}}),
        ({"labels": {labels.PREEMPTIBLE: "true"}}, {"labels": {labels.PREEMPTIBLE: None}}),
        ({"labels": MANAGED}, {"labels": {labels.MANAGED: "false"}}),
        ({"labels": MANAGED}, {"labels": {labels.MANAGED: None}}),
        ({}, {"annotations": {labels.DEVICES: "0"}}),
        ({"annotations": {"gpu-fraction": "0.25"}}, {"annotations": {"gpu-fraction": "0.5"}}),
        ({"annotations": {"gpuquota.dev/gpu-memory": "1"}}, {"annotations": {"gpuquota.dev/gpu-memory": None}}),
    ],
    ids=str,
)
def test_what_a_pod_has_asked_for_cannot_be_changed_afterwards(
    owner: Api, pods: str, before: dict[str, Any], change: dict[str, Any]
) -> None:
    gpus = "" if "annotations" in before else "1"
    owner.create(pods, pod(gpus, **before))
    assert "cannot be changed on a pod that exists" in denied(owner.patch, f"{pods}/a", {"metadata": change})
    owner.patch(f"{pods}/a", {"metadata": {"labels": {"mine": "x"}, "annotations": {"mine": "y"}}})


def test_what_only_looks_like_ours_is_nobodys_business(owner: Api, pods: str) -> None:
    notes = {"gpu-memory-seen": "1", "gpu-fractions": "x", "my.gpuquota.dev/kind": "y"}
    assert "schedulingGates" not in owner.create(pods, pod("", annotations=notes, labels={"gpuquota": "z"}))["spec"]
    owner.patch(f"{pods}/a", {"metadata": {"annotations": dict.fromkeys(notes, "2")}})


def test_a_pod_that_has_opted_in_elsewhere_cannot_opt_out(kubeflow_cluster: DevCluster) -> None:
    namespace = kubeflow_cluster.make_namespace(f"u-{uuid.uuid4().hex[:8]}")
    somebody, path = user(kubeflow_cluster, "edit", namespace), f"/api/v1/namespaces/{namespace}/pods"
    somebody.create(path, pod(labels=MANAGED))
    assert denied(somebody.patch, f"{path}/a", {"metadata": {"labels": {labels.MANAGED: None}}})
    assert denied(somebody.patch, f"{path}/a", UNGATE, JSON_PATCH)


def test_a_namespace_is_taken_out_of_the_quota_only_by_who_may_change_quotas(
    kubeflow_cluster: DevCluster, namespace: str
) -> None:
    path, off = f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": {labels.MANAGED: None}}}
    # as some platforms give it: all of Kubernetes' own admin role, and writing namespaces
    rules = [{"apiGroups": [""], "resources": ["namespaces"], "verbs": ["get", "patch", "update"]}]
    kubeflow_cluster.api.create(f"{ROLES}/clusterroles", {"metadata": {"name": f"ns-{namespace}"}, "rules": rules})
    somebody = user(kubeflow_cluster, f"ns-{namespace}")
    assert "takes a namespace out of the quota" in denied(somebody.patch, path, off)
    somebody.patch(path, {"metadata": {"labels": {"mine": "x"}}})
    kubeflow_cluster.api.patch(path, off)


def test_where_the_webhook_is_gone_the_policy_still_stands(kubeflow_cluster: DevCluster, owner: Api, pods: str) -> None:
    path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
    kept = kubeflow_cluster.api.get(f"{path}/gpuquota")
    kubeflow_cluster.api.delete(f"{path}/gpuquota")
    try:
        assert "asks for GPUs and was not gated" in refused_in_the_end(kubeflow_cluster, pods, pod())
        assert "asks for GPUs and was not gated" in denied(owner.create, pods, pod())
        assert "asks for GPUs and was not gated" in denied(owner.create, pods, pod("", annotations={"gpu-memory": "1"}))
        assert owner.create(pods, pod(name="b", spec={"schedulingGates": GATE}))
    finally:
        kubeflow_cluster.api.apply(f"{path}/gpuquota", as_applied(kept))
        await_gate(kubeflow_cluster)


def as_applied(kept: dict[str, Any]) -> dict[str, Any]:
    """Return an object without what the API server has added."""
    metadata = {name: kept["metadata"][name] for name in ("name", "labels", "annotations") if name in kept["metadata"]}
    return {**kept, "metadata": metadata}


def test_a_deleted_webhook_configuration_is_put_back_by_name_and_ends_with_the_installation(
    kubeflow_cluster: DevCluster,
) -> None:
    """With the webhook's own rights, by which no other configuration can be created."""
    before = kubeflow_cluster.api.get(CONFIGURATION)
    kubeconfig = kubeflow_cluster.kubeconfig_of_service_account(NAMESPACE, WEBHOOK_ACCOUNT)
    bundle = base64.b64decode(before["webhooks"][0]["clientConfig"]["caBundle"])

    async def look(*times: float) -> dict[str, Any] | None:
        async with Connection(load_credentials(str(kubeconfig), None)) as connection:
            gate = GateConfiguration(connection)
            await gate.maintain(bundle, times[0])
            kubeflow_cluster.api.delete(CONFIGURATION)
            for now in times[1:]:
                await gate.maintain(bundle, now)
        return kubeflow_cluster.api.get(CONFIGURATION) if kubeflow_cluster.api.exists(CONFIGURATION) else None

    assert asyncio.run(look(0, 60, 60 + MISSING_S - 1)) is None, "an uninstall deletes it, too"
    kubeflow_cluster.api.create(CONFIGURATION.rpartition("/")[0], as_applied(before))
    try:
        found = asyncio.run(look(0, 60, 60 + MISSING_S))
        assert found is not None
        assert found["webhooks"] == before["webhooks"]
        assert found["metadata"].get("labels") == before["metadata"].get("labels")
        (owner,) = found["metadata"]["ownerReferences"]
        role = kubeflow_cluster.api.get(f"{ROLES}/clusterroles/{WEBHOOK_ACCOUNT}")
        assert (owner["kind"], owner["uid"]) == ("ClusterRole", role["metadata"]["uid"])
    finally:
        kubeflow_cluster.api.apply(CONFIGURATION, as_applied(before))
        await_gate(kubeflow_cluster)
    webhook = Api.of_kubeconfig(kubeconfig)
    for name in ("gpuquota", "gpuquota-others"):
        body = {**as_applied(before), "metadata": {"name": name}}
        assert "cannot create resource" in denied(webhook.create, CONFIGURATION.rpartition("/")[0], body)
    assert "cannot patch resource" in denied(webhook.apply, f"{CONFIGURATION}-others", body)


# Quotas


@pytest.mark.parametrize("role", ["admin", "edit", "view", "kubeflow-admin", "kubeflow-edit", "kubeflow-view"])
def test_no_role_of_a_team_changes_a_quota(kubeflow_cluster: DevCluster, namespace: str, role: str) -> None:
    kubeflow_cluster.api.apply(f"{QUOTAS}/{namespace}", quota(namespace, guaranteed=1))
    for somebody in (user(kubeflow_cluster, role, namespace), user(kubeflow_cluster, role)):
        assert denied(somebody.patch, f"{QUOTAS}/{namespace}", {"spec": {"guaranteed": 100}})
        assert denied(somebody.create, QUOTAS, quota("more", guaranteed=100))
        assert denied(somebody.delete, f"{QUOTAS}/{namespace}")
        assert somebody.get(f"{QUOTAS}/{namespace}")["spec"]["guaranteed"] == 1, "but everybody sees it"
    kubeflow_cluster.api.delete(f"{QUOTAS}/{namespace}")


@pytest.mark.parametrize(
    ("role", "reads", "writes"),
    [
        ("admin", True, True),
        ("edit", True, True),
        ("view", True, False),
        ("kubeflow-admin", True, True),
        ("kubeflow-edit", True, True),
        ("kubeflow-view", True, False),
        ("gpuquota-quota-admin", False, False),
    ],
)
def test_who_may_edit_a_namespace_runs_jobs_in_it(
    kubeflow_cluster: DevCluster, namespace: str, role: str, *, reads: bool, writes: bool
) -> None:
    somebody, path = user(kubeflow_cluster, role, namespace), jobs_of(namespace)
    if reads:
        assert somebody.items(path) == []
    else:
        denied(somebody.items, path)
    if not writes:
        denied(somebody.create, path, job())
        return
    somebody.create(path, job())
    somebody.patch(f"{path}/a", {"spec": {"suspend": True}})
    denied(somebody.patch, f"{path}/a/status", {"status": {"phase": "Succeeded"}})
    denied(somebody.create, jobs_of("default"), job())
    somebody.delete(f"{path}/a")


def test_a_pipelines_step_runs_jobs_without_multi_user_mode_too(kubeflow_cluster: DevCluster) -> None:
    runner = kubeflow_cluster.api.as_user("system:serviceaccount:kubeflow:pipeline-runner", "system:authenticated")
    runner.create(jobs_of("kubeflow"), job("step"))
    runner.get(f"{jobs_of('kubeflow')}/step")
    denied(runner.create, jobs_of("default"), job("step"))
    denied(runner.delete, f"{jobs_of('kubeflow')}/step")
    kubeflow_cluster.api.delete(f"{jobs_of('kubeflow')}/step")


def profile(name: str, **spec: Any) -> dict[str, Any]:
    owner = {"kind": "User", "name": f"{name}@example.com"}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "Profile",
        "metadata": {"name": name},
        "spec": {"owner": owner, **spec},
    }


def plugin(guaranteed: int) -> dict[str, Any]:
    return {"kind": "GpuQuota", "spec": {"guaranteed": guaranteed}}


OTHER_PLUGIN = {"kind": "WorkloadIdentity", "spec": {"gcpServiceAccount": "x"}}


@pytest.fixture
def team(kubeflow_cluster: DevCluster) -> str:
    """A Profile with a quota of 1 GPU, as an administrator has made it."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    kubeflow_cluster.api.create(PROFILES, profile(name, plugins=[OTHER_PLUGIN, plugin(1)]))
    return name


def test_a_profiles_owner_does_not_reach_their_profile(kubeflow_cluster: DevCluster, team: str, namespace: str) -> None:
    # Kubeflow binds kubeflow-admin in the namespace; a Profile is cluster-scoped
    somebody = user(kubeflow_cluster, "kubeflow-admin", namespace)
    assert "cannot patch resource" in denied(somebody.patch, f"{PROFILES}/{team}", {"spec": {"plugins": [plugin(9)]}})


def test_who_may_write_profiles_but_not_quotas_cannot_write_the_quota(kubeflow_cluster: DevCluster, team: str) -> None:
    rules = [{"apiGroups": ["kubeflow.org"], "resources": ["profiles"], "verbs": ["*"]}]
    kubeflow_cluster.api.create(f"{ROLES}/clusterroles", {"metadata": {"name": f"p-{team}"}, "rules": rules})
    somebody = user(kubeflow_cluster, f"p-{team}")
    for plugins in ([plugin(9)], [plugin(1), plugin(9)], [], None):
        message = denied(somebody.patch, f"{PROFILES}/{team}", {"spec": {"plugins": plugins}})
        assert "only who may change GpuQuotas sets the quota of a Profile" in message
    somebody.patch(f"{PROFILES}/{team}", {"spec": {"plugins": [plugin(1)], "resourceQuotaSpec": {"hard": {}}}})


def test_kubeflows_access_management_makes_profiles_without_a_quota_only(
    kubeflow_cluster: DevCluster, team: str
) -> None:
    kfam = kubeflow_cluster.api.as_user(KFAM, "system:serviceaccounts", "system:authenticated")
    kfam.create(PROFILES, profile(f"{team}-own"))
    assert "sets the quota of a Profile" in denied(kfam.create, PROFILES, profile(f"{team}-big", plugins=[plugin(99)]))
    # the profile controller is the same account, and writes each Profile again as it is
    kfam.replace(f"{PROFILES}/{team}", kfam.get(f"{PROFILES}/{team}"))
    kfam.patch(f"{PROFILES}/{team}", {"metadata": {"labels": {"reconciled": "yes"}}})


def test_an_administrator_sets_a_profiles_quota(kubeflow_cluster: DevCluster, team: str) -> None:
    kubeflow_cluster.api.patch(f"{PROFILES}/{team}", {"spec": {"plugins": [plugin(9)]}})


# The controller's own rights


def may(cluster: DevCluster, verb: str, resource: str, namespace: str = "", name: str = "", group: str = "") -> bool:
    plural, _, subresource = resource.partition("/")
    attributes = {
        "verb": verb,
        "group": group,
        "resource": plural,
        "subresource": subresource,
        "namespace": namespace,
        "name": name,
    }
    body = {"spec": {"user": CONTROLLER, "groups": [], "resourceAttributes": attributes}}
    answer = cluster.api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
    return bool(answer["status"]["allowed"])


@pytest.mark.parametrize(
    ("verb", "resource", "where"),
    [
        ("get", "secrets", "team-a"),
        ("list", "secrets", "team-a"),
        ("list", "secrets", NAMESPACE),
        ("get", "secrets", NAMESPACE),
        ("list", "secrets", KEYS),
        ("update", "pods", "team-a"),
        ("create", "pods/exec", "team-a"),
        ("create", "pods/binding", "team-a"),
        ("patch", "nodes", ""),
        ("delete", "nodes", ""),
        ("delete", "namespaces", ""),
        ("create", "serviceaccounts/token", "team-a"),
        ("impersonate", "users", ""),
        ("create", "leases", "team-a"),
    ],
)
def test_the_controller_may_not_do_what_it_never_does(
    kubeflow_cluster: DevCluster, verb: str, resource: str, where: str
) -> None:
    group = "coordination.k8s.io" if resource == "leases" else ""
    assert not may(kubeflow_cluster, verb, resource, where, group=group)


def test_the_controller_reads_what_was_said_of_a_worker(kubeflow_cluster: DevCluster) -> None:
    assert may(kubeflow_cluster, "list", "events", "team-a")
    assert not may(kubeflow_cluster, "delete", "events", "team-a")


def test_the_controller_writes_its_own_webhook_and_no_other(kubeflow_cluster: DevCluster) -> None:
    group, kind = "admissionregistration.k8s.io", "mutatingwebhookconfigurations"
    assert may(kubeflow_cluster, "patch", kind, name="gpuquota", group=group)
    assert not may(kubeflow_cluster, "patch", kind, name="others", group=group)
    assert not may(kubeflow_cluster, "patch", "validatingadmissionpolicies", name="gpuquota-pods", group=group)
    assert not may(kubeflow_cluster, "patch", "profiles", group="kubeflow.org")
    assert not may(kubeflow_cluster, "create", "clusterroles", group="rbac.authorization.k8s.io")


def test_these_rights_are_enough(kubeflow_cluster: DevCluster, tmp_path: Path) -> None:
    kubeconfig = kubeflow_cluster.kubeconfig_of_service_account(NAMESPACE, ACCOUNT)
    world = Controlled(
        kubeflow_cluster, tmp_path, arguments=["--leader-elect", f"--keys-namespace={KEYS}"], kubeconfig=kubeconfig
    )
    try:
        world.add_nodes(1, gpus=4)
        world.start()
        team = world.team(guaranteed=3)
        kubeflow_cluster.api.patch(f"/api/v1/namespaces/{team}", {"metadata": {"labels": MANAGED}})
        somebody = user(kubeflow_cluster, "edit", team)
        somebody.create(f"/api/v1/namespaces/{team}/pods", pod())
        somebody.create(jobs_of(team), job("train", gpus=2, minGpus=1, maxGpus=4, ttlSecondsAfterFinished=0))
        world.until_bound(f"/api/v1/namespaces/{team}/pods/a")
        world.until_phase(f"{jobs_of(team)}/train", "Running")
        # another team's guaranteed GPUs: one worker leaves
        lender = world.team(guaranteed=1)
        kubeflow_cluster.api.create(f"/api/v1/namespaces/{lender}/pods", pod(labels=MANAGED))
        world.until_bound(f"/api/v1/namespaces/{lender}/pods/a")
        somebody.patch(f"{jobs_of(team)}/train", {"spec": {"suspend": True}})
        world.until_phase(f"{jobs_of(team)}/train", "Suspended")
        stays = {"annotations": {"devcluster/does-not-start": "yes"}}
        silent = job("silent", template={**TEMPLATE, "metadata": stays}, workersReadyTimeoutSeconds=4)
        somebody.create(jobs_of(team), silent)  # the events about its pod are read
        world.until(f"{jobs_of(team)}/silent", lambda j: "requeueState" in j.get("status", {}))
        log = world.log()
        refused = [line for line in log.splitlines() if "forbidden" in line.lower()]
        # Other tests of this control plane delete their namespaces, in which no event can be created any more.
        terminating = [line for line in refused if "because it is being terminated" in line]
        assert refused == terminating, log
        assert refused_calls(log) <= len(terminating), log
    finally:
        world.close()


def refused_calls(log: str) -> float:
    """The controller's own count of the calls that were forbidden, read from its metrics."""
    port = re.findall(r"metrics and probes on port (\d+)", log)[-1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    assert any(line.startswith("gpuquota_api_calls_total") for line in lines)
    forbidden = [line for line in lines if line.startswith("gpuquota_api_calls_total") and 'status="403"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in forbidden)
