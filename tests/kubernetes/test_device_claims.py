"""GPUs by Dynamic Resource Allocation under the quota: a real API server, and kube-scheduler's real DRA plugin.

The cluster has everything of manifests/ installed, a live webhook, and a controller with its own rights. Devices are
published by the test, as a driver publishes them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.api import Phase
from kfp_gpuquota.cli.display.descriptions import described_node
from kfp_gpuquota.cli.jobs import listing
from kfp_gpuquota.cluster.kubernetes.convert.claimed_devices import claimed_devices, selected_by, selects
from kfp_gpuquota.cluster.kubernetes.convert.published_devices import Allocations, PublishedDevices, Shown
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Metadata, Node
from kfp_gpuquota.cluster.kubernetes.objects.device_types import (
    CLAIMS,
    CLASS_PREFIX,
    TEMPLATES,
    AllocatedDevice,
    AllocatedDevices,
    Allocation,
    Cel,
    Consumer,
    DeviceClass,
    DeviceClassSpec,
    DeviceRequest,
    DeviceSelector,
    DeviceTaint,
    ExactRequest,
    RequestedDevices,
    ResourceClaim,
    ResourceClaimSpec,
    ResourceClaimStatus,
    ResourcePool,
    ResourceSlice,
    ResourceSliceSpec,
    SlicedDevice,
    SubRequest,
)
from kfp_gpuquota.cluster.kubernetes.objects.paths import QUOTA_POLICIES
from kfp_gpuquota.cluster.kubernetes.operations.doctor.checks_cluster import gpus
from kfp_gpuquota.cluster.kubernetes.operations.doctor.facts import Reader
from kfp_gpuquota.cluster.kubernetes.operations.policy_check import examine
from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls
from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient
from kfp_gpuquota.engine.records import Intent
from tests.kubernetes.controlled import Controlled
from tests.kubernetes.detached import JOBS, PODS, POLICIES, detached
from tests.kubernetes.installation import ACCOUNT, KEYS, NAMESPACE, QUOTAS, batch_jobs_of, jobs_of
from tests.kubernetes.test_web_page import text_of
from tests.kubernetes.test_webhook import MANAGED
from tests.kubernetes.users import connection_of
from tests.kubernetes.web_page import bind, web_page
from tests.polling import until
from tools.devcluster import fake_nodes
from tools.devcluster.api import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Subject
    from tools.devcluster import DevCluster

API = "/apis/resource.k8s.io/v1"
DRIVER = "gold.example.com"
GOLD, NICS, UNLISTED, BACKED = "gold", "nics", "unlisted", "backed"
RESOURCE = f"{CLASS_PREFIX}{GOLD}"
TABLE = {"gpuResources": [{"name": f"{CLASS_PREFIX}{GOLD}"}], "otherResources": [f"{CLASS_PREFIX}{NICS}"]}

SELECTORS = {
    GOLD: f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'",
    NICS: f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'nic'",
    UNLISTED: f"device.driver == '{DRIVER}'",
    BACKED: f'device.driver == "{DRIVER}" && device.attributes["{DRIVER}"].type == "nvidia"',
}


def publish(cluster: DevCluster, node: str, **kinds_: int) -> None:
    """Create the ResourceSlice of a node's devices, as many as given of each type."""
    kinds = [kind for kind, count in kinds_.items() for _ in range(count)]
    devices = [{"name": f"d{number}", "attributes": {"type": {"string": kind}}} for number, kind in enumerate(kinds)]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices}
    cluster.api.create(f"{API}/resourceslices", {"metadata": {"name": f"{node}-gold"}, "spec": spec})


@pytest.fixture(scope="module")
def world(kubeflow_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controlled]:
    """A controller, DeviceClasses of which one counts, and a node with 4 GPUs of a DRA driver."""
    cluster, folder = kubeflow_cluster, tmp_path_factory.mktemp("device-claims")
    body = {"apiVersion": labels.API_VERSION, "kind": "QuotaPolicy", "metadata": {"name": "default"}}
    cluster.api.apply(f"{QUOTA_POLICIES}/default", {**body, "spec": TABLE})
    for name, expression in SELECTORS.items():
        spec: dict[str, Any] = {"selectors": [{"cel": {"expression": expression}}]}
        if name == BACKED:
            spec["extendedResourceName"] = labels.GPU_RESOURCE
        cluster.api.create(f"{API}/deviceclasses", {"metadata": {"name": name}, "spec": spec})
    kubeconfig = cluster.kubeconfig_of_service_account(NAMESPACE, ACCOUNT)
    made = Controlled(cluster, folder, arguments=[f"--keys-namespace={KEYS}"], kubeconfig=kubeconfig)
    node = fake_nodes.fake_node("claimed", 0)
    node["metadata"]["labels"] |= {"claims": "yes"}
    cluster.api.create("/api/v1/nodes", node)
    made.nodes.append("claimed")
    cluster.api.until("/api/v1/nodes/claimed", lambda one: not one["spec"].get("taints"))
    publish(cluster, "claimed", gpu=4, nic=2, nvidia=1)
    made.start()
    yield made
    made.close()
    cluster.api.delete(f"{API}/resourceslices/claimed-gold")
    for name in SELECTORS:
        cluster.api.delete(f"{API}/deviceclasses/{name}")
    cluster.api.patch(f"{QUOTA_POLICIES}/default", {"spec": {"gpuResources": None, "otherResources": None}})


def request(device_class: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"name": "r", "exactly": {"deviceClassName": device_class, "count": count, **more}}


def create_template(world: Controlled, team: str, name: str, *requests: dict[str, Any]) -> str:
    path = f"{API}/namespaces/{team}/resourceclaimtemplates"
    body = {"metadata": {"name": name}, "spec": {"spec": {"devices": {"requests": list(requests)}}}}
    world.cluster.api.create(path, body)
    return f"{path}/{name}"


