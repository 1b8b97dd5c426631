"""A borrowed GPU is back within the bound that administrators set, whatever its borrower sets."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.paths import QUOTA_POLICIES
from tests.kubernetes.conftest import address_of
from tests.kubernetes.controlled import Controlled, holds, is_leaving
from tools.devcluster import ApiError, image

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.devcluster import DevCluster

BOUND_S = 16
DAY_S = 86_400
TIGHT = {"boundSeconds": BOUND_S, "maxGracePeriodSeconds": 1, "maxMinRunTimeSeconds": 0}


def set_reclaim(cluster: DevCluster, **reclaim: object) -> None:
    body = {"apiVersion": labels.API_VERSION, "kind": "QuotaPolicy", "metadata": {"name": "default"}}
    cluster.api.apply(f"{QUOTA_POLICIES}/default", {**body, "spec": {"reclaim": reclaim}})


@pytest.fixture
def tight(controlled: Controlled) -> Iterator[Controlled]:
    set_reclaim(controlled.cluster, **TIGHT)
    yield controlled
    controlled.cluster.api.delete(f"{QUOTA_POLICIES}/default")


def guard(controlled: Controlled, team: str, name: str, count: int = 1) -> None:
    """Disruption budgets that allow no eviction of the team's pods labelled app=NAME."""
    path = f"/apis/policy/v1/namespaces/{team}/poddisruptionbudgets"
    for number in range(count):
        spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": name}}}
        controlled.cluster.api.create(path, {"metadata": {"name": f"{name}-{number}"}, "spec": spec})


@pytest.mark.parametrize("budgets", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_disruption_budgets_do_not_keep_a_borrowed_gpu_beyond_the_bound(tight: Controlled, budgets: int) -> None:
    tight.add_nodes(1, gpus=1)
    borrower, lender = tight.team(guaranteed=0), tight.team(guaranteed=1)
    tight.start()
    path = tight.pod(borrower, "kept", labels_={"app": "kept"})
    tight.until(path, lambda p: p["status"].get("phase") == "Running")
    guard(tight, borrower, "kept", budgets)
    budget = f"/apis/policy/v1/namespaces/{borrower}/poddisruptionbudgets/kept-0"
    tight.until(budget, lambda b: b.get("status", {}).get("currentHealthy") == 1)
    mine = tight.pod(lender, "mine")
    tight.wait(lambda: "ReclaimForced" in tight.log())
    tight.until_bound(mine)
    if budgets == 1:
        assert "EvictionBlocked: its team's borrowed GPUs are reclaimed, but a disruption budget forbids" in tight.log()


@pytest.mark.slow
def test_a_controller_that_is_started_anew_goes_on_counting(tight: Controlled) -> None:
    tight.add_nodes(1, gpus=1)
    borrower, lender = tight.team(guaranteed=0), tight.team(guaranteed=1)
    tight.start()
    path = tight.pod(borrower, "kept", labels_={"app": "kept"})
    tight.until(path, lambda p: p["status"].get("phase") == "Running")
    guard(tight, borrower, "kept")
    budget = f"/apis/policy/v1/namespaces/{borrower}/poddisruptionbudgets/kept-0"
    tight.until(budget, lambda b: b.get("status", {}).get("currentHealthy") == 1)
    mine = tight.pod(lender, "mine")
    noted = tight.until(path, lambda p: labels.RECLAIMED_AT in p["metadata"].get("annotations", {}))
    since = int(noted["metadata"]["annotations"][labels.RECLAIMED_AT])
    assert abs(time.time() - since) < BOUND_S
    tight.kill()
    tight.start()
    tight.until_bound(mine)
    (counted,) = re.findall(r"the reclaim of its borrowed GPUs began (\d+) s ago", tight.log())
    assert int(counted) >= BOUND_S - 7, "from the first controller's decision on"


def test_a_gang_that_asks_for_a_day_of_minimum_run_time_and_of_grace_is_reclaimed(tight: Controlled) -> None:
    tight.add_nodes(1, gpus=2)
    borrower, lender = tight.team(guaranteed=0), tight.team(guaranteed=2)
    tight.start()
    patient: dict[str, Any] = {"minRunTimeSeconds": DAY_S, "gracePeriodSeconds": DAY_S}
    tight.until_phase(tight.job(borrower, "gang", gpus=2, minGpus=2, maxGpus=2, **patient), "Running")
    for pod in tight.pods(borrower).values():
        assert pod["spec"]["terminationGracePeriodSeconds"] == 1
    for name in ("a", "b"):
        tight.pod(lender, name)
    tight.wait(lambda: len(tight.bound(lender)) == 2, lambda: tight.log()[-3000:])


@pytest.mark.slow
def test_a_team_that_borrows_nothing_keeps_its_budgets(tight: Controlled) -> None:
    tight.add_nodes(1, gpus=1)
    team = tight.team(guaranteed=1)
    tight.start()
    path = tight.pod(team, "kept", labels_={"app": "kept", labels.PRIORITY: "10"})
    tight.until(path, lambda p: p["status"].get("phase") == "Running")
    guard(tight, team, "kept")
    budget = f"/apis/policy/v1/namespaces/{team}/poddisruptionbudgets/kept-0"
    tight.until(budget, lambda b: b.get("status", {}).get("currentHealthy") == 1)
    urgent = tight.pod(team, "urgent", labels_={labels.PRIORITY: "90"})
    # refused for longer than a reclaim's bound: it is asked for every 5 s
    tight.wait(lambda: tight.log().count("kept was refused") > BOUND_S / 5 + 1)
    assert "ReclaimForced" not in tight.log()
    assert not is_leaving(tight.cluster.api.get(path))
    tight.cluster.api.delete(budget)
    tight.until_bound(urgent)


def test_processes_that_ignore_sigterm_for_a_day_are_gone_within_the_bound_on_a_real_node(
    kubelet_system: DevCluster, tmp_path: Path
) -> None:
    set_reclaim(kubelet_system, **TIGHT)
    world = Controlled(kubelet_system, tmp_path, address=address_of(kubelet_system))
    try:
        borrower, lender = world.team(guaranteed=0), world.team(guaranteed=2)
        world.start()
        for name, budgets in (("guarded", 2), ("willing", 0)):
            path = world.pod(borrower, name, labels_={"app": name}, **deaf(DAY_S))
            world.until(path, lambda p: p["status"].get("phase") == "Running")
            guard(world, borrower, name, budgets)
        for name in ("a", "b"):
            world.pod(lender, name, **deaf(1))
        world.wait(lambda: len(world.bound(lender)) == 2, lambda: world.log()[-3000:])
        assert world.log().count("ReclaimForced") == 1
    finally:
        world.close()
        kubelet_system.api.delete(f"{QUOTA_POLICIES}/default")


@pytest.mark.slow
def test_a_team_that_comes_to_borrow_loses_that(tight: Controlled) -> None:
    """Its own pods would otherwise leave for ever, and others wait for what the plan counts as free soon."""
    tight.add_nodes(1, gpus=2)
    team = tight.team(guaranteed=1)
    tight.start()
    path = tight.pod(team, "kept", labels_={"app": "kept", labels.PRIORITY: "10"})
    tight.until(path, lambda p: p["status"].get("phase") == "Running")
    guard(tight, team, "kept")
    budget = f"/apis/policy/v1/namespaces/{team}/poddisruptionbudgets/kept-0"
    tight.until(budget, lambda b: b.get("status", {}).get("currentHealthy") == 1)
    blocker = tight.pod(tight.team(guaranteed=1), "blocker")
    tight.until_bound(blocker)
    urgent = tight.pod(team, "urgent", labels_={labels.PRIORITY: "90"})
    tight.wait(lambda: "kept was refused" in tight.log())
    assert "ReclaimForced" not in tight.log()
    tight.cluster.api.delete(blocker)  # its GPU is idle: the team borrows it
    tight.until_bound(urgent)
    tight.wait(lambda: "ReclaimForced" in tight.log())
    tight.cluster.api.until_gone(path)


def deaf(grace_s: int) -> dict[str, Any]:
    """A container that does not end by SIGTERM."""
    command = ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]
    asks = {"limits": {labels.GPU_RESOURCE: "1"}}
    container = {"name": "main", "image": image.BASE, "imagePullPolicy": "Never", "command": command, "resources": asks}
    return {"containers": [container], "terminationGracePeriodSeconds": grace_s}


