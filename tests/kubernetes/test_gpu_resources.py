"""Other resources that count as GPUs, each with a factor: QuotaPolicy.spec.gpuResources, on a real API server.

The cluster has everything of manifests/ installed, a live webhook, and a controller with its own rights.
"""

from __future__ import annotations

import math
import random
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kfp_gpuquota.api.resources import WHOLE_GPU
from kfp_gpuquota.cli.display.descriptions import described_node
from kfp_gpuquota.cli.display.tables import node_table
from kfp_gpuquota.cluster.kubernetes.convert.known_gpus import type_label
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import Stage
from kfp_gpuquota.cluster.kubernetes.convert.pods import counted_view, pod_job, pod_view
from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import weights_in, weights_text
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import GpuResource
from kfp_gpuquota.cluster.kubernetes.objects.paths import QUOTA_POLICIES
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import gpu_weights_of
from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.scheduler.explain import sentences
from tests.kubernetes.controlled import Controlled
from tests.kubernetes.installation import ACCOUNT, KEYS, NAMESPACE, QUOTAS, batch_jobs_of
from tests.kubernetes.test_webhook import MANAGED, pod
from tests.kubernetes.users import connection_of
from tests.polling import until
from tools.devcluster import fake_nodes
from tools.devcluster.api import ApiError
from tools.devcluster.node import GPU_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.devcluster import DevCluster

AMD, SLICE, MIG, GAUDI = "amd.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-3g.40gb", "habana.ai/gaudi"
NPU = "example.com/npu"  # not among the known names
TABLE = [{"name": AMD}, {"name": SLICE, "countsAs": 0.25}, {"name": MIG}, {"name": NPU, "typeLabel": "npu-type"}]


_NODES: tuple[tuple[str, int, dict[str, str]], ...] = (
    ("amd", 0, {AMD: "2"}),
    ("green", 1, {}),
    ("sliced", 0, {SLICE: "8"}),
    ("mig", 0, {MIG: "4"}),
    ("npus", 0, {NPU: "4"}),
)


@pytest.fixture(scope="module")
def world(kubeflow_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controlled]:
    """A controller, a table of resources, and nodes of two vendors, with time slices, and with MIG devices."""
    cluster, folder = kubeflow_cluster, tmp_path_factory.mktemp("gpu-resources")
    body = {"apiVersion": labels.API_VERSION, "kind": "QuotaPolicy", "metadata": {"name": "default"}}
    cluster.api.apply(f"{QUOTA_POLICIES}/default", {**body, "spec": {"gpuResources": TABLE}})
    kubeconfig = cluster.kubeconfig_of_service_account(NAMESPACE, ACCOUNT)
    made = Controlled(cluster, folder, arguments=[f"--keys-namespace={KEYS}"], kubeconfig=kubeconfig)
    for name, gpus, more in _NODES:
        node = fake_nodes.fake_node(name, gpus)
        node["status"]["allocatable"] |= more
        node["metadata"]["labels"] |= {"vendors": "yes", "amd.com/gpu.product-name": "MI300X", "npu-type": "v2"}
        cluster.api.create("/api/v1/nodes", node)
        made.nodes.append(name)
        cluster.api.until(f"/api/v1/nodes/{name}", lambda one: not one["spec"].get("taints"))
    made.start()
    yield made
    made.close()
    cluster.api.patch(f"{QUOTA_POLICIES}/default", {"spec": {"gpuResources": None}})


def asking(name: str, **amounts: int) -> dict[str, Any]:
    """A pod that requests these amounts; `amd`, `slices` and `gpus` name the resources."""
    names = {"amd": AMD, "slices": SLICE, "mig": MIG, "npus": NPU, "gpus": labels.GPU_RESOURCE}
    limits = {names.get(key, key): str(amount) for key, amount in amounts.items()}
    container = {"name": "main", "image": "none", "resources": {"limits": limits}}
    spec = {"containers": [container], "nodeSelector": {"vendors": "yes"}, "terminationGracePeriodSeconds": 1}
    return {"metadata": {"name": name}, "spec": spec}


def team_of(world: Controlled, **quota: object) -> tuple[str, str]:
    """A managed namespace with a quota, and the path of its pods."""
    team = world.team("vendors", **quota)
    world.cluster.api.patch(f"/api/v1/namespaces/{team}", {"metadata": {"labels": MANAGED}})
    path = f"/api/v1/namespaces/{team}/pods"
    until(lambda: _gates(world, path))
    return team, path