def create_claim(world: Controlled, team: str, name: str, *requests: dict[str, Any]) -> str:
    path = f"{API}/namespaces/{team}/resourceclaims"
    world.cluster.api.create(path, {"metadata": {"name": name}, "spec": {"devices": {"requests": list(requests)}}})
    return f"{path}/{name}"


def claiming(name: str, *, template: str = "", claim: str = "", limits: dict[str, str] | None = None) -> dict[str, Any]:
    """A pod that claims devices, or requests them as an extended resource."""
    container: dict[str, Any] = {"name": "main", "image": "none", "resources": {"limits": limits or {}}}
    spec: dict[str, Any] = {"containers": [container], "terminationGracePeriodSeconds": 1}
    if template or claim:
        container["resources"]["claims"] = [{"name": "gpus"}]
        named = {"resourceClaimTemplateName": template} if template else {"resourceClaimName": claim}
        spec["resourceClaims"] = [{"name": "gpus", **named}]
    return {"metadata": {"name": name}, "spec": spec}


def team_of(world: Controlled, **quota: object) -> tuple[str, str]:
    """A managed namespace with a quota, and the path of its pods."""
    team = world.team("claims", **quota)
    world.cluster.api.patch(f"/api/v1/namespaces/{team}", {"metadata": {"labels": MANAGED}})
    path = f"/api/v1/namespaces/{team}/pods"
    until(lambda: _is_gated(world, path, claiming("probe", limits={f"{CLASS_PREFIX}{GOLD}": "1"})))
    return team, path


def _is_gated(world: Controlled, path: str, body: dict[str, Any]) -> bool:
    try:
        return "schedulingGates" in world.cluster.api.create(path, body, dryRun="All")["spec"]
    except ApiError:
        return False


def events(world: Controlled, team: str) -> str:
    return "\n".join(one["message"] for one in world.cluster.api.items(f"/api/v1/namespaces/{team}/events"))


def test_an_implicit_extended_resource_of_any_class_is_counted_or_refused(world: Controlled) -> None:
    """Every DeviceClass has such a name, also one that does not look like a GPU: kube-scheduler gives it out."""
    team, path = team_of(world, guaranteed=1, limit=1)
    with pytest.raises(ApiError, match="unlisted may be a GPU, and is not counted"):
        world.cluster.api.create(path, claiming("a", limits={f"{CLASS_PREFIX}{UNLISTED}": "1"}), dryRun="All")
    for name in "ab":
        world.cluster.api.create(path, claiming(name, limits={f"{CLASS_PREFIX}{GOLD}": "1"}))
    world.wait(lambda: len(world.bound(team)) == 1, world.log)
    world.wait(lambda: "limit" in events(world, team), world.log)
    world.cluster.api.create(path, claiming("nic", limits={f"{CLASS_PREFIX}{NICS}": "1"}))
    world.until_bound(f"{path}/nic")
    world.remove(team)


def test_claims_by_template_wait_for_the_quota(world: Controlled) -> None:
    team, path = team_of(world, guaranteed=2, limit=2)
    create_template(world, team, "one", request(GOLD))
    for name in "abc":
        world.cluster.api.create(path, claiming(name, template="one"))
    world.wait(lambda: len(world.bound(team)) == 2, world.log)
    world.wait(lambda: "limit" in events(world, team), world.log)
    (waiting,) = world.waiting(team)
    world.cluster.api.delete(f"{path}/{min(world.bound(team))}")
    world.until_bound(f"{path}/{waiting}")
    world.remove(team)


def held(world: Controlled, team: str) -> object:
    return world.cluster.api.get(f"{QUOTAS}/{team}").get("status", {}).get("gpus")


def test_a_shared_claim_counts_once_until_its_last_pod_has_gone(world: Controlled) -> None:
    team, path = team_of(world, guaranteed=3, limit=3)
    create_claim(world, team, "shared", request(GOLD, 2))
    create_template(world, team, "two", request(GOLD, 2))
    for name in "ab":
        world.cluster.api.create(path, claiming(name, claim="shared"))
    world.wait(lambda: world.bound(team) == {"a", "b"}, world.log)
    world.wait(lambda: held(world, team) == 2, lambda: str(held(world, team)))
    world.cluster.api.create(path, claiming("c", template="two"))
    world.wait(lambda: "limit" in events(world, team), world.log)
    world.kill()
    world.start()
    world.cluster.api.delete(f"{path}/a")
    world.wait(lambda: "a" not in world.pods(team))
    world.cluster.api.create(path, claiming("d", template="two"))  # a proof that the controller has gone on
    world.wait(lambda: held(world, team) == 2, lambda: str(held(world, team)))
    assert world.waiting(team) == {"c", "d"}
    world.cluster.api.delete(f"{path}/b")
    world.wait(lambda: len(world.bound(team)) == 1, world.log)
    world.remove(team)


@pytest.mark.parametrize(
    ("requested", "why"),
    [
        ({"name": "r", "exactly": {"deviceClassName": GOLD, "allocationMode": "All"}}, "has allocationMode All"),
        (
            {"name": "r", "firstAvailable": [{"name": "s", "deviceClassName": GOLD}]},
            "its request r has alternatives (firstAvailable)",
        ),
        (request(UNLISTED), "DeviceClass unlisted, of which its claim requests devices, is not counted by the quota"),
    ],
    ids=["all", "alternatives", "unlisted"],
)
def test_claims_that_cannot_be_counted_wait_with_the_reason(
    world: Controlled, requested: dict[str, Any], why: str
) -> None:
    team, path = team_of(world, guaranteed=4)
    create_template(world, team, "odd", requested)
    world.cluster.api.create(path, claiming("a", template="odd"))
    world.wait(lambda: why in events(world, team), lambda: events(world, team))
    assert world.waiting(team) == {"a"}
    world.remove(team)