@pytest.mark.parametrize(
    ("reclaim", "sentence"),
    [
        ({"boundSeconds": 60}, "boundSeconds is 60"),
        ({"maxGracePeriodSeconds": 0}, "should be greater than or equal to 1"),
        ({"maxMinRunTimeSeconds": -1}, "should be greater than or equal to 0"),
    ],
)
def test_a_bound_that_cannot_be_kept_is_refused(
    crds_cluster: DevCluster, reclaim: dict[str, int], sentence: str
) -> None:
    body = {"apiVersion": labels.API_VERSION, "kind": "QuotaPolicy", "metadata": {"name": "default"}}
    with pytest.raises(ApiError) as refused:
        crds_cluster.api.create(QUOTA_POLICIES, {**body, "spec": {"reclaim": reclaim}}, dryRun="All")
    assert sentence in refused.value.message
    with pytest.raises(ApiError, match="the cluster has one policy"):
        crds_cluster.api.create(QUOTA_POLICIES, {**body, "metadata": {"name": "other"}, "spec": {}}, dryRun="All")


def test_an_annotation_of_the_future_or_of_long_ago_counts_for_nothing(tight: Controlled) -> None:
    tight.add_nodes(1, gpus=2)
    borrower, lender = tight.team(guaranteed=0), tight.team(guaranteed=2)
    tight.start()
    for name, at in (
        ("ahead", "99999999999"),
        ("long-ago", "1000"),
    ):
        tight.until_bound(tight.pod(borrower, name, annotations={labels.RECLAIMED_AT: at}))
    for name in ("a", "b"):
        tight.pod(lender, name)
    tight.wait(lambda: len(tight.bound(lender)) == 2, lambda: tight.log()[-3000:])
    assert "ReclaimForced" not in tight.log()
    assert all(holds(pod) for pod in tight.pods(lender).values())