def _gates(world: Controlled, path: str) -> bool:
    """Return whether the webhook and the policies have read the namespace's label and the table."""
    try:
        return "schedulingGates" in world.cluster.api.create(path, asking("probe", slices=1), dryRun="All")["spec"]
    except ApiError:
        return False


def test_two_vendors_and_time_slices_share_one_quota(world: Controlled) -> None:
    team, path = team_of(world, guaranteed=2, limit=2.5)
    for name, amounts in (("a", {"amd": 1}), ("b", {"gpus": 1}), ("c", {"slices": 2})):
        world.cluster.api.create(path, asking(name, **amounts))
    nodes = {name: world.until_bound(f"{path}/{name}")["spec"]["nodeName"] for name in "abc"}
    assert nodes == {"a": "amd", "b": "green", "c": "sliced"}
    quota = world.until(f"{QUOTAS}/{team}", lambda one: one.get("status", {}).get("gpus") == 2.5)
    assert quota["status"]["borrowed"] == 0.5
    world.cluster.api.create(path, asking("d", amd=1))
    world.wait(lambda: "needs 1 GPU (1 of amd.com/gpu); project" in _events(world, team))
    world.cluster.api.delete(f"{path}/c")
    world.cluster.api.delete(f"{path}/b")
    assert world.until_bound(f"{path}/d")["spec"]["nodeName"] == "amd"
    world.remove(team)


def _events(world: Controlled, team: str) -> str:
    return "\n".join(one["message"] for one in world.cluster.api.items(f"/api/v1/namespaces/{team}/events"))


def test_a_guaranteed_resource_is_reclaimed_and_given_on_when_its_pod_has_gone(world: Controlled) -> None:
    lender, lent = team_of(world, guaranteed=0)
    owner, own = team_of(world, guaranteed=1)
    for name in "ab":
        world.cluster.api.create(lent, asking(name, amd=1))
    for name in "ab":
        world.until_bound(f"{lent}/{name}")
    world.cluster.api.create(own, asking("c", amd=1))
    assert world.until_bound(f"{own}/c")["spec"]["nodeName"] == "amd"
    until(lambda: len(world.cluster.api.items(lent)) == 1)
    world.cluster.api.create(own, asking("large", amd=3))
    too_large = "no node that it may use has 3 of amd.com/gpu: the most is 2"
    world.wait(lambda: too_large in _events(world, owner))
    world.remove(lender)
    world.remove(owner)


def test_what_counts_is_gated_with_its_factor_and_what_does_not_is_refused(world: Controlled) -> None:
    _, path = team_of(world, guaranteed=1)
    api = world.cluster.api
    forged = asking("a", slices=1)
    forged["metadata"]["annotations"] = {labels.GPU_WEIGHTS: f"{SLICE}=0.001"}
    made = api.create(path, forged, dryRun="All")
    assert made["metadata"]["annotations"][labels.GPU_WEIGHTS] == f"{SLICE}=0.25"
    assert "env" not in made["spec"]["containers"][0], "the device plugin sets NVIDIA_VISIBLE_DEVICES"
    with pytest.raises(ApiError, match=r"nvidia\.com/mig-1g\.10gb is not counted by the quota"):
        api.create(path, asking("b", **{"nvidia.com/mig-1g.10gb": 1}), dryRun="All")
    with pytest.raises(ApiError, match=r"the pod requests nvidia\.com/gpu as well"):
        api.create(path, asking("c", amd=1, gpus=1), dryRun="All")
    with pytest.raises(ApiError, match="looks like a GPU that is not counted"):
        api.create(path, asking("d", **{"intel.com/gpu": 1}), dryRun="All")
    with pytest.raises(ApiError, match=r"habana\.ai/gaudi looks like a GPU that is not counted"):
        api.create(path, asking("d", **{GAUDI: 1}), dryRun="All")
    api.create(path, pod("", name="e"), dryRun="All")


def test_an_unmanaged_namespace_is_denied_what_counts_as_gpus(world: Controlled) -> None:
    api = world.cluster.api
    path = f"/api/v1/namespaces/{world.cluster.make_namespace('vendors-free')}/pods"
    api.create(path, asking("a", npus=1), dryRun="All")
    api.patch(f"{QUOTA_POLICIES}/default", {"spec": {"unmanaged": "deny"}})
    try:
        until(lambda: _is_denied(world, path, asking("a", npus=1)))
        api.create(path, asking("b", **{GAUDI: 1}), dryRun="All")
    finally:
        api.patch(f"{QUOTA_POLICIES}/default", {"spec": {"unmanaged": "ignore"}})