def test_a_pod_waits_for_a_template_that_does_not_exist_yet(world: Controlled) -> None:
    team, path = team_of(world, guaranteed=1)
    world.cluster.api.create(path, claiming("a", template="later"))
    missing = "its ResourceClaimTemplate later does not exist yet"
    world.wait(lambda: missing in events(world, team), lambda: events(world, team))
    client = KubernetesClient(connection_of(world.cluster.kubeconfig))
    assert any(missing in line for line in client.explain_pod(team, "a"))
    create_template(world, team, "later", request(GOLD))
    world.until_bound(f"{path}/a")
    assert any("holds" in line and f"1 of {CLASS_PREFIX}{GOLD}" in line for line in client.explain_pod(team, "a"))
    world.remove(team)


def test_claims_of_other_devices_are_let_through_at_once(world: Controlled) -> None:
    team, path = team_of(world, guaranteed=0, limit=0)
    create_template(world, team, "nic", request(NICS))
    create_template(world, team, "any", request(UNLISTED))
    world.cluster.api.create(path, claiming("a", template="nic"))
    world.until_bound(f"{path}/a")
    world.cluster.api.create(path, claiming("b", template="any"))
    world.wait(lambda: "DeviceClass unlisted" in events(world, team), lambda: events(world, team))
    allowed = {"metadata": {"labels": {labels.ALLOWS_CLAIMS: "true"}}}
    world.cluster.api.patch(f"/api/v1/namespaces/{team}", allowed)
    world.until_bound(f"{path}/b")
    assert held(world, team) in {None, 0}
    world.remove(team)


def test_a_claim_that_is_exchanged_after_the_admission_is_counted_as_what_it_is(world: Controlled) -> None:
    team, path = team_of(world, guaranteed=1, limit=1)
    never = {"selectors": [{"cel": {"expression": "device.driver == 'nobody'"}}]}
    claim = create_claim(world, team, "mine", request(GOLD, 1, **never))
    world.cluster.api.create(path, claiming("a", claim="mine"))
    world.until(f"{path}/a", lambda pod: not pod["spec"].get("schedulingGates"))
    world.cluster.api.delete(claim)
    create_claim(world, team, "mine", {"name": "r", "exactly": {"deviceClassName": GOLD, "allocationMode": "All"}})
    world.until_bound(f"{path}/a")
    world.wait(lambda: held(world, team) == 4, lambda: str(held(world, team)))
    world.remove(team)


Used = dict[str, dict[str, float]]  # of each resource, the devices of each pod


def allocated(world: Controlled) -> Used:
    """The oracle: what kube-scheduler has allocated of the node's GPUs, by its own objects."""
    api, found = world.cluster.api, {RESOURCE: Counter[str](), labels.GPU_RESOURCE: Counter[str]()}
    (published,) = [
        one["spec"] for one in api.items(f"{API}/resourceslices") if one["spec"].get("nodeName") == "claimed"
    ]
    kinds = {one["name"]: one["attributes"]["type"]["string"] for one in published["devices"]}
    resources = {"gpu": RESOURCE, "nvidia": labels.GPU_RESOURCE}
    for claim in api.items(f"{API}/resourceclaims"):
        status = claim.get("status", {})
        for one in status.get("allocation", {}).get("devices", {}).get("results", ()):
            pods = [one["name"] for one in status.get("reservedFor", ())]
            if resource := resources.get(kinds[one["device"]]):
                found[resource].update({name: int(name == pods[0]) for name in pods} or {"": 1})
    return {resource: {**pods} for resource, pods in found.items()}


def listed(client: KubernetesClient) -> Used:
    """What `gpuquota list nodes` shows of the node."""
    view = {view.node.name: view for view in client.list_nodes()}["claimed"]
    devices = Counter(pod for pods in view.held.values() for pod in pods)
    (row,) = [one for one in view.resources if one.name == RESOURCE]
    assert row.count == 4
    return {RESOURCE: row.held, labels.GPU_RESOURCE: {**devices}}


def test_lists_and_the_page_show_what_is_allocated(world: Controlled, tmp_path: Path) -> None:
    """By claims, by a shared one, by an extended resource, by a job's worker, and outside of the quota."""
    api = world.cluster.api
    team, path = team_of(world, guaranteed=3)
    free = world.team("claims-free", guaranteed=0)
    client = KubernetesClient(connection_of(world.cluster.kubeconfig))
    create_template(world, team, "one", request(GOLD))
    create_claim(world, team, "shared", request(GOLD))
    create_template(world, free, "any", request(BACKED))
    for name in "ab":
        api.create(path, claiming(name, claim="shared"))
        world.until_bound(f"{path}/{name}")
    api.create(path, claiming("c", limits={RESOURCE: "1"}))
    world.until_bound(f"{path}/c")
    world.until_phase(world.job(team, "train", worker_template(), gpus=1), "Running")
    api.create(f"/api/v1/namespaces/{free}/pods", claiming("hidden", template="any"))
    world.until_bound(f"/api/v1/namespaces/{free}/pods/hidden")
    (worker,) = world.pods(team).keys() - set("abc")
    expected = {RESOURCE: {"a": 1, "b": 0, "c": 1, worker: 1}, labels.GPU_RESOURCE: {"hidden": 1}}
    assert allocated(world) == expected
    assert listed(client) == expected
    described = described_node({view.node.name: view for view in client.list_nodes()}["claimed"])
    assert f"a (1), b (shared), c (1), {worker} (1)" in described
    bind(world.cluster, "viewer", "view", team)
    bind(world.cluster, "stranger", "view", free)
    with web_page(world.cluster, tmp_path / "page.log") as page:
        own, other = (text_of(page.user(name), "/nodes/claimed") for name in ("viewer", "stranger"))
        assert "4 of 5 GPUs in use" in own
        assert "3 of 4 in use" in own
        assert f"b {team} · shared c {team} · 1 train {team} · 1" in own
        assert "hidden" not in own
        assert "used by others" in own
        assert "4 of 5 GPUs in use" in other
        assert "3 of 4 in use, 3 by others" in other
        assert team not in other
        assert "hidden" in other
        api.delete(f"{path}/c", 0)
        until(lambda: "2 of 4 in use" in text_of(page.user("viewer"), "/nodes/claimed"))
    api.delete(f"/api/v1/namespaces/{free}/pods/hidden", 0)
    for gone in (team, free):
        world.remove(gone)
    until(lambda: not any(allocated(world).values()))
    assert not any(listed(client).values())


