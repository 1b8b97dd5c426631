"""Parts of GPUs by Dynamic Resource Allocation: partitions with shared counters, and consumable capacity.

kube-scheduler's real plugin allocates on the real control plane; the devices are published by the test, as a driver
publishes them. The oracle of what counts is kube-scheduler's own allocation and the published counters.
"""

from __future__ import annotations

import asyncio
import random
import time
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pytest

from kfp_gpuquota.api.resources import GPU_PART_PREFIX, WHOLE_GPU
from kfp_gpuquota.cli.display.descriptions import described_node
from kfp_gpuquota.cluster.kubernetes.convert.claimed_devices import Demand, Selected, claimed_devices
from kfp_gpuquota.cluster.kubernetes.convert.device_parts import PublishedParts
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.device_types import (
    CLAIMS,
    CLASS_PREFIX,
    CLASSES,
    ResourceClaimSpec,
    ResourceSliceSpec,
)
from kfp_gpuquota.cluster.kubernetes.objects.device_types import SLICES as SLICES_PATH
from kfp_gpuquota.cluster.kubernetes.objects.paths import QUOTA_POLICIES
from kfp_gpuquota.cluster.kubernetes.operations.doctor import checks_cluster
from kfp_gpuquota.cluster.kubernetes.operations.doctor.facts import Reader
from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls
from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient
from tests.effort import soaked
from tests.kubernetes import test_device_claims
from tests.kubernetes.detached import PODS, POLICIES, detached
from tests.kubernetes.test_device_claims import (
    API,
    TABLE,
    admitted,
    claiming,
    create_template,
    events,
    held,
    request,
    team_of,
    worker_template,
)
from tests.kubernetes.users import connection_of
from tools.devcluster import fake_nodes
from tools.devcluster.api import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kubernetes.controlled import Controlled

DRIVER: Final = "parts.example.com"
MIG, SHARED, FABRIC = "mig", "shared-gpu", "fabric"
SLICES, GIBIBYTES = 7, 80
PROFILES = {"1g": (1, 10), "2g": (2, 20), "3g": (3, 40), "4g": (4, 40), "7g": (7, 80)}  # slices, GiB
SELECTORS = {
    MIG: f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].kind == 'mig'",
    SHARED: f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].kind == 'shared'",
    FABRIC: f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].kind == 'fabric'",
}

base_world = test_device_claims.world


def attributes(kind: str, profile: str = "") -> dict[str, Any]:
    return {"kind": {"string": kind}, **({"profile": {"string": profile}} if profile else {})}