def _is_denied(world: Controlled, path: str, body: dict[str, Any]) -> bool:
    try:
        world.cluster.api.create(path, body, dryRun="All")
    except ApiError as error:
        return "so its pods get no GPUs" in error.message
    return False


@pytest.mark.parametrize(
    ("rows", "refusal"),
    [
        ([{"name": AMD, "countsAs": 0}], "it must be a number of GPUs from 0.001 to 64"),
        ([{"name": AMD, "countsAs": -1}], "it must be a number of GPUs from 0.001 to 64"),
        ([{"name": AMD, "countsAs": 65}], "countsAs is 65, but it must be"),
        ([{"name": AMD, "countsAs": "NaN"}], 'must be of type number: "string"'),
        ([{"name": AMD}, {"name": AMD}], "Duplicate value"),
        ([{"name": labels.GPU_RESOURCE, "countsAs": 2}], "which always counts as 1"),
        ([{"name": "cpu"}], "it must be an extended resource"),
        ([{"name": AMD, "typeLabel": 3}], "typeLabel"),
        ([{"name": "nvidia.com/hostdev"}], "in gpuResources and in otherResources"),
    ],
)
def test_a_bad_table_is_refused_with_the_reason(world: Controlled, rows: list[dict[str, Any]], refusal: str) -> None:
    change = {"spec": {"gpuResources": rows, "otherResources": ["nvidia.com/hostdev"]}}
    with pytest.raises(ApiError) as error:
        world.cluster.api.patch(f"{QUOTA_POLICIES}/default", change, dryRun="All")
    assert refusal in error.value.message


def test_the_real_scheduler_binds_mig_devices_and_they_count_as_their_slices(world: Controlled) -> None:
    team, path = team_of(world, guaranteed=1, limit=1)
    for name in "ab":
        world.cluster.api.create(path, asking(name, mig=1))
    assert {world.until_bound(f"{path}/{name}")["spec"]["nodeName"] for name in "ab"} == {"mig"}
    world.cluster.api.create(path, asking("c", mig=1))
    world.until(f"{QUOTAS}/{team}", lambda one: one.get("status", {}).get("gpus") == 0.8571)
    why = "needs 0.4286 GPUs (1 of nvidia.com/mig-3g.40gb); project"
    world.wait(lambda: why in _events(world, team))
    world.cluster.api.delete(f"{path}/a")
    world.until_bound(f"{path}/c")
    world.remove(team)


def test_the_real_scheduler_agrees_with_every_plan(world: Controlled) -> None:
    """What starts is bound where it was planned, and kube-scheduler has no node for what waits either."""
    team, path = team_of(world, guaranteed=100)
    drawn, api, plain = random.Random(45), world.cluster.api, world.cluster.make_namespace("vendors-plain")
    asked = {
        f"p{number}": {drawn.choice(("amd", "slices", "mig", "npus")): drawn.randint(1, 3)} for number in range(16)
    }
    for name, amounts in asked.items():
        api.create(path, asking(name, **amounts))
    until(lambda: all(_planned(one) or _waits(world, team, one) for one in api.items(path)))
    waiting = [one["metadata"]["name"] for one in api.items(path) if not _planned(one)]
    for name in asked.keys() - {*waiting}:
        world.until_bound(f"{path}/{name}")
    assert 0 < len(waiting) < len(asked)
    probes = f"/api/v1/namespaces/{plain}/pods"
    for name in waiting:
        api.create(probes, asking(name, **asked[name]))
    for name in waiting:
        world.until(f"{probes}/{name}", lambda one: "Insufficient" in str(one["status"].get("conditions")))
    for name in waiting:
        api.delete(f"{probes}/{name}")
    world.remove(team)


def _planned(pod: dict[str, Any]) -> bool:
    return not pod["spec"].get("schedulingGates")


def _waits(world: Controlled, team: str, pod: dict[str, Any]) -> bool:
    events = world.cluster.api.items(f"/api/v1/namespaces/{team}/events")
    name = pod["metadata"]["name"]
    return any(one["involvedObject"]["name"] == name and one["reason"] == "Waiting" for one in events)