def test_doctor_and_policy_check_count_published_devices(world: Controlled) -> None:
    """A cluster whose GPUs are all published by DRA drivers had "no node has GPUs"."""
    calls = Calls(connection_of(world.cluster.kubeconfig))
    facts = Reader(calls).read()
    facts.nodes = [node for node in facts.nodes if node["metadata"]["name"] == "claimed"]
    assert "5 GPUs on 1 nodes" in [one.message for one in gpus(facts)]
    policy = {"apiVersion": labels.API_VERSION, "kind": "QuotaPolicy", "metadata": {"name": "default"}, "spec": TABLE}
    assert not [one for one in examine(policy, calls) if "no node has it" in one.message]
    other = {**policy, "spec": {"gpuResources": [{"name": f"{CLASS_PREFIX}none"}]}}
    assert [one for one in examine(other, calls) if "no node has it" in one.message]


def test_who_may_not_read_claims_sees_the_other_gpus(world: Controlled, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of what is needed would show devices that are in use as idle."""
    api, roles = world.cluster.api, "/apis/rbac.authorization.k8s.io/v1"
    rules = [
        {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list"]},
        {"apiGroups": ["resource.k8s.io"], "resources": ["deviceclasses", "resourceslices"], "verbs": ["list"]},
    ]
    api.create(f"{roles}/clusterroles", {"metadata": {"name": "sees-nodes"}, "rules": rules})
    account = {"kind": "ServiceAccount", "name": "default", "namespace": "default"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "sees-nodes"}
    binding = {"metadata": {"name": "sees-nodes"}, "subjects": [account], "roleRef": role}
    api.create(f"{roles}/clusterrolebindings", binding)
    client = KubernetesClient(connection_of(world.cluster.kubeconfig_of_service_account("default", "default")))
    until(lambda: {view.node.name for view in client.list_nodes()} == {"fake-0"})
    assert 'cannot list resource "resourceclaims"' in client.left_out
    assert "an administrator can give you the right to list" in client.left_out
    listing._note_left_out(client)
    assert capsys.readouterr().err.replace("\n", " ").startswith("note: GPUs that DRA drivers publish are left out: ")
    for kind in ("clusterrolebindings", "clusterroles"):
        api.delete(f"{roles}/{kind}/sees-nodes")


def test_devices_that_others_claim_are_not_planned(world: Controlled) -> None:
    free = world.cluster.make_namespace("claims-free")
    create_template(world, free, "three", request(GOLD, 3))
    world.cluster.api.create(f"/api/v1/namespaces/{free}/pods", claiming("a", template="three"))
    world.until_bound(f"/api/v1/namespaces/{free}/pods/a")
    team, path = team_of(world, guaranteed=2)
    create_template(world, team, "two", request(GOLD, 2))
    world.cluster.api.create(path, claiming("b", template="two"))
    world.wait(lambda: f"2 of {CLASS_PREFIX}{GOLD}" in events(world, team), lambda: events(world, team))
    assert world.waiting(team) == {"b"}
    world.cluster.api.delete(f"/api/v1/namespaces/{free}/pods/a", 0)
    world.until_bound(f"{path}/b")
    world.remove(team)


def test_kubernetes_refuses_administrative_access_to_tenants(world: Controlled) -> None:
    team, _ = team_of(world, guaranteed=1)
    with pytest.raises(ApiError, match="admin access"):
        create_claim(world, team, "all", request(GOLD, adminAccess=True))
    world.remove(team)


def test_gpus_that_a_driver_publishes_are_planned_like_a_device_plugins(world: Controlled) -> None:
    team, path = team_of(world, guaranteed=1)
    body = claiming("a", limits={labels.GPU_RESOURCE: "1"})
    body["spec"]["nodeSelector"] = {"claims": "yes"}
    world.cluster.api.create(path, body)
    assert world.until_bound(f"{path}/a")["spec"]["nodeName"] == "claimed"
    world.wait(lambda: held(world, team) == 1, lambda: str(held(world, team)))
    world.remove(team)


def test_pods_of_a_job_start_together_by_what_they_claim(world: Controlled) -> None:
    team, _ = team_of(world, guaranteed=2, limit=2)
    create_template(world, team, "one", request(GOLD))
    template = {"spec": {**claiming("", template="one")["spec"], "restartPolicy": "Never"}}
    spec = {"parallelism": 3, "completions": 3, "completionMode": "Indexed", "template": template}
    world.cluster.api.create(batch_jobs_of(team), {"metadata": {"name": "gang"}, "spec": spec})
    world.wait(lambda: "needs 3 GPUs" in events(world, team), lambda: events(world, team))
    assert not world.bound(team)
    world.cluster.api.patch(f"{QUOTAS}/{team}", {"spec": {"guaranteed": 3, "limit": 3}})
    world.wait(lambda: len(world.bound(team)) == 3, world.log)
    world.cluster.api.delete(f"{batch_jobs_of(team)}/gang?propagationPolicy=Background")
    world.wait(lambda: not world.pods(team))
    world.remove(team)


def worker_template(name: str = "one", **claim: str) -> dict[str, Any]:
    """A pod template whose first container uses a claim, by default one of the template `name`."""
    named = claim or {"resourceClaimTemplateName": name}
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "gpus"}]}}
    return {"spec": {"containers": [container], "resourceClaims": [{"name": "gpus", **named}]}}


def test_an_elastic_job_grows_and_shrinks_with_claims(world: Controlled) -> None:
    team, path = team_of(world, guaranteed=1, limit=1)
    template = create_template(world, team, "one", request(GOLD))
    sizes = {"gpus": 1, "minGpus": 1, "maxGpus": 3}
    job = world.job(team, "train", worker_template(), **sizes)
    world.until_phase(job, "Running")
    assert len(world.bound(team)) == 1
    world.cluster.api.patch(f"{QUOTAS}/{team}", {"spec": {"guaranteed": 3, "limit": 3}})
    world.wait(lambda: len(world.bound(team)) == 3, world.log)
    world.wait(lambda: held(world, team) == 3, lambda: str(held(world, team)))
    assert all("nvidia.com/gpu" not in str(pod["spec"]) for pod in world.pods(team).values())
    client = KubernetesClient(connection_of(world.cluster.kubeconfig))
    assert client.get_job(team, "train").status.gpus == 3
    world.kill()
    world.cluster.api.delete(template)
    world.start()
    world.wait(lambda: held(world, team) == 3, world.log)
    create_template(world, team, "two", request(GOLD, 2))
    world.cluster.api.create(path, claiming("first", template="two"))
    world.until_bound(f"{path}/first")
    world.wait(lambda: len(world.bound(team)) == 2, world.log)
    world.remove(team)


@pytest.mark.parametrize(
    ("spec", "template", "why"),
    [
        ({"gpus": 2}, worker_template("one"), "set gpusPerWorker to 1"),
        ({"gpus": 1}, worker_template("later"), "its ResourceClaimTemplate later does not exist yet"),
        ({"gpus": 1}, worker_template("other"), f"gpuResources: {CLASS_PREFIX}{UNLISTED}"),
        ({"gpus": 1}, worker_template(resourceClaimName="shared"), "name a template (resourceClaimTemplateName)"),
        ({"gpuFraction": 0.5}, worker_template("one"), "a share of a GPU as well"),
    ],
    ids=["size", "absent", "unlisted", "by-name", "share"],
)
def test_claims_of_a_job_that_cannot_be_counted_are_refused(
    world: Controlled, spec: dict[str, Any], template: dict[str, Any], why: str
) -> None:
    team, _ = team_of(world, guaranteed=4)
    create_template(world, team, "one", request(GOLD))
    create_template(world, team, "other", request(UNLISTED))
    job = world.job(team, "train", template, **spec)
    world.until(job, lambda job: why in job.get("status", {}).get("message", ""))
    assert not world.bound(team)
    if "later" in why:
        create_template(world, team, "later", request(GOLD))
        world.until_phase(job, "Running")
    world.remove(team)


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
def test_workers_with_other_devices_than_their_job_counts_are_stopped(world: Controlled, restarted: bool) -> None:
    """A hostile tenant: one device was counted for each worker, and the next one would get four."""
    team, _ = team_of(world, guaranteed=2, limit=2)
    template = create_template(world, team, "one", request(GOLD))
    job = world.job(team, "train", worker_template(), gpus=1, minGpus=1, maxGpus=2)
    world.until(job, lambda job: job.get("status", {}).get("workers") == 2)
    # A worker that is lost before it runs would be an expansion that failed, which is not tried again.
    world.wait(lambda: [pod["status"].get("phase") for pod in world.pods(team).values()] == ["Running"] * 2, world.log)
    if restarted:
        world.kill()
    world.cluster.api.delete(template)
    create_template(world, team, "one", request(GOLD, 4))
    if restarted:
        world.start()
    world.cluster.api.delete(f"/api/v1/namespaces/{team}/pods/train-1", 0)
    failed = world.until_phase(job, "Failed")
    assert "set gpusPerWorker to 4" in failed["status"]["message"]
    world.wait(lambda: not world.bound(team), world.log)
    world.remove(team)


def test_a_job_that_is_refused_after_it_waited_says_why(world: Controlled) -> None:
    team, _ = team_of(world, guaranteed=1, limit=1)
    create_claim(world, team, "shared", request(GOLD))
    job = world.job(team, "train", {"spec": {"containers": [{"name": "main", "image": "none"}]}}, gpus=2)
    waited = world.until(job, lambda job: "limit" in job.get("status", {}).get("message", ""))
    world.until(job, lambda job: job["status"].get("spentSeconds"))
    world.kill()
    world.cluster.api.patch(job, {"spec": {"template": worker_template(resourceClaimName="shared")}})
    world.start()
    refused = world.until(job, lambda job: "name a template" in job["status"]["message"])
    kept = ("phase", "nextIndex", "spentSeconds")
    assert [refused["status"][one] for one in kept] == [waited["status"][one] for one in kept]
    world.remove(team)


@pytest.mark.parametrize("accepted", [True, False], ids=["accepted", "no-status"])
def test_workers_whose_start_was_not_written_are_not_left_alone(world: Controlled, accepted: bool) -> None:
    """A controller that is killed after it has created pods: meanwhile the template that they name is exchanged."""
    team, _ = team_of(world, guaranteed=2, limit=2)
    template = create_template(world, team, "one", request(GOLD))
    job = world.job(team, "train", worker_template(), gpus=1)
    world.until_phase(job, "Running")
    world.kill()
    world.cluster.api.delete(template)
    create_template(world, team, "one", request(GOLD, 4))
    status = dict.fromkeys(world.cluster.api.get(job)["status"])
    if accepted:
        status |= {"phase": "Pending", "countedResources": {RESOURCE: 1}}
    world.cluster.api.patch(f"{job}/status", {"status": status})
    world.start()
    if accepted:
        world.until(job, lambda job: job.get("status", {}).get("workers") == 1)
        assert world.bound(team) == {"train-0"}
    else:
        world.until(job, lambda job: "set gpusPerWorker to 4" in job.get("status", {}).get("message", ""))
        world.wait(lambda: not world.pods(team), world.log)
    world.remove(team)


@pytest.mark.parametrize("kind", ["pod", "job"])
def test_devices_that_were_exchanged_for_uncounted_ones_are_not_kept(world: Controlled, kind: str) -> None:
    """A hostile tenant: its pod starts with devices that are no GPUs, and gets a claim of an unlisted class instead."""
    team, path = team_of(world, guaranteed=1, limit=1)
    never = {"selectors": [{"cel": {"expression": "device.driver == 'nobody'"}}]}
    template = create_template(world, team, "nic", request(NICS, 1, **never))
    if kind == "pod":
        world.cluster.api.create(path, claiming("train-0", template="nic"))
    else:
        world.job(team, "train", worker_template("nic"), gpus=1)
    pod = world.until(
        f"{path}/train-0",
        lambda pod: not pod["spec"].get("schedulingGates") and pod["status"].get("resourceClaimStatuses"),
    )
    world.cluster.api.delete(template)
    create_template(world, team, "nic", request(UNLISTED))
    claims, old = f"{API}/namespaces/{team}/resourceclaims", pod["metadata"]["uid"]

    def is_gone() -> bool:
        """Kubernetes' controller may have seen the new template not yet, and makes another claim of the former one."""
        for claim in world.cluster.api.items(claims):
            if claim["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] != UNLISTED:
                world.cluster.api.delete(f"{claims}/{claim['metadata']['name']}")
        return old not in {one["metadata"]["uid"] for one in world.pods(team).values()}

    world.wait(is_gone, world.log)
    if kind == "pod":
        world.wait(lambda: "DeviceClass unlisted" in events(world, team), lambda: events(world, team))
    else:
        failed = world.until_phase(f"{jobs_of(team)}/train", "Failed")
        assert "DeviceClass unlisted" in failed["status"]["message"]
    assert not world.bound(team)
    world.remove(team)


def test_pods_keep_devices_that_an_administrator_no_longer_allows(world: Controlled) -> None:
    team, path = team_of(world, guaranteed=1)
    create_template(world, team, "nic", request(NICS))
    world.cluster.api.create(path, claiming("a", template="nic"))
    world.until_bound(f"{path}/a")
    world.cluster.api.patch(f"{QUOTA_POLICIES}/default", {"spec": {"otherResources": None}})
    world.cluster.api.create(path, claiming("b", template="nic"))
    world.wait(lambda: "DeviceClass nics" in events(world, team), lambda: events(world, team))
    assert world.bound(team) == {"a"}
    world.cluster.api.patch(f"{QUOTA_POLICIES}/default", {"spec": {"otherResources": TABLE["otherResources"]}})
    world.until_bound(f"{path}/b")
    world.remove(team)


def test_pods_that_start_together_learn_that_they_cannot_share_a_claim(world: Controlled) -> None:
    team, path = team_of(world, guaranteed=4)
    create_claim(world, team, "shared", request(GOLD, 2))
    for name in "ab":
        body = claiming(name, claim="shared")
        body["metadata"] |= {
            "labels": {labels.POD_GROUP: "gang"},
            "annotations": {labels.POD_GROUP_SIZE: "2"},
        }
        world.cluster.api.create(path, body)
    world.wait(lambda: "pods that start together cannot share a claim" in events(world, team), world.log)
    assert world.waiting(team) == {"a", "b"}
    world.remove(team)


# Without an API server: what it takes long to bring about


def device_class(expression: str, name: str = GOLD) -> DeviceClass:
    return DeviceClass(Metadata(name=name), DeviceClassSpec((DeviceSelector(Cel(expression)),)))


@pytest.mark.parametrize(
    ("expression", "selected"),
    [
        (SELECTORS[GOLD], {"gpu"}),
        (SELECTORS[BACKED], {"nvidia"}),
        (f'device.driver=="{DRIVER}"', {"gpu", "nic", "nvidia"}),
        ("device.driver == 'other'", set()),
        (f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].cores == 8", {"nic"}),
        (f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].fast == true", {"gpu"}),
        (f"device.driver == '{DRIVER}' && device.attributes['other.example.com'].type == 'gpu'", set()),
        (f"device.driver == '{DRIVER}' && device.attributes['other.example.com'].size == 'big'", {"nic"}),
        (f"device.driver == '{DRIVER}' && device.capacity['{DRIVER}'].memory.isGreaterThan(quantity('1Gi'))", "all"),
        (f"device.driver == '{DRIVER}' || true", set()),
        (f"true ? device.driver == '{DRIVER}' && true : false", set()),
        ("device.attributes['a'].type == 'gpu'; " * 1000, set()),
    ],
)
def test_a_class_selects_by_conjunctions_of_equalities(expression: str, selected: object) -> None:
    values: dict[str, dict[str, dict[str, Any]]] = {
        "gpu": {"fast": {"bool": True}},
        "nic": {"cores": {"int": 8}, "other.example.com/size": {"string": "big"}},
    }
    devices = [
        SlicedDevice(kind, {"type": {"string": kind}} | values.get(kind, {})) for kind in ("gpu", "nic", "nvidia")
    ]
    conditions = selected_by(device_class(expression))
    found = {device.name for device in devices if selects(conditions, DRIVER, device)}
    assert found == ({"gpu", "nic", "nvidia"} if selected == "all" else selected)


def test_a_tainted_device_is_not_planned() -> None:
    devices = PublishedDevices(lambda _node: None, lambda *_: None)
    devices.set_counted([RESOURCE])
    devices.put_class(device_class(SELECTORS[GOLD]))
    gpu, taints = {"type": {"string": "gpu"}}, (DeviceTaint("NoExecute"),)
    published = SlicedDevice("a", gpu), SlicedDevice("used", gpu, taints), SlicedDevice("idle", gpu, taints)
    spec = ResourceSliceSpec(DRIVER, "node", ResourcePool("node", 1), published)
    devices.put_slice(ResourceSlice(Metadata(name="s", uid="s"), spec))
    assert devices.apply(Node(Metadata(name="node", uid="n"))).status.allocatable == {RESOURCE: "1"}
    claims = Allocations(with_namespace=True)
    claims.put(claim_with(("used", False), ("idle", True)))
    assert devices.shown_on("node", claims) == {RESOURCE: Shown(2, {"a/x": 1})}, "one that is in use is shown"


def claim_with(*devices: tuple[str, bool]) -> ResourceClaim:
    """A claim of pod x, with these devices, each with administrative access or without."""
    requests = RequestedDevices((DeviceRequest("r", ExactRequest(GOLD)),))
    found = tuple(AllocatedDevice("r", DRIVER, "node", name, admin_access=admin) for name, admin in devices)
    status = ResourceClaimStatus(Allocation(AllocatedDevices(found)), (Consumer("pods", "x"),))
    return ResourceClaim(Metadata(name="c", namespace="a", uid="c"), ResourceClaimSpec(requests), status)


def test_counts_are_bounded_and_alternatives_are_not_counted() -> None:
    requests = (
        DeviceRequest("a", ExactRequest(GOLD, count=2**62)),
        DeviceRequest("b", ExactRequest(NICS, count=-5)),
        DeviceRequest("c", ExactRequest(GOLD, admin_access=True)),
        DeviceRequest("d"),
    )
    found = claimed_devices(ResourceClaimSpec(RequestedDevices(requests)))
    assert found.amounts == ((GOLD, 4096), (NICS, 0))
    assert found.uncountable == ((GOLD, "its request c has adminAccess, which is for pods outside of the quota"),)


def admitted(name: str, claim: str, created: int) -> dict[str, Any]:
    """A running pod with a claim that the plan has admitted."""
    body = claiming(name, claim=claim)
    notes = {labels.DEVICES: "", labels.RESERVED_ON: "node"}
    created_at = f"2026-01-01T00:00:{created:02}Z"
    body["metadata"] |= {"namespace": "a", "uid": name, "annotations": notes, "creationTimestamp": created_at}
    return {**body, "spec": {**body["spec"], "nodeName": "node"}, "status": {"phase": "Running"}}


def played(*order: tuple[str, dict[str, Any]], deleted: tuple[str, dict[str, Any]] | None = None) -> float:
    """Return the GPUs that team a holds for a controller that saw these objects in this order, then a deletion."""

    async def scenario() -> float:
        async with detached() as test:
            test.see(POLICIES, {"metadata": {"name": "default", "uid": "policy"}, "spec": TABLE})
            test.node()
            test.team("a")
            for path, body in order:
                test.see(path, body)
            await test.start()
            if deleted is not None:
                test.see(*deleted, event="DELETED")
            return test.controller.snapshot.held("a").gpus

    return asyncio.run(scenario())


def claim_object(name: str, count: int) -> tuple[str, dict[str, Any]]:
    meta = {"name": name, "namespace": "a", "uid": f"claim-{name}"}
    return CLAIMS, {"metadata": meta, "spec": {"devices": {"requests": [request(GOLD, count)]}}}


def test_every_order_of_the_same_objects_counts_alike() -> None:
    """A restarted controller: of pods that share a claim one counts it, and another one when that has gone."""
    first, second = admitted("x", "c", 1), admitted("y", "c", 2)
    del second["metadata"]["annotations"]
    objects = [(PODS, first), (PODS, second), claim_object("c", 3)]
    for order in itertools.permutations(objects):
        assert played(*order) == 3
        assert played(*order, deleted=(PODS, first)) == 3
        assert played(*order, deleted=(PODS, second)) == 3
        assert played(*order, deleted=objects[2]) == 3, "a pod holds what it held until it has gone"


def elastic_objects(*, template: int, claims: int) -> list[tuple[str, dict[str, Any]]]:
    """An ElasticJob with two workers, whose claims have this number of devices, and its template."""
    owner = {"apiVersion": labels.API_VERSION, "kind": "ElasticJob", "name": "j", "uid": "j", "controller": True}
    spec = {"gpus": 2, "gpusPerWorker": 1, "template": worker_template()}
    status = {"phase": "Running", "attempt": 1, "nextIndex": 2, "workers": 2, "countedResources": {RESOURCE: 1}}
    meta = {"namespace": "a", "generation": 1}
    found = [(JOBS, {"metadata": {**meta, "name": "j", "uid": "j"}, "spec": spec, "status": status})]
    if template:
        requests: dict[str, Any] = {"spec": {"spec": {"devices": {"requests": [request(GOLD, template)]}}}}
        found.append((TEMPLATES, {"metadata": {**meta, "name": "one", "uid": "one"}, **requests}))
    for index in range(2):
        name = f"j-{index}"
        body = admitted(name, name, index)
        notes = {**body["metadata"]["annotations"], labels.GPU_WEIGHTS: f"{RESOURCE}=1"}
        labelled = {labels.JOB: "j", labels.WORKER: str(index), labels.ATTEMPT: "1"}
        body["metadata"] |= {"annotations": notes, "labels": labelled, "ownerReferences": [owner]}
        body["spec"] |= {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "one"}]}
        body["status"]["resourceClaimStatuses"] = [{"name": "gpus", "resourceClaimName": name}]
        found += [(PODS, body), claim_object(name, claims)]
    return found


