"""Pods that others make, through the real API server, kube-scheduler and controller; nodes are KWOK's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kfp_gpuquota.cluster.kubernetes.convert import requests as writes
from kfp_gpuquota.cluster.kubernetes.convert.pods import pod_view
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.core_types import Pod
from tests.kubernetes.controlled import Controlled, holds, is_leaving, pod_body
from tests.kubernetes.installation import QUOTAS
from tools.devcluster.api import JSON_PATCH, ApiError


def test_an_admission_does_not_touch_another_pod_of_the_same_name(controlled: Controlled) -> None:
    team = controlled.team(guaranteed=1)
    path = controlled.pod(team, "again")
    view = pod_view(msgspec.convert(controlled.cluster.api.get(path), Pod))
    controlled.cluster.api.delete(path, 0)
    controlled.wait(lambda: not controlled.pods(team))
    controlled.pod(team, "again")
    admission = writes.admission(view, "fake-0", (0,), "its turn")
    with pytest.raises(ApiError, match="422"):
        controlled.cluster.api.patch(path, admission.body, JSON_PATCH)
    assert controlled.waiting(team) == {"again"}


def test_a_pod_waits_at_its_gate_until_its_turn_and_then_runs_where_it_was_sent(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    path = controlled.pod(team, "first", gpus=2)
    controlled.start()
    pod = controlled.until_bound(path)
    assert pod["metadata"]["annotations"][labels.DEVICES] == "0,1"
    second = controlled.pod(team, "second")
    controlled.pod(team, "third", gpus=1)
    assert controlled.cluster.api.get(second)["spec"]["schedulingGates"]
    controlled.cluster.api.delete(path)
    controlled.wait(lambda: controlled.bound(team) == {"second", "third"})


def test_a_team_takes_back_what_it_lent_and_no_more_than_its_guarantee(controlled: Controlled) -> None:
    controlled.add_nodes(2, gpus=4)
    lender, borrower = controlled.team("lender", guaranteed=3), controlled.team("borrower", guaranteed=5)
    controlled.start()
    for i in range(8):
        controlled.pod(borrower, f"b{i}")
    controlled.wait(lambda: len(controlled.bound(borrower)) == 8)
    for i in range(5):
        controlled.pod(lender, f"a{i}")
    controlled.wait(lambda: len(controlled.bound(lender)) == 3, lambda: controlled.log()[-3000:])
    controlled.wait(lambda: len(controlled.pods(borrower)) == 5)
    assert len(controlled.waiting(lender)) == 2


def test_a_limit_holds_although_gpus_are_idle(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=8)
    team, other = controlled.team(guaranteed=1, limit=3), controlled.team(guaranteed=1)
    controlled.start()
    for i in range(6):
        controlled.pod(team, f"p{i}")
    controlled.until_bound(controlled.pod(other, "proof"))
    controlled.wait(lambda: len(controlled.bound(team)) == 3)
    assert len(controlled.waiting(team)) == 3


def test_the_pods_of_a_group_start_together_or_not_at_all(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=4)
    team = controlled.team(guaranteed=4)
    blocker = controlled.pod(team, "blocker", gpus=1)
    controlled.start()
    controlled.until_bound(blocker)
    group: dict[str, Any] = {"labels_": {labels.POD_GROUP: "gang"}, "annotations": {labels.POD_GROUP_SIZE: "4"}}
    for i in range(4):
        controlled.pod(team, f"g{i}", **group)
    controlled.until_bound(controlled.pod(team, "small"))  # it was planned with the gang waiting beside it
    assert controlled.waiting(team) == {"g0", "g1", "g2", "g3"}
    for name in ("blocker", "small"):
        controlled.cluster.api.delete(f"/api/v1/namespaces/{team}/pods/{name}")
    controlled.wait(lambda: controlled.bound(team) == {"g0", "g1", "g2", "g3"})


def test_a_group_is_not_started_before_all_of_it_is_there(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=4)
    team = controlled.team(guaranteed=4)
    controlled.start()
    group: dict[str, Any] = {"labels_": {labels.POD_GROUP: "gang"}, "annotations": {labels.POD_GROUP_SIZE: "3"}}
    for i in range(2):
        controlled.pod(team, f"g{i}", **group)
    controlled.until_bound(controlled.pod(team, "proof"))
    assert controlled.waiting(team) == {"g0", "g1"}
    controlled.pod(team, "g2", **group)
    controlled.wait(lambda: len(controlled.bound(team)) == 4)


def test_a_session_within_quota_is_never_taken_and_none_starts_beyond_it(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=4)
    team, other = controlled.team(guaranteed=2), controlled.team(guaranteed=2)
    controlled.start()
    notebook: dict[str, Any] = {"labels_": {labels.NOTEBOOK: "nb"}}
    for i in range(3):
        controlled.pod(team, f"nb{i}", **notebook)
    controlled.wait(lambda: len(controlled.bound(team)) == 2)
    for i in range(4):
        controlled.pod(other, f"t{i}")
    controlled.wait(lambda: len(controlled.bound(other)) == 2)
    assert len(controlled.bound(team)) == 2
    assert len(controlled.waiting(team)) == 1


def test_what_pods_outside_the_quota_hold_is_not_given_to_anybody(controlled: Controlled) -> None:
    (node,) = controlled.add_nodes(1, gpus=4)
    team = controlled.team(guaranteed=4)
    elsewhere = controlled.cluster.make_namespace("elsewhere-a")
    foreign = controlled.pod(elsewhere, "foreign", gpus=3, gated=False, nodeName=node)
    controlled.start()
    controlled.pod(team, "large", gpus=2)
    controlled.until_bound(controlled.pod(team, "small"))
    assert controlled.waiting(team) == {"large"}
    controlled.cluster.api.delete(foreign)
    controlled.wait(lambda: controlled.bound(team) == {"large", "small"})


def test_nothing_is_sent_to_a_cordoned_node(controlled: Controlled) -> None:
    first, second = controlled.add_nodes(2, gpus=2)
    controlled.cluster.api.patch(f"/api/v1/nodes/{first}", {"spec": {"unschedulable": True}})
    team = controlled.team(guaranteed=4)
    controlled.start()
    for i in range(3):
        controlled.pod(team, f"p{i}")
    controlled.wait(lambda: len(controlled.bound(team)) == 2)
    assert {controlled.pods(team)[p]["spec"]["nodeName"] for p in controlled.bound(team)} == {second}
    controlled.cluster.api.patch(f"/api/v1/nodes/{first}", {"spec": {"unschedulable": None}})
    controlled.wait(lambda: len(controlled.bound(team)) == 3)


def test_a_pod_that_is_stuck_ending_keeps_its_gpus_taken(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    controlled.start()
    path = controlled.pod(team, "stuck")
    controlled.cluster.api.patch(path, {"metadata": {"finalizers": ["example.com/stuck"]}})
    controlled.until_bound(path)
    controlled.cluster.api.delete(path)
    controlled.until(path, is_leaving)
    second = controlled.pod(team, "second")
    other = controlled.team(guaranteed=0)
    controlled.pod(other, "third")
    quota = controlled.until(f"{QUOTAS}/{other}", lambda q: q.get("status", {}).get("waiting") == 1)
    assert quota["status"]["gpus"] == 0
    assert not holds(controlled.cluster.api.get(second))
    controlled.cluster.api.patch(path, {"metadata": {"finalizers": None}})
    controlled.until_bound(second)


def test_the_places_a_pod_asks_for_itself_stay_and_ours_is_added_to_each(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start()
    terms = [
        {"matchExpressions": [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]},
        {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["nowhere"]}]},
    ]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    plain = controlled.until_bound(controlled.pod(team, "terms", affinity={"nodeAffinity": required}))
    written = plain["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    ours = {"key": "metadata.name", "operator": "In", "values": [plain["spec"]["nodeName"]]}
    assert [ours in term["matchFields"] for term in written["nodeSelectorTerms"]] == [True, True]
    assert written["nodeSelectorTerms"][0]["matchExpressions"] == terms[0]["matchExpressions"]
    apart: dict[str, Any] = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    controlled.until_bound(controlled.pod(team, "apart", affinity=apart))


def test_a_restarted_controller_knows_from_the_api_alone_who_holds_what(controlled: Controlled) -> None:
    controlled.add_nodes(2, gpus=4)
    team, other = controlled.team(guaranteed=4, limit=4), controlled.team(guaranteed=4)
    controlled.start()
    for i in range(5):
        controlled.pod(team, f"p{i}")
    controlled.wait(lambda: len(controlled.bound(team)) == 4)
    controlled.kill()
    for i in range(5):
        controlled.pod(other, f"o{i}")
    controlled.start()
    controlled.wait(lambda: len(controlled.bound(other)) == 4, lambda: controlled.log()[-3000:])
    assert len(controlled.bound(team)) == 4
    assert len(controlled.waiting(other)) == 1


def test_another_leader_keeps_what_was_promised_until_it_is_carried_out(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    lender, borrower = controlled.team(guaranteed=2), controlled.team(guaranteed=0)
    controlled.start()
    kept = controlled.pod(borrower, "kept", labels_={"app": "kept"})
    asked = controlled.pod(borrower, "asked")
    for path in (kept, asked):
        controlled.until_bound(path)
    controlled.until(kept, lambda p: p["status"].get("phase") == "Running")
    controlled.cluster.api.patch(asked, {"metadata": {"finalizers": ["example.com/keeps"]}})
    budget = _budget_for_kept(controlled, borrower)
    owner = controlled.pod(lender, "owner", gpus=2)
    quota = controlled.until(f"{QUOTAS}/{lender}", lambda one: one.get("status", {}).get("promises"))
    (promise,) = quota["status"]["promises"]
    assert promise["job"] == controlled.cluster.api.get(owner)["metadata"]["uid"]
    assert [sorted(one["devices"]) for one in promise["placements"]] == [[0, 1]]
    assert len(promise["victims"]) == 2
    controlled.until(asked, is_leaving)
    controlled.wait(lambda: "EvictionBlocked" in controlled.log())
    controlled.kill()  # one of them was not asked to leave
    controlled.start()
    controlled.pod(lender, "later")
    assert controlled.cluster.api.get(f"{QUOTAS}/{lender}")["status"]["promises"] == [promise]
    controlled.cluster.api.patch(asked, {"metadata": {"finalizers": []}})
    controlled.cluster.api.delete(budget)
    controlled.until_bound(owner)
    controlled.until(f"{QUOTAS}/{lender}", lambda one: not one["status"].get("promises"))
    assert controlled.waiting(lender) == {"later"}


def test_a_disruption_budget_delays_a_reclaim_and_no_longer_than_it_forbids(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    borrower, lender = controlled.team(guaranteed=0), controlled.team(guaranteed=1)
    controlled.start()
    path = controlled.pod(borrower, "kept", labels_={"app": "kept"})
    controlled.until(path, lambda p: p["status"].get("phase") == "Running")
    budget = _budget_for_kept(controlled, borrower)
    mine = controlled.pod(lender, "mine")
    controlled.wait(lambda: "EvictionBlocked" in controlled.log())
    assert holds(controlled.cluster.api.get(path))
    controlled.cluster.api.delete(budget)
    controlled.until_bound(mine)


def _budget_for_kept(controlled: Controlled, namespace: str) -> str:
    """Create a budget that forbids to evict the running pod with the label `app: kept`; return its path."""
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    selector = {"matchLabels": {"app": "kept"}}
    budget = {"metadata": {"name": "kept"}, "spec": {"minAvailable": 1, "selector": selector}}
    controlled.cluster.api.create(budgets, budget)
    controlled.until(f"{budgets}/kept", lambda b: b.get("status", {}).get("currentHealthy") == 1)
    return f"{budgets}/kept"


def test_a_malformed_quota_says_so_and_leaves_the_last_good_one_in_force(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=1, limit=1)
    parent = controlled.team(guaranteed=1, parent=team)
    controlled.start()
    path = f"{QUOTAS}/{team}"
    controlled.until(path, lambda q: _accepted(q) == "True")
    controlled.cluster.api.patch(path, {"spec": {"parent": parent}})  # each other's parent: no schema can detect this
    reported = controlled.until(path, lambda q: _accepted(q) == "False")
    assert "itself below" in reported["status"]["conditions"][0]["message"]
    for i in range(2):
        controlled.pod(team, f"p{i}")
    controlled.wait(lambda: len(controlled.bound(team)) == 1)
    controlled.cluster.api.patch(path, {"spec": {"parent": None, "limit": 2}})
    controlled.wait(lambda: len(controlled.bound(team)) == 2)
    controlled.until(path, lambda q: _accepted(q) == "True")


def _accepted(quota: dict[str, Any]) -> str:
    conditions = quota.get("status", {}).get("conditions", [])
    return next((str(c["status"]) for c in conditions if c["type"] == "Accepted"), "")


def test_a_pod_is_sent_only_where_its_selector_and_the_nodes_taints_let_it_run(controlled: Controlled) -> None:
    plain, tainted, labelled = controlled.add_nodes(3, gpus=1)
    taint = {"key": "reserved", "value": "yes", "effect": "NoSchedule"}
    controlled.cluster.api.patch(f"/api/v1/nodes/{tainted}", {"spec": {"taints": [taint]}})
    controlled.cluster.api.patch(f"/api/v1/nodes/{labelled}", {"metadata": {"labels": {"disk": "fast"}}})
    team = controlled.team(guaranteed=3)
    controlled.start()
    tolerates = [{"key": "reserved", "operator": "Exists"}]
    selected = controlled.pod(team, "selected", nodeSelector={"disk": "fast"})
    assert controlled.until_bound(selected)["spec"]["nodeName"] == labelled
    assert controlled.until_bound(controlled.pod(team, "plain"))["spec"]["nodeName"] == plain
    controlled.pod(team, "barred")
    tolerant = controlled.until_bound(controlled.pod(team, "tolerant", tolerations=tolerates))
    assert tolerant["spec"]["nodeName"] == tainted
    assert controlled.waiting(team) == {"barred"}


def asking(cpu: str = "0", memory: str = "0") -> dict[str, Any]:
    """Containers of a pod that asks for more than a GPU."""
    resources = {"limits": {labels.GPU_RESOURCE: "1"}, "requests": {"cpu": cpu, "memory": memory}}
    return {"containers": [{"name": "main", "image": "none", "resources": resources}]}


def bystander(controlled: Controlled, node: str, cpu: str = "0", memory: str = "0") -> str:
    """A pod that takes no GPU of a node; its path."""
    requests = {"requests": {"cpu": cpu, "memory": memory}}
    spec = {"containers": [{"name": "main", "image": "none", "resources": requests}], "nodeName": node}
    pods = f"/api/v1/namespaces/{controlled.team('others')}/pods"
    controlled.cluster.api.create(pods, {"metadata": {"name": "by"}, "spec": spec})
    return f"{pods}/by"


@pytest.mark.parametrize("asked", [{"cpu": "40"}, {"memory": "300Gi"}], ids=["cpu", "memory"])
def test_a_pod_is_sent_where_its_cpu_and_memory_are_left_and_waits_until_there_is_some(
    controlled: Controlled, asked: dict[str, str]
) -> None:
    crowded, roomy = controlled.add_nodes(2, gpus=4)  # of 64 cores and 512 GiB
    team = controlled.team(guaranteed=8)
    crowd = bystander(controlled, crowded, **asked)
    controlled.start()
    sent = controlled.until_bound(controlled.pod(team, "first", **asking(**asked)))
    assert sent["spec"]["nodeName"] == roomy
    second = controlled.pod(team, "second", **asking(**asked))
    controlled.until_bound(controlled.pod(team, "proof"))
    assert controlled.waiting(team) == {"second"}
    controlled.cluster.api.delete(crowd, 0)
    assert controlled.until_bound(second)["spec"]["nodeName"] == crowded
    assert "PlaceTaken" not in controlled.log()


def test_a_bystander_that_comes_later_is_planned_around(controlled: Controlled) -> None:
    first, second = controlled.add_nodes(2, gpus=1)
    team = controlled.team(guaranteed=2)
    controlled.start()
    controlled.until_bound(controlled.pod(team, "warm", **asking(cpu="1")))
    (taken,) = {pod["spec"]["nodeName"] for pod in controlled.pods(team).values()}
    (left,) = {first, second} - {taken}
    crowd = bystander(controlled, left, cpu="63500m")
    waits = controlled.pod(team, "waits", **asking(cpu="1"))
    controlled.until(f"{QUOTAS}/{team}", lambda q: q.get("status", {}).get("waiting") == 1)
    assert not holds(controlled.cluster.api.get(waits))
    controlled.cluster.api.delete(crowd, 0)
    assert controlled.until_bound(waits)["spec"]["nodeName"] == left


def test_a_team_holds_no_more_cpu_than_its_limit(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=4)
    team = controlled.team(guaranteed=4, guaranteedCpu="8", limitCpu=8, limitMemory="1Ti")
    controlled.start()
    for i in range(3):
        controlled.pod(team, f"p{i}", **asking(cpu="4"))
    controlled.wait(lambda: len(controlled.bound(team)) == 2, lambda: controlled.log()[-3000:])
    controlled.until_bound(controlled.pod(team, "none", **asking()))
    assert len(controlled.waiting(team)) == 1


def test_a_node_pool_is_for_those_who_ask_for_it_within_their_quota_there(controlled: Controlled) -> None:
    plain, pooled = controlled.add_nodes(2, gpus=2)
    controlled.cluster.api.patch(f"/api/v1/nodes/{pooled}", {"metadata": {"labels": {labels.POOL: "a100"}}})
    team = controlled.team(guaranteed=2, pools={"a100": {"guaranteed": 1, "limit": 1}})
    controlled.start()
    for i in range(2):
        controlled.pod(team, f"a100-{i}", labels_={labels.POOL: "a100"})
        controlled.pod(team, f"any-{i}")
    controlled.pod(team, "any-2")
    controlled.wait(lambda: len(controlled.bound(team)) == 3, lambda: controlled.log()[-3000:])
    nodes = {name: pod["spec"].get("nodeName") for name, pod in controlled.pods(team).items()}
    assert sorted(filter(None, nodes.values())) == sorted([plain, plain, pooled])
    assert {nodes["a100-0"], nodes["a100-1"]} == {pooled, None}
    wanted = {"gpus": 3, "requested": 5, "borrowed": 0}
    controlled.until(f"{QUOTAS}/{team}", lambda q: wanted.items() <= q.get("status", {}).items())
    job = controlled.job(team, "pooled", gpus=1, nodePool="a100")
    controlled.until(job, lambda j: "limit of 1" in j.get("status", {}).get("message", ""))


def test_a_pod_that_nobody_would_make_anew_is_not_moved_to_make_room(controlled: Controlled) -> None:
    nodes = controlled.add_nodes(2, gpus=2)
    team = controlled.team(guaranteed=4)
    controlled.start()
    for node in nodes:
        controlled.until_bound(controlled.pod(team, f"on-{node}", nodeSelector={"kubernetes.io/hostname": node}))
    controlled.pod(team, "large", gpus=2)
    controlled.until_bound(controlled.pod(team, "small"))  # it was planned with the large one waiting beside it
    assert controlled.waiting(team) == {"large"}
    assert controlled.bound(team) == {"small", *(f"on-{node}" for node in nodes)}


def test_a_pod_whose_place_was_taken_is_made_anew_by_its_owner_and_sent_elsewhere(controlled: Controlled) -> None:
    """Start where an earlier controller has pinned a pod to a node that kube-scheduler refuses."""
    nodes = sorted(controlled.add_nodes(2, gpus=1))
    team = controlled.team(guaranteed=2)
    port = {"ports": [{"containerPort": 80, "hostPort": 8080}]}
    asks = {"limits": {labels.GPU_RESOURCE: "1"}}
    body = pod_body("x", containers=[{"name": "main", "image": "none", "resources": asks, **port}])
    template = {"metadata": {"labels": {"app": "x"}}, "spec": body["spec"]}
    sets = f"/apis/apps/v1/namespaces/{team}/replicasets"
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": "x"}}, "template": template}
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [nodes[0]]}]}
    pin = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    pinned = {**body["spec"], "schedulingGates": [], "affinity": pin}
    elsewhere = f"/api/v1/namespaces/{controlled.team('others')}/pods"
    hog = {"containers": [{"name": "main", "image": "none", **port}], "nodeName": nodes[0]}
    controlled.cluster.api.create(elsewhere, {"metadata": {"name": "hog"}, "spec": hog})
    meta = {"name": "first", "labels": {"app": "x"}, "annotations": {labels.DEVICES: "0"}}
    first = f"/api/v1/namespaces/{team}/pods"
    controlled.cluster.api.create(first, {"metadata": meta, "spec": pinned})
    controlled.cluster.api.create(sets, {"metadata": {"name": "set"}, "spec": spec})
    controlled.until(f"{first}/first", lambda pod: pod["metadata"].get("ownerReferences"))  # the set has adopted it
    controlled.start()
    controlled.wait(lambda: controlled.bound(team), lambda: controlled.log()[-3000:])
    controlled.wait(lambda: "first" not in controlled.pods(team))
    assert "PlaceTaken" in controlled.log()
    assert {pod["spec"].get("nodeName") for pod in controlled.pods(team).values()} == {nodes[1]}
    controlled.cluster.api.delete(f"{sets}/set")


def test_pods_that_ask_for_parts_of_a_gpu_share_one_as_far_as_it_goes(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start()
    none: dict[str, Any] = {"containers": [{"name": "main", "image": "none"}]}
    controlled.until_bound(controlled.pod(team, "whole"))
    for i in range(3):
        controlled.pod(team, f"part{i}", annotations={"gpu-fraction": "0.4"}, **none)
    controlled.wait(lambda: len(controlled.bound(team)) == 3, lambda: controlled.log()[-3000:])
    (waits,) = controlled.waiting(team)
    noted = {p["metadata"]["annotations"][labels.DEVICES] for n, p in controlled.pods(team).items() if n != waits}
    assert noted == {"0", "1"}
    controlled.kill()
    controlled.start()
    gone = next(n for n in controlled.bound(team) if n.startswith("part"))
    controlled.cluster.api.delete(f"/api/v1/namespaces/{team}/pods/{gone}")
    controlled.until_bound(f"/api/v1/namespaces/{team}/pods/{waits}")