@pytest.mark.parametrize("resource", [AMD, MIG])
def test_workers_of_an_elastic_job_hold_what_their_template_requests(world: Controlled, resource: str) -> None:
    team, _ = team_of(world, guaranteed=2, limit=2)
    limits = {"containers": [{"name": "main", "image": "none", "resources": {"limits": {resource: "1"}}}]}
    job = world.job(team, "train", {"spec": limits}, gpus=2, minGpus=1, maxGpus=2)
    world.until_phase(job, "Running")
    world.wait(lambda: len(world.bound(team)) == 2, world.log)
    world.remove(team)


def test_a_gang_of_a_resource_of_any_name_starts_together(world: Controlled) -> None:
    """Its size was 1: the pods of its template did not look as if they requested GPUs."""
    team, path = team_of(world, guaranteed=4)
    api, spec = world.cluster.api, asking("", npus=2)["spec"]
    jobs = batch_jobs_of(team)
    template = {"spec": {**spec, "restartPolicy": "Never"}}
    body = {"parallelism": 3, "completions": 3, "completionMode": "Indexed", "template": template}
    api.create(jobs, {"metadata": {"name": "wide"}, "spec": body})
    world.wait(
        lambda: "3 times" in _events(world, team) or "needs 6 GPUs (6 of example.com/npu)" in _events(world, team)
    )
    assert not any(pod["spec"].get("nodeName") for pod in api.items(path))
    api.create(jobs, {"metadata": {"name": "pair"}, "spec": {**body, "parallelism": 2, "completions": 2}})
    until(lambda: sum(pod["spec"].get("nodeName") == "npus" for pod in api.items(path)) == 2)
    for name in ("wide", "pair"):
        api.delete(f"{jobs}/{name}?propagationPolicy=Background")
    until(lambda: not api.items(path))
    world.remove(team)


def test_a_restarted_controller_counts_and_waits_alike(world: Controlled) -> None:
    team, path = team_of(world, guaranteed=1, limit=1)
    api = world.cluster.api
    session = asking("session", npus=1)
    session["metadata"]["labels"] = {labels.KIND: "build"}
    api.create(path, session)
    world.until_bound(f"{path}/session")
    api.create(path, asking("later", mig=1))
    world.wait(lambda: "0.4286 GPUs" in _events(world, team))
    world.kill()
    world.start()
    api.create(path, asking("last", npus=1))
    world.wait(lambda: _events(world, team).count("needs 1 GPU (1 of example.com/npu)") == 1)
    assert api.get(f"{QUOTAS}/{team}")["status"]["gpus"] == 1
    api.delete(f"{path}/session")
    world.until_bound(f"{path}/later")
    world.remove(team)


def test_lists_of_nodes_show_each_resource_with_its_type(world: Controlled) -> None:
    _, path = team_of(world, guaranteed=2)
    for name, amounts in (("a", {"amd": 1}), ("b", {"slices": 2})):
        world.cluster.api.create(path, asking(name, **amounts))
        world.until_bound(f"{path}/{name}")
    client = KubernetesClient(connection_of(world.cluster.kubeconfig))
    shown = {view.node.name: view for view in client.list_nodes()}
    assert [(one.count, one.in_use, one.type) for one in shown["amd"].resources] == [(2, 1, "MI300X")]
    assert (shown["sliced"].gpus, shown["sliced"].gpus_in_use, shown["sliced"].gpus_idle) == (2, 0.5, 1.5)
    assert shown["mig"].gpus == pytest.approx(12 / 7)
    text = node_table([shown["amd"], shown["npus"], shown["sliced"]])
    assert [line.split() for line in text.splitlines()] == [
        ["NODE", "STATUS", "GPUS", "IN", "USE", "IDLE", "MODEL", "RESOURCES"],
        ["amd", "ready", "2", "1", "1", "MI300X", "1", "of", "2", "amd.com/gpu"],
        ["npus", "ready", "4", "0", "4", "v2", "0", "of", "4", "example.com/npu"],
        ["sliced", "ready", "2", "0.5", "1.5", GPU_MODEL, "2", "of", "8", "nvidia.com/gpu.shared"],
    ]
    assert "a (1)" in described_node(shown["amd"])