@pytest.mark.parametrize("template", [0, 1, 4], ids=["deleted", "same", "exchanged"])
def test_a_restarted_controller_counts_workers_alike_in_every_order(template: int) -> None:
    objects = elastic_objects(template=template, claims=1)
    for order in (objects, objects[::-1], [*objects[3:], *objects[:3]]):
        assert played(*order) == 2


def nvidia_objects(device_class: str, phase: str) -> list[tuple[str, dict[str, Any]]]:
    """An ElasticJob with one worker, which has a GPU of a device plugin, and whose claim is of this class."""
    job, template, worker, *_ = elastic_objects(template=1, claims=1)
    job[1]["spec"] |= {"gpus": 1}
    job[1]["status"] |= {"workers": 1, "countedResources": None}
    worker[1]["metadata"]["annotations"] |= {labels.DEVICES: "0"}
    del worker[1]["metadata"]["annotations"][labels.GPU_WEIGHTS]
    worker[1]["spec"]["containers"][0]["resources"]["limits"] = {labels.GPU_RESOURCE: "1"}
    worker[1]["status"]["phase"] = phase
    for body in (template[1], claim := claim_object("j-0", 1)[1]):
        found = body["spec"]["spec"] if "spec" in body["spec"] else body["spec"]
        found["devices"] = {"requests": [request(device_class)]}
    return [job, template, worker, (CLAIMS, claim)]