def partitions(gpu: int, profiles: dict[str, tuple[int, int]] | None = None) -> tuple[dict[str, Any], list[Any]]:
    """A counter set for one GPU, and as many devices of each profile as could be."""
    profiles = profiles or PROFILES
    counters = {"slices": {"value": str(SLICES)}, "memory": {"value": f"{GIBIBYTES}Gi"}}
    devices = []
    for profile, (slices, memory) in profiles.items():
        consumed = {"slices": {"value": str(slices)}, "memory": {"value": f"{memory}Gi"}}
        devices += [
            {
                "name": f"gpu{gpu}-{profile}-{number}",
                "attributes": attributes("mig", profile),
                "consumesCounters": [{"counterSet": f"gpu{gpu}", "counters": consumed}],
            }
            for number in range(SLICES // slices)
        ]
    return {"name": f"gpu{gpu}", "counters": counters}, devices


def divided_gpu() -> tuple[list[Any], list[Any]]:
    """The counter sets and the devices of a node with one GPU."""
    counters, devices = partitions(0)
    return [counters], devices


def shared_gpu(number: int, policy: dict[str, Any] | None = None) -> dict[str, Any]:
    memory = {"value": f"{GIBIBYTES}Gi", **({"requestPolicy": policy} if policy else {})}
    capacity = {"memory": memory, "cores": {"value": "100"}}
    return {
        "name": f"shared{number}",
        "attributes": attributes("shared"),
        "allowMultipleAllocations": True,
        "capacity": capacity,
    }


def slices_of(pool: str, node: str, sets: list[Any], devices: list[Any]) -> list[dict[str, Any]]:
    count = int(bool(sets)) + int(bool(devices))
    common: dict[str, Any] = {"driver": DRIVER, "pool": {"name": pool, "generation": 1, "resourceSliceCount": count}}
    common |= {"nodeName": node} if node else {"allNodes": True}
    bodies = [{**common, "sharedCounters": sets}] if sets else []
    return [*bodies, {**common, "devices": devices}] if devices else bodies


def add_node(world: Controlled, name: str, sets: list[Any], devices: list[Any]) -> None:
    """Add a node of a DRA driver; it is deleted with its slices at the end."""
    node = fake_nodes.fake_node(name, 0)
    node["metadata"]["labels"] |= {"parts": name.rsplit("-", 1)[0]}
    for number, spec in enumerate(slices_of(name, name, sets, devices)):
        world.cluster.api.create(f"{API}/resourceslices", {"metadata": {"name": f"{name}-{number}"}, "spec": spec})
    world.cluster.api.create("/api/v1/nodes", node)
    world.cluster.api.until(f"/api/v1/nodes/{name}", lambda one: not one["spec"].get("taints"))


def remove_nodes(world: Controlled, *names: str) -> None:
    for name in names:
        world.cluster.api.delete(f"/api/v1/nodes/{name}")
        for one in world.cluster.api.items(f"{API}/resourceslices"):
            if one["spec"].get("nodeName") == name:
                world.cluster.api.delete(f"{API}/resourceslices/{one['metadata']['name']}")


@pytest.fixture(scope="module")
def world(base_world: Controlled) -> Iterator[Controlled]:
    """The world of whole devices, with classes whose devices are parts of GPUs."""
    api = base_world.cluster.api
    rows = [{"name": f"{CLASS_PREFIX}{name}"} for name in SELECTORS]
    table: dict[str, Any] = dict(TABLE)
    policy = {**table, "gpuResources": [*table["gpuResources"], *rows]}
    api.patch(f"{QUOTA_POLICIES}/default", {"spec": policy})
    for name, expression in SELECTORS.items():
        spec = {"selectors": [{"cel": {"expression": expression}}]}
        api.create(f"{API}/deviceclasses", {"metadata": {"name": name}, "spec": spec})
    yield base_world
    for name in SELECTORS:
        api.delete(f"{API}/deviceclasses/{name}")


def profile(name: str, count: int = 1) -> dict[str, Any]:
    """A request for partitions of one profile, as users of MIG write it."""
    expression = f"device.attributes['{DRIVER}'].profile == '{name}'"
    return request(MIG, count, selectors=[{"cel": {"expression": expression}}])


def memory(amount: str, **more: str) -> dict[str, Any]:
    return request(SHARED, capacity={"requests": {"memory": amount, **more}})


def pod_on(world: Controlled, team: str, name: str, group: str, template: str) -> str:
    body = claiming(name, template=template)
    body["spec"]["nodeSelector"] = {"parts": group}
    world.cluster.api.create(f"/api/v1/namespaces/{team}/pods", body)
    return f"/api/v1/namespaces/{team}/pods/{name}"


def allocated_gpus(world: Controlled, team: str) -> float:
    """The oracle: the parts of GPUs that kube-scheduler has allocated to a namespace, by memory."""
    api = world.cluster.api
    devices = {}
    for one in api.items(f"{API}/resourceslices"):
        for device in one["spec"].get("devices", ()):
            devices[one["spec"]["driver"], one["spec"]["pool"]["name"], device["name"]] = device
    found = Fraction(0)
    for claim in api.items(f"{API}/namespaces/{team}/resourceclaims"):
        for one in claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ()):
            if consumed := one.get("consumedCapacity"):
                found += Fraction(_gibibytes(consumed["memory"]), GIBIBYTES)
            else:
                (counters,) = devices[one["driver"], one["pool"], one["device"]]["consumesCounters"]
                found += Fraction(_gibibytes(counters["counters"]["memory"]["value"]), GIBIBYTES)
    return float(found)


def _gibibytes(quantity: str) -> Fraction:
    return Fraction(quantity.removesuffix("Gi")) if quantity.endswith("Gi") else Fraction(int(quantity), 1 << 30)


def counts(world: Controlled, team: str, gpus: float) -> None:
    """Wait until the quota counts what kube-scheduler has allocated, which are these GPUs."""

    def both() -> tuple[float, float]:
        return float(str(held(world, team) or 0)), allocated_gpus(world, team)

    world.wait(lambda: all(abs(one - gpus) < 0.001 for one in both()), lambda: f"{both()}\n{events(world, team)}")