# Without a cluster


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("nvidia.com/mig-1g.10gb", 1 / 7),
        ("nvidia.com/mig-1g.10gb.me", 1 / 7),
        ("nvidia.com/mig-7g.80gb", 1),
        ("nvidia.com/mig-1c.3g.40gb", 1 / 7),
        ("nvidia.com/mig-3g", 1),
        ("nvidia.com/mig-9g.5gb", 1),
        (GAUDI, 1),
        (NPU, 1),
    ],
)
def test_a_mig_profile_counts_as_its_compute_slices(name: str, number: float) -> None:
    assert gpu_weights_of([GpuResource(name)]) == ((name, round(number * WHOLE_GPU)),)
    assert gpu_weights_of([GpuResource(name, 0.25)]) == ((name, WHOLE_GPU // 4),), "the admin's number counts"


@pytest.mark.parametrize(
    ("row", "label"),
    [
        (GpuResource(MIG), "nvidia.com/gpu.product"),
        (GpuResource(GAUDI), ""),
        (GpuResource(AMD, type_label="mine"), "mine"),
        (GpuResource("gpu.intel.com/xe"), "gpu.intel.com/product"),
    ],
)
def test_a_known_resource_has_a_label_for_its_type(row: GpuResource, label: str) -> None:
    assert type_label(row) == label


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf, 64.5])
def test_a_factor_out_of_bounds_leaves_the_last_table_in_effect(factor: float) -> None:
    with pytest.raises(InvalidFieldError, match=r"countsAs must be a number of GPUs from 0\.001 to 64"):
        gpu_weights_of([GpuResource(AMD, factor)])


def test_seven_sevenths_of_a_gpu_are_shown_as_one() -> None:
    ((_, seventh),) = gpu_weights_of([GpuResource("nvidia.com/mig-1g.10gb")])
    assert [sentences.gpus(parts * seventh) for parts in (1, 3, 7)] == ["0.1429 GPUs", "0.4286 GPUs", "1 GPU"]


def test_a_resource_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="it is listed twice"):
        gpu_weights_of([GpuResource(AMD), GpuResource(AMD, 2.0)])


def test_the_annotation_is_exact_and_a_forged_one_is_no_credit() -> None:
    weights = ((AMD, WHOLE_GPU), ("nvidia.com/mig-1g.10gb", 142_857), (SLICE, 12_345_678))
    assert weights_in(weights_text(weights)) == weights
    for text in ("", "x", f"{AMD}=nan", f"{AMD}=-1", f"{AMD}=1e9", f"{AMD}=0"):
        with pytest.raises(InvalidFieldError):
            weights_in(text)


def test_a_pod_counts_alike_before_and_after_its_admission() -> None:
    notes = {labels.GPU_WEIGHTS: f"{AMD}=0.5"}
    body = asking("a", amd=3)
    body["metadata"] |= {"uid": uuid.uuid4().hex, "namespace": "team", "annotations": notes}
    gated = {**body, "spec": {**body["spec"], "schedulingGates": [{"name": labels.QUOTA_GATE}]}}
    admitted = {
        "metadata": {**body["metadata"], "annotations": {**notes, labels.DEVICES: ""}},
        "spec": {**body["spec"], "nodeName": "amd"},
    }
    waiting, running = (pod_view(msgspec.convert(one, Pod)) for one in (gated, admitted))
    assert (waiting.stage, running.stage) == (Stage.WAITING, Stage.ASSIGNED)
    assert pod_job(waiting) == pod_job(running)
    assert pod_view(msgspec.convert(body, Pod)).stage is Stage.OUTSIDE, "nobody has gated or admitted it"


def test_a_running_pod_that_cannot_be_planned_counts_by_what_it_requests() -> None:
    """It was left out: of the quota, and of what its node has left."""
    notes = {labels.GPU_WEIGHTS: f"{AMD}=0.5", labels.DEVICES: "", labels.POD_GROUP_SIZE: "many"}
    body = asking("a", amd=3)
    body["metadata"] |= {"uid": uuid.uuid4().hex, "namespace": "team", "annotations": notes}
    view = counted_view(msgspec.convert({**body, "spec": {**body["spec"], "nodeName": "amd"}}, Pod))
    assert view.problem
    assert (view.stage, view.counted) == (Stage.ASSIGNED, True)
    assert (view.gpu_weights, view.needs.others) == (((AMD, 500_000),), ((AMD, 3),))