def outcome(*order: tuple[str, dict[str, Any]], then: tuple[str, dict[str, Any]] | None = None) -> Any:
    """Return the controller's record and state of the job of these objects, after one more."""

    async def scenario() -> Any:
        async with detached() as test:
            test.see(POLICIES, {"metadata": {"name": "default", "uid": "policy"}, "spec": TABLE})
            test.node()
            test.team("a", guaranteed=4)
            for path, body in order:
                test.see(path, body)
            await test.start()
            if then is not None:
                test.see(*then)
            book = test.controller.elastic.book
            return book.jobs.get("j"), book.runtime_states["j"], test.controller.snapshot.held("a").gpus

    return asyncio.run(scenario())


@pytest.mark.parametrize("device_class", [GOLD, UNLISTED])
def test_a_worker_gets_no_other_devices_beside_its_gpu(device_class: str) -> None:
    """A hostile tenant: the template of network cards was exchanged after the job was counted."""
    objects = nvidia_objects(device_class, "Pending")
    for order in (objects, objects[::-1]):
        assert outcome(*order)[0].intent is Intent.FAIL


def test_a_running_worker_stays_when_its_class_or_template_has_gone() -> None:
    objects = nvidia_objects(UNLISTED, "Running")
    for order in (objects, objects[::-1], [objects[0], *objects[2:]]):
        job, _, held = outcome(*order)
        assert (job.intent, held) == (Intent.RUN, 1)