def test_partitions_count_as_their_part_of_a_gpu(world: Controlled) -> None:
    add_node(world, "mig-0", *divided_gpu())
    team, _ = team_of(world, guaranteed=1, limit=1)
    for name in PROFILES:
        create_template(world, team, name, profile(name))
    for number, name in enumerate(("3g", "1g", "2g")):
        world.until_bound(pod_on(world, team, f"p{number}", "mig", name))
    counts(world, team, 70 / 80)
    world.kill()
    world.start()
    pod_on(world, team, "more", "mig", "3g")
    world.wait(lambda: "limit" in events(world, team), lambda: events(world, team))
    assert "0.5 GPUs" in events(world, team)
    client = KubernetesClient(connection_of(world.cluster.kubeconfig))
    (view,) = [one for one in client.list_nodes() if one.node.name == "mig-0"]
    (row,) = [one for one in view.resources if one.held]
    assert (view.gpus, row.count, row.held) == (1, 1, {"p0": 0.5, "p1": 0.125, "p2": 0.25})
    facts = Reader(Calls(connection_of(world.cluster.kubeconfig))).read()
    facts.nodes = [node for node in facts.nodes if node["metadata"]["name"] == "mig-0"]
    assert "1 GPU on 1 nodes" in [one.message for one in checks_cluster.gpus(facts)], "not its partitions"
    assert "p1 (0.125)" in described_node(view)
    assert any("0.5 GPUs" in line and DRIVER in line for line in client.explain_pod(team, "more"))
    world.cluster.api.delete(f"/api/v1/namespaces/{team}/pods/p0", 0)
    world.until_bound(f"/api/v1/namespaces/{team}/pods/more")
    counts(world, team, 70 / 80)
    world.remove(team)
    remove_nodes(world, "mig-0")


@pytest.mark.parametrize(
    ("policy", "asked", "gpus"),
    [
        (None, "20Gi", 0.25),
        (None, "", 1.0),
        ({"default": "10Gi", "validRange": {"min": "10Gi", "step": "10Gi"}}, "15Gi", 0.25),
        ({"default": "10Gi", "validRange": {"min": "10Gi", "step": "10Gi"}}, "", 0.125),
        ({"default": "40Gi", "validValues": ["20Gi", "40Gi", "80Gi"]}, "21Gi", 0.5),
    ],
    ids=["exact", "all", "step", "default", "valid-value"],
)
def test_consumed_capacity_counts_as_its_part_of_a_gpu(
    world: Controlled, policy: dict[str, Any] | None, asked: str, gpus: float
) -> None:
    add_node(world, "shared-0", [], [shared_gpu(0, policy)])
    team, _ = team_of(world, guaranteed=2, limit=2)
    create_template(world, team, "some", memory(asked, cores="10") if asked else request(SHARED))
    world.until_bound(pod_on(world, team, "a", "shared", "some"))
    counts(world, team, gpus)
    world.remove(team)
    remove_nodes(world, "shared-0")


class Drawn(NamedTuple):
    """A random case: on each node one GPU, divided or shared, and pods that claim parts of it."""

    divided: bool
    nodes: int
    pods: tuple[str, ...]  # profiles, or GiB of memory


def drawn(seed: int) -> Drawn:
    found = random.Random(seed)
    divided = bool(seed % 2)
    names = sorted(PROFILES) if divided else ["5", "10", "20", "30", "50", "80"]
    return Drawn(divided, found.randint(1, 2), tuple(found.choice(names) for _ in range(found.randint(3, 7))))


def needs_of(case: Drawn, name: str) -> tuple[int, int]:
    return PROFILES[name] if case.divided else (1, int(name))


def node_of(world: Controlled, team: str) -> dict[str, str]:
    return {name: pod["spec"].get("nodeName", "") for name, pod in world.pods(team).items()}


