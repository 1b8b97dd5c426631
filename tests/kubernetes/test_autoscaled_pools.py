"""Pools that an autoscaler grows: pods within quota are opened without a node, and it sees them."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gpuquota.cluster.kubernetes.admission import pods, review_types
from kfp_gpuquota.cluster.kubernetes.convert import requests
from kfp_gpuquota.cluster.kubernetes.convert.autoscaled_pools import AutoscaledPool
from kfp_gpuquota.cluster.kubernetes.convert.pod_view import Stage
from kfp_gpuquota.cluster.kubernetes.convert.stand_in_names import pool_of, stand_in_name
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.paths import QUOTA_POLICIES
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import ClusterRules
from tests.kubernetes.autoscaler import AutoscalerDouble
from tests.kubernetes.controlled import Controlled, holds
from tests.kubernetes.installation import QUOTAS
from tests.kubernetes.test_admission import pod
from tests.kubernetes.test_translate import view_of

if TYPE_CHECKING:
    from collections.abc import Iterator

POOL = "burst"
MINE: dict[str, Any] = {"labels_": {labels.POOL: POOL}}


@pytest.fixture
def autoscaled(controlled: Controlled) -> Iterator[Controlled]:
    """The pool may have 8 GPUs, on nodes of 2; it has no node yet."""
    body = {"apiVersion": labels.API_VERSION, "kind": "QuotaPolicy", "metadata": {"name": "default"}}
    spec = {"pools": {POOL: {"autoscaled": {"maxGpus": 8, "gpusPerNode": 2}}}}
    controlled.cluster.api.apply(f"{QUOTA_POLICIES}/default", {**body, "spec": spec})
    yield controlled
    controlled.cluster.api.delete(f"{QUOTA_POLICIES}/default")


def growing(world: Controlled, most: int = 4) -> AutoscalerDouble:
    return AutoscalerDouble(world.cluster.api, f"burst-{uuid.uuid4().hex[:6]}", POOL, 2, most)


@pytest.mark.slow
def test_a_pool_grows_for_pods_within_quota_and_not_for_what_would_be_borrowed(autoscaled: Controlled) -> None:
    team = autoscaled.team(pools={POOL: {"guaranteed": 3}})
    autoscaled.start()
    with growing(autoscaled) as autoscaler:
        for i in range(6):
            autoscaled.pod(team, f"p{i}", **MINE)
        autoscaled.wait(lambda: len(autoscaled.bound(team)) == 4, lambda: autoscaled.log()[-3000:])
        assert len(autoscaler.nodes) == 2, "3 GPUs are guaranteed, on nodes of 2"
        assert len(autoscaled.waiting(team)) == 2
        autoscaled.until(f"{QUOTAS}/{team}", lambda q: q.get("status", {}).get("gpus") == 4)
        assert "PlaceTaken" not in autoscaled.log()


def test_quota_counts_before_there_is_a_node_and_after_a_restart(autoscaled: Controlled) -> None:
    team = autoscaled.team(pools={POOL: {"guaranteed": 2, "limit": 2}})
    autoscaled.start()
    for i in range(3):
        autoscaled.pod(team, f"p{i}", **MINE)
    autoscaled.wait(lambda: len(autoscaled.waiting(team)) == 1, lambda: autoscaled.log()[-3000:])
    stand_in = {n: p for n, p in autoscaled.pods(team).items() if not p["spec"].get("schedulingGates")}
    assert len(stand_in) == 2
    assert not any(holds(p) for p in stand_in.values())
    noted = {p["metadata"]["annotations"][labels.OPENED] for p in stand_in.values()}
    assert all(pool_of(node) == POOL for node in noted)
    autoscaled.kill()
    autoscaled.start()
    autoscaled.until(f"{QUOTAS}/{team}", lambda q: q.get("status", {}).get("gpus") == 2)
    assert len(autoscaled.waiting(team)) == 1
    with growing(autoscaled):
        autoscaled.wait(lambda: autoscaled.bound(team) == set(stand_in), lambda: autoscaled.log()[-3000:])
        autoscaled.cluster.api.delete(f"/api/v1/namespaces/{team}/pods/{min(stand_in)}")
        autoscaled.wait(lambda: len(autoscaled.bound(team)) == 2 and not autoscaled.waiting(team))


def test_the_maximum_holds_whatever_is_guaranteed(autoscaled: Controlled) -> None:
    team = autoscaled.team(pools={POOL: {"guaranteed": 20}})
    autoscaled.start()
    with growing(autoscaled, most=20) as autoscaler:
        for i in range(10):
            autoscaled.pod(team, f"p{i}", **MINE)
        autoscaled.wait(lambda: len(autoscaled.bound(team)) == 8, lambda: autoscaled.log()[-3000:])
        assert len(autoscaler.nodes) == 4
        assert len(autoscaled.waiting(team)) == 2


def test_idle_gpus_of_a_grown_pool_are_borrowed_and_given_back(autoscaled: Controlled) -> None:
    owner, borrower = autoscaled.team(pools={POOL: {"guaranteed": 2}}), autoscaled.team(pools={POOL: {"guaranteed": 0}})
    autoscaled.start()
    with growing(autoscaled) as autoscaler:
        first = autoscaled.pod(owner, "first", gpus=2, **MINE)
        autoscaled.until_bound(first)
        autoscaled.cluster.api.delete(first)
        for i in range(2):
            autoscaled.pod(borrower, f"b{i}", **MINE)
        autoscaled.wait(lambda: len(autoscaled.bound(borrower)) == 2, lambda: autoscaled.log()[-3000:])
        autoscaled.until_bound(autoscaled.pod(owner, "second", gpus=2, **MINE))
        assert len(autoscaler.nodes) <= 2


def test_an_elastic_jobs_workers_make_a_pool_grow_too(autoscaled: Controlled) -> None:
    team = autoscaled.team(pools={POOL: {"guaranteed": 2}})
    autoscaled.start()
    with growing(autoscaled):
        job = autoscaled.job(team, "train", gpus=2, minGpus=2, maxGpus=2, gpusPerWorker=1, nodePool=POOL)
        autoscaled.until_phase(job, "Running")
        autoscaled.wait(lambda: len(autoscaled.bound(team)) == 2, lambda: autoscaled.log()[-3000:])


def test_nodes_outside_the_pool_are_planned_as_ever(autoscaled: Controlled) -> None:
    (node,) = autoscaled.add_nodes(1, gpus=1)
    team = autoscaled.team(guaranteed=1, pools={POOL: {"guaranteed": 1}})
    autoscaled.start()
    assert autoscaled.until_bound(autoscaled.pod(team, "plain"))["spec"]["nodeName"] == node


# Pure parts


@given(real=st.integers(0, 100), demand=st.floats(0, 100), most=st.integers(1, 64), each=st.integers(1, 8))
def test_there_are_as_many_stand_ins_as_hold_what_is_there_and_what_is_guaranteed(
    real: int, demand: float, most: int, each: int
) -> None:
    count = AutoscaledPool(name="p", max_gpus=most, gpus_per_node=each).stand_ins(real, demand)
    assert count * each <= most
    assert count == most // each or count * each >= max(real, demand)


@pytest.mark.parametrize("node", ["autoscaled.p", "autoscaled.p.x", "real-0", "", f"autoscaled.p.{'9' * 5000}"])
def test_other_names_are_of_no_stand_in(node: str) -> None:
    assert pool_of(node) == ""


def test_a_pod_keeps_what_it_selects_and_is_found_on_its_stand_in_again() -> None:
    gated = view_of({"schedulingGates": [{"name": labels.QUOTA_GATE}], "nodeSelector": {"disk": "fast"}})
    node = stand_in_name("p", 3)
    operations = requests.admission(gated, node, (0, 1), "why").body
    assert {"op": "add", "path": "/spec/nodeSelector/gpuquota.dev~1pool", "value": "p"} in operations
    assert not any("affinity" in operation["path"] for operation in operations)
    notes = next(o["value"] for o in operations if o["path"] == "/metadata/annotations" and o["op"] == "add")
    stand_in = view_of({}, annotations=notes)
    assert (stand_in.stage, stand_in.node, stand_in.stand_in, stand_in.devices) == (Stage.ASSIGNED, node, node, (0, 1))
    bound = view_of({"nodeName": "real"}, annotations=notes)
    assert (bound.node, bound.stand_in, bound.bound) == ("real", node, True)


def test_a_share_of_a_gpu_is_refused_in_an_autoscaled_pool() -> None:
    rules = ClusterRules(pools=(AutoscaledPool(name="p", max_gpus=8),))
    body = pod(labels={labels.POOL: "p"}, annotations={"gpu-fraction": "0.5"})
    verdict = pods.review(msgspec.convert(body, review_types.Pod), rules=rules)
    assert "it is autoscaled, and gives whole GPUs only; ask for nvidia.com/gpu there" in verdict.message


def test_what_ran_there_before_the_pool_was_declared_counts_until_it_ends(autoscaled: Controlled) -> None:
    api, spec = autoscaled.cluster.api, autoscaled.cluster.api.get(f"{QUOTA_POLICIES}/default")["spec"]
    api.patch(f"{QUOTA_POLICIES}/default", {"spec": {"pools": None}})
    (node,) = autoscaled.add_nodes(1, gpus=2)
    api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": {labels.POOL: POOL}}})
    team = autoscaled.team(pools={POOL: {"guaranteed": 2, "limit": 2}})
    autoscaled.start()
    before = autoscaled.pod(team, "before", **MINE)
    assert autoscaled.until_bound(before)["spec"]["nodeName"] == node
    api.patch(f"{QUOTA_POLICIES}/default", {"spec": {"pools": spec["pools"]}})
    autoscaled.kill()
    autoscaled.start()
    for name in ("a", "b"):
        autoscaled.pod(team, name, **MINE)
    autoscaled.wait(lambda: len(autoscaled.bound(team)) == 2, lambda: autoscaled.log()[-3000:])
    autoscaled.until(f"{QUOTAS}/{team}", lambda q: q.get("status", {}).get("gpus") == 2)
    assert len(autoscaled.waiting(team)) == 1
    api.delete(before)
    autoscaled.wait(lambda: not autoscaled.waiting(team), lambda: autoscaled.log()[-3000:])