def test_a_waiting_job_is_held_while_its_template_requests_other_devices() -> None:
    (path, job), (_, template), *_ = nvidia_objects(NICS, "Pending")
    _, (_, exchanged), *_ = nvidia_objects(UNLISTED, "Pending")
    job["status"] = {"phase": "Pending"}
    record, state, _ = outcome((path, job), (TEMPLATES, template), then=(TEMPLATES, exchanged))
    assert (record.status.phase, state.uncountable) == (Phase.PENDING, True)
    assert UNLISTED in state.held_back


def test_what_was_allocated_counts() -> None:
    alternatives = (SubRequest("large", BACKED), SubRequest("small", GOLD))
    spec = ResourceClaimSpec(
        RequestedDevices((DeviceRequest("a", ExactRequest(GOLD, "All")), DeviceRequest("b", None, alternatives)))
    )
    allocated = (*[AllocatedDevice("a")] * 3, AllocatedDevice("b/large"), AllocatedDevice("a", admin_access=True))
    assert claimed_devices(spec, allocated).amounts == ((BACKED, 1), (GOLD, 3))


def test_a_claim_that_is_named_twice_counts_once_and_a_template_twice() -> None:
    body = admitted("x", "c", 1)
    body["spec"]["resourceClaims"] = [{"name": name, "resourceClaimName": "c"} for name in "ab"]
    assert played((PODS, body), claim_object("c", 2)) == 2
    body["spec"]["resourceClaims"] = [{"name": name, "resourceClaimTemplateName": "t"} for name in "ab"]
    meta = {"name": "t", "namespace": "a", "uid": "t"}
    template = {"metadata": meta, "spec": {"spec": {"devices": {"requests": [request(GOLD, 2)]}}}}
    assert played((PODS, body), (TEMPLATES, template)) == 4