def check_agreement(world: Controlled, seed: int) -> None:
    """Every pod that is released is bound, and what waits fits on no node: the plan agrees with kube-scheduler."""
    case, group = drawn(seed), f"drawn{seed}"
    nodes = [f"{group}-{number}" for number in range(case.nodes)]
    for name in nodes:
        add_node(world, name, *(divided_gpu() if case.divided else ([], [shared_gpu(0)])))
    team, _ = team_of(world, guaranteed=100)
    for name in set(case.pods):
        create_template(world, team, f"t{name}", profile(name) if case.divided else memory(f"{name}Gi", cores="1"))
    for number, name in enumerate(case.pods):
        pod_on(world, team, f"p{number}", group, f"t{name}")
    capacity = (SLICES if case.divided else 100, GIBIBYTES)

    def left() -> dict[str, tuple[int, int]]:
        here = node_of(world, team)
        found = {}
        for node in nodes:
            taken = [needs_of(case, case.pods[int(pod[1:])]) for pod, on in here.items() if on == node]
            found[node] = (capacity[0] - sum(one[0] for one in taken), capacity[1] - sum(one[1] for one in taken))
        return found

    def settled() -> bool:
        waiting, here, free = world.waiting(team), node_of(world, team), left()
        unbound = [pod for pod, on in here.items() if not on and pod not in waiting]
        needs = [needs_of(case, case.pods[int(pod[1:])]) for pod in waiting]
        fits = [one for one in needs for node in nodes if one[0] <= free[node][0] and one[1] <= free[node][1]]
        if unbound and not case.divided:
            # kube-scheduler counts what a claim consumes twice while it stores the allocation (GatherAllocatedState).
            # It tries a pod that did not fit then again after five minutes, or when a label of a node changes.
            for node in nodes:
                label = {"metadata": {"labels": {"seen": str(time.monotonic_ns())}}}
                world.cluster.api.patch(f"/api/v1/nodes/{node}", label)
        return len(here) == len(case.pods) and not unbound and not fits

    world.wait(settled, lambda: f"{case}\n{node_of(world, team)}\n{world.waiting(team)}\n{events(world, team)}")
    assert all(min(one) >= 0 for one in left().values())
    bound = [case.pods[int(pod[1:])] for pod, on in node_of(world, team).items() if on]
    counts(world, team, sum(needs_of(case, name)[1] for name in bound) / GIBIBYTES)
    world.remove(team)
    remove_nodes(world, *nodes)


@pytest.mark.parametrize("seed", range(2))
def test_the_plan_of_parts_agrees_with_kube_scheduler(world: Controlled, seed: int) -> None:
    check_agreement(world, seed)


@pytest.mark.slow
@soaked
def test_the_plan_of_many_parts_agrees_with_kube_scheduler(world: Controlled) -> None:
    for seed in range(2, 60):
        check_agreement(world, seed)


def test_devices_that_several_nodes_reach_are_refused_by_name(world: Controlled) -> None:
    device = {"name": "far", "attributes": attributes("fabric")}
    (spec,) = slices_of("fabric", "", [], [device])
    world.cluster.api.create(f"{API}/resourceslices", {"metadata": {"name": "fabric"}, "spec": spec})
    team, path = team_of(world, guaranteed=4)
    create_template(world, team, "far", request(FABRIC))
    world.cluster.api.create(path, claiming("a", template="far"))
    why = "several nodes can reach the devices of DeviceClass fabric"
    world.wait(lambda: why in events(world, team), lambda: events(world, team))
    assert world.waiting(team) == {"a"}
    world.cluster.api.delete(f"{API}/resourceslices/fabric")
    world.remove(team)


def test_an_elastic_job_takes_whole_gpus_of_a_divided_driver_only(world: Controlled) -> None:
    add_node(world, "whole-0", *divided_gpu())
    team, _ = team_of(world, guaranteed=2)
    create_template(world, team, "part", profile("3g"))
    create_template(world, team, "all", profile("7g"))
    refused = world.job(team, "refused", worker_template("part"), gpus=1)
    why = "each worker would claim 0.5 GPUs, a part of one"
    world.until(refused, lambda job: why in job.get("status", {}).get("message", ""))
    job = world.job(team, "train", worker_template("all"), gpus=1)
    world.until_phase(job, "Running")
    counts(world, team, 1)
    world.kill()
    world.start()
    world.cluster.api.patch(job, {"metadata": {"labels": {"seen": "again"}}})
    counts(world, team, 1)
    assert world.cluster.api.get(job)["status"]["phase"] == "Running"
    world.remove(team)
    remove_nodes(world, "whole-0")


def test_parts_that_are_requested_without_a_claim_are_refused_by_name(world: Controlled) -> None:
    """Kubernetes lets containers request a class's devices as a resource; no node has parts of GPUs as one."""
    add_node(world, "named-0", *divided_gpu())
    team, path = team_of(world, guaranteed=1)
    limits = {"limits": {f"{CLASS_PREFIX}{MIG}": "1"}}
    containers = [{"name": "main", "image": "none", "resources": limits}]
    noted = {labels.GPU_WEIGHTS: f"{CLASS_PREFIX}{MIG}=1"}
    gates = [{"name": labels.QUOTA_GATE}]
    spec = {"containers": containers, "schedulingGates": gates}
    world.cluster.api.create(path, {"metadata": {"name": "a", "annotations": noted}, "spec": spec})
    why = f"is not known before it starts; claim one of DeviceClass {MIG} by a ResourceClaimTemplate instead"
    world.wait(lambda: why in events(world, team), lambda: events(world, team))
    job = world.job(team, "train", {"spec": {"containers": containers}}, gpus=1)
    world.until(job, lambda one: why in one.get("status", {}).get("message", ""))
    world.kill()
    world.start()
    create_template(world, team, "part", profile("3g"))
    world.until_bound(pod_on(world, team, "b", "named", "part"))
    assert world.waiting(team) == {"a"}
    world.remove(team)
    remove_nodes(world, "named-0")


def test_the_policy_names_what_parts_count_by(world: Controlled) -> None:
    rows = [{"name": f"{CLASS_PREFIX}{MIG}", "countsAs": 1, "countsBy": "slices"}]
    body = {"apiVersion": labels.API_VERSION, "kind": "QuotaPolicy", "metadata": {"name": "default"}}
    with pytest.raises(ApiError, match="has countsAs and countsBy; leave out one of the two"):
        world.cluster.api.apply(f"{QUOTA_POLICIES}/default", {**body, "spec": {"gpuResources": rows}})


# Without an API server


def parts_of(*bodies: dict[str, Any]) -> PublishedParts:
    found = PublishedParts()
    specs = [msgspec.convert(one, ResourceSliceSpec) for one in bodies]
    found.put_pool((DRIVER, bodies[0]["pool"]["name"]), specs)
    return found


CONDITIONS = Selected(DRIVER, ((DRIVER, "kind", "mig"),))


def demanded(*conditions: tuple[str, str], **more: Any) -> Demand:
    return Demand(MIG, 1, Selected("", tuple((DRIVER, name, value) for name, value in conditions)), **more)


@pytest.mark.parametrize(
    ("demand", "counts_by", "gpus"),
    [
        (demanded(("profile", "3g")), "memory", 0.5),
        (demanded(("profile", "3g")), "slices", 3 / 7),
        (demanded(("profile", "3g")), "absent", 0.5),
        (demanded(), "memory", 1),
        (demanded(("profile", "none")), "memory", 1),
        (demanded(device=(DRIVER, "n", "gpu0-1g-0")), "memory", 0.125),
        (demanded(("profile", "2g"), device=(DRIVER, "n", "unpublished")), "memory", 0.25),
    ],
    ids=["memory", "named", "else-memory", "largest", "no-such-device", "allocated", "unpublished"],
)
def test_a_request_counts_as_the_largest_part_that_it_may_get(demand: Demand, counts_by: str, gpus: float) -> None:
    counters, devices = partitions(0)
    found = parts_of(*slices_of("n", "n", [counters], devices)).part_of(demand, CONDITIONS, counts_by)
    assert dict(found or ())[f"{GPU_PART_PREFIX}{DRIVER}"] == int(gpus * WHOLE_GPU)


@pytest.mark.parametrize(
    "selector",
    [
        "!(true && {} && true)",
        "[true && {} && true, true][1]",
        "'a && {} && b' != ''",
        '"\\" && {} && " != ""',
        'r"\\" != "" && {} && "x" != ""',
        '"""" && {} && """ != ""',
        "true // && {} &&\n",
    ],
)
def test_a_tenants_selector_makes_a_device_no_smaller_by_what_is_no_condition_of_it(selector: str) -> None:
    """Kube-scheduler gives such a request any device, so it counts as a GPU; `{}` is a condition for a small one."""
    condition = f"device.attributes['{DRIVER}'].profile == '1g'"
    for expression, selected in ((selector.format(condition), ()), (condition, ((DRIVER, "profile", "1g"),))):
        exactly = {"deviceClassName": MIG, "count": 1, "selectors": [{"cel": {"expression": expression}}]}
        spec = {"devices": {"requests": [{"name": "r", "exactly": exactly}]}}
        (demand,) = claimed_devices(msgspec.convert(spec, ResourceClaimSpec)).demands
        assert demand.selected.attributes == selected


def test_nothing_is_counted_as_less_than_a_thousandth() -> None:
    """A hostile tenant: a driver without a policy allows requests for one byte, of a text of any length."""
    parts = parts_of(*slices_of("n", "n", [], [shared_gpu(0)]))
    for amount, least in (
        ("1", 1000),
        ("-5Gi", 1000),
        ("x" * 300, 1000),
        ("9" * 5000, 1000),
        ("1E", WHOLE_GPU),
    ):
        demand = Demand(SHARED, 1, capacity=(("memory", amount), ("cores", "1")))
        found = dict(parts.part_of(demand, Selected(DRIVER), "memory") or ())
        assert found[f"{GPU_PART_PREFIX}{DRIVER}"] >= least, amount