def test_a_running_pod_that_cannot_be_decoded_counts_its_claims() -> None:
    body = admitted("x", "c", 1)
    body["spec"]["terminationGracePeriodSeconds"] = "long"
    assert played((PODS, body), claim_object("c", 2)) == 2


def test_a_running_pod_with_both_kinds_of_gpus_counts_both() -> None:
    """Its claim was exchanged after its admission: a pod that requests both waits with that reason."""
    body = admitted("x", "c", 1)
    body["metadata"]["annotations"] = {labels.DEVICES: "0", labels.RESERVED_ON: "node"}
    body["spec"]["containers"][0]["resources"] = {"limits": {labels.GPU_RESOURCE: "1"}}
    objects = [(PODS, body), claim_object("c", 2)]
    for order in itertools.permutations(objects):
        assert played(*order) == 3
        assert played(*order, deleted=(PODS, body)) == 0


def test_a_running_sharer_that_claims_a_gpu_counts_both_as_whole() -> None:
    body = admitted("x", "c", 1)
    notes = {labels.DEVICES: "0", labels.RESERVED_ON: "node", "gpu-fraction": "0.5"}
    body["metadata"]["annotations"] = notes
    for order in itertools.permutations([(PODS, body), claim_object("c", 2)]):
        assert played(*order) == 3


def test_a_class_that_is_not_understood_is_reported() -> None:
    reported: list[tuple[Subject, str, str]] = []
    devices = PublishedDevices(lambda _node: None, lambda *one: reported.append(one))
    devices.put_class(device_class(f"device.driver == '{DRIVER}' && cel.bind(x, 1, x == 1)"))
    devices.put_class(device_class(SELECTORS[GOLD], "understood"))
    ((subject, _, message),) = reported
    assert subject.name == GOLD
    assert f"it assumes that all devices of {DRIVER} are of this class" in message


def test_only_slices_of_the_newest_generation_count() -> None:
    nodes: list[Node] = []
    devices = PublishedDevices(nodes.append, lambda *_: None)
    devices.set_counted([f"{CLASS_PREFIX}{GOLD}"])
    devices.put_class(device_class(SELECTORS[GOLD]))
    devices.apply(Node(Metadata(name="node", uid="node")))
    for generation, count in ((1, 3), (2, 2)):
        published = tuple(SlicedDevice(f"d{n}", {"type": {"string": "gpu"}}) for n in range(count))
        spec = ResourceSliceSpec(DRIVER, "node", ResourcePool("node", generation), published)
        devices.put_slice(ResourceSlice(Metadata(name="s", uid=str(generation)), spec))
    assert devices.apply(nodes[-1]).status.allocatable == {f"{CLASS_PREFIX}{GOLD}": "2"}
    devices.drop_slice("2")
    devices.drop_slice("1")
    assert not devices.apply(nodes[-1]).status.allocatable