def objects(node: str, *, allocated: str) -> list[tuple[str, dict[str, Any]]]:
    """A running pod with a claim of a partition, its class, and the slices of its node."""
    counters, devices = partitions(0)
    found = [
        (SLICES_PATH, {"metadata": {"name": f"s{number}", "uid": f"s{number}"}, "spec": spec})
        for number, spec in enumerate(slices_of(node, node, [counters], devices))
    ]
    selectors = [{"cel": {"expression": SELECTORS[MIG]}}]
    found.append((CLASSES, {"metadata": {"name": MIG, "uid": MIG}, "spec": {"selectors": selectors}}))
    meta = {"name": "c", "namespace": "a", "uid": "c"}
    claim: dict[str, Any] = {"metadata": meta, "spec": {"devices": {"requests": [profile("3g")]}}}
    if allocated:
        result = {"request": "r", "driver": DRIVER, "pool": node, "device": allocated}
        claim["status"] = {"allocation": {"devices": {"results": [result]}}}
    return [*found, (CLAIMS, claim), (PODS, admitted("x", "c", 1))]


Seen = tuple[str, dict[str, Any]]


def held_after(order: list[Seen], deleted: list[Seen], *then: Seen) -> float:
    """Return the GPUs of team a for a controller that saw these objects in this order, these deleted, and others."""

    async def scenario() -> float:
        async with detached() as test:
            rows = [{"name": f"{CLASS_PREFIX}{MIG}"}]
            test.see(POLICIES, {"metadata": {"name": "default", "uid": "policy"}, "spec": {"gpuResources": rows}})
            test.node()
            test.team("a")
            for path, body in order:
                test.see(path, body)
            await test.start()
            for path, body in deleted:
                test.see(path, body, event="DELETED")
            for path, body in then:
                test.see(path, body)
            return test.controller.snapshot.held("a").gpus

    return asyncio.run(scenario())


def test_a_class_that_selects_other_partitions_counts_as_these() -> None:
    seen = objects("node", allocated="")
    seen[3][1]["spec"]["devices"]["requests"] = [request(MIG)]
    narrower = f"{SELECTORS[MIG]} && device.attributes['{DRIVER}'].profile == '2g'"
    changed = {"metadata": {"name": MIG, "uid": MIG}, "spec": {"selectors": [{"cel": {"expression": narrower}}]}}
    assert held_after(seen, []) == 1
    assert held_after(seen, [], (CLASSES, changed)) == 0.25


@pytest.mark.parametrize("allocated", ["", "gpu0-3g-0"], ids=["requested", "allocated"])
def test_a_restarted_controller_counts_parts_alike_in_every_order(allocated: str) -> None:
    seen = objects("node", allocated=allocated)
    for seed in range(8):
        order = list(seen)
        random.Random(seed).shuffle(order)
        assert held_after(order, []) == 0.5


def test_a_running_pod_keeps_its_part_while_its_driver_publishes_nothing() -> None:
    """A driver is upgraded: its slices are deleted for a while. A restarted controller counts a whole GPU."""
    seen = objects("node", allocated="gpu0-3g-0")
    assert held_after(seen, seen[:2]) == 0.5
    assert held_after(seen[2:], []) == 1


def test_what_a_tenant_may_write_costs_no_time_of_the_plan() -> None:
    """A selector of 10 KiB with hundreds of conditions, of a driver with thousands of devices."""
    parts = PublishedParts()
    for node in range(50):
        counters, devices = partitions(0)
        specs = [
            msgspec.convert(one, ResourceSliceSpec) for one in slices_of(f"n{node}", f"n{node}", [counters], devices)
        ]
        parts.put_pool((DRIVER, f"n{node}"), specs)
    conditions = " && ".join(f"device.attributes['{DRIVER}'].profile == '{n}'" for n in range(150))
    spec = {"devices": {"requests": [request(MIG, selectors=[{"cel": {"expression": conditions}}])]}}
    (demand,) = claimed_devices(msgspec.convert(spec, ResourceClaimSpec)).demands
    assert len(demand.selected.attributes) == 150
    began = time.process_time()
    for _ in range(100):
        parts.part_of(demand, CONDITIONS, "memory")
    assert time.process_time() - began < 1
