"""Faults of the controller and around it: no quota is violated, nothing is doubled, nothing is stuck.

At full size: pytest tests/kubernetes/test_faults.py --plans 200 --away 120 --timeout 1800
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

from tests.kubernetes.controlled import Controlled, is_leaving, is_over
from tests.kubernetes.faulty_proxy import FaultyProxy
from tests.kubernetes.installation import QUOTAS
from tests.kubernetes.test_suspended_owners import reasons
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from pathlib import Path


def active(controlled: Controlled, team: str) -> int:
    """Pods that are there, and neither ending nor over."""
    return sum(not is_leaving(p) and not is_over(p) for p in controlled.pods(team).values())


def settles(controlled: Controlled, team: str, pods: int) -> None:
    """Exactly so many of its pods hold GPUs in the end."""
    controlled.wait(
        lambda: len(controlled.bound(team)) == pods,
        lambda: f"{controlled.bound(team)} {controlled.waiting(team)}\n{controlled.log()[-8000:]}",
        seconds=90,
    )
    controlled.check()


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_call_may_fail_and_the_cluster_comes_out_right(controlled: Controlled, tmp_path: Path, seed: int) -> None:
    controlled.add_nodes(3, gpus=4)
    borrower, owner = controlled.team("borrower", guaranteed=2), controlled.team("owner", guaranteed=6)
    jobs = controlled.team("jobs", guaranteed=4)
    with FaultyProxy(controlled.cluster, tmp_path, 0.0, seed) as proxy:
        controlled.kubeconfig = proxy.kubeconfig
        controlled.start()
        proxy.rate = 0.4
        for i in range(12):
            controlled.pod(borrower, f"b{i}")
        settles(controlled, borrower, 12)
        job = controlled.job(jobs, "elastic", gpus=2, minGpus=2, maxGpus=4, gpusPerWorker=1, gracePeriodSeconds=1)
        for i in range(6):
            controlled.pod(owner, f"o{i}")
        settles(controlled, owner, 6)
        controlled.until(job, lambda j: j.get("status", {}).get("gpus", 0) >= 2)
        controlled.wait(lambda: len(controlled.bound(jobs)) == active(controlled, jobs))
        controlled.cluster.api.delete(job)
        controlled.wait(lambda: not controlled.pods(jobs), controlled.log)
        for name in list(controlled.pods(owner)):
            controlled.cluster.api.delete(f"/api/v1/namespaces/{owner}/pods/{name}")
        controlled.pod(borrower, "last")
        controlled.wait(lambda: "last" in controlled.bound(borrower), controlled.log)
        assert {fault for _, fault in proxy.injected} >= {"429", "500", "503", "reset", "lost answer", "409"}
        controlled.stop()


@pytest.mark.parametrize(
    "first",
    [
        ("403",),
        pytest.param(("403",) * 3, marks=pytest.mark.slow),
        pytest.param(("404",) * 2, marks=pytest.mark.slow),
        pytest.param(("409",) * 3, marks=pytest.mark.slow),
        pytest.param(("reset", "429", "500"), marks=pytest.mark.slow),
        pytest.param(("409", "404", "reset", "403"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_the_first_requests_of_each_kind_may_fail_and_the_controller_starts(
    electing: Controlled, tmp_path: Path, first: tuple[str, ...]
) -> None:
    """As from an API server that starts, or whose roles are applied after the controller."""
    electing.add_nodes(1, gpus=2)
    team = electing.team(guaranteed=2)
    electing.start()
    held = electing.pod(team, "held", gpus=2)
    electing.until_bound(held)
    electing.stop()
    waits = electing.pod(team, "waits")
    with FaultyProxy(electing.cluster, tmp_path, 0.0, seed=1) as proxy:
        electing.kubeconfig, proxy.first = proxy.kubeconfig, first
        process = electing.start(f"--webhook-port={free_port()}")
        electing.wait(lambda: electing.log().count("; workers are served") == 2, electing.log)
        electing.wait(lambda: ("WATCH", "/api/v1/pods") in proxy.begun, electing.log)
        assert electing.waiting(team) == {"waits"}
        electing.cluster.api.delete(held, 0)
        electing.until_bound(waits)
        assert process.poll() is None
        proxy.first = ()  # so that the lease is released
        electing.stop()


def test_a_conflict_that_passes_delays_a_write_and_does_not_end_it(controlled: Controlled, tmp_path: Path) -> None:
    controlled.add_nodes(1, gpus=2)
    borrower, jobs = controlled.team("borrower"), controlled.team("jobs", guaranteed=2)
    with FaultyProxy(controlled.cluster, tmp_path, 0.0, seed=1) as proxy:
        controlled.kubeconfig = proxy.kubeconfig
        controlled.start()
        for i in range(2):
            controlled.pod(borrower, f"b{i}")
        settles(controlled, borrower, 2)
        proxy.conflicts.update({("PATCH", "/status"): 1, ("POST", "/eviction"): 1, ("POST", "/pods"): 1})
        job = controlled.job(jobs, "elastic", gpus=2, gpusPerWorker=1, gracePeriodSeconds=1)
        controlled.until(job, lambda j: j.get("status", {}).get("gpus", 0) == 2)
        controlled.wait(lambda: len(controlled.bound(jobs)) == 2, controlled.log)
        worker = min(controlled.pods(jobs))
        proxy.conflicts.update({("DELETE", worker): 1, ("PATCH", "/status"): 1})
        controlled.cluster.api.patch(job, {"spec": {"suspend": True}})
        controlled.until(job, lambda j: j["status"]["phase"] == "Suspended" and not j["status"]["gpus"])
        assert not controlled.pods(jobs)
        assert not +proxy.conflicts  # all of them were met
        controlled.stop()


def test_gpus_of_an_admission_whose_answer_was_lost_go_to_no_other_pod(controlled: Controlled, tmp_path: Path) -> None:
    """The next attempt is refused, since the pod is admitted already; and the watch is slow to report that."""
    first, second = controlled.team(guaranteed=1), controlled.team(guaranteed=1, priority=200, stopPolicy="Hold")
    with FaultyProxy(controlled.cluster, tmp_path, 0.0, seed=1) as proxy:
        controlled.kubeconfig = proxy.kubeconfig
        controlled.start()
        pod, other = controlled.pod(first, "admitted"), controlled.pod(second, "other")
        controlled.wait(lambda: all("Waiting" in reasons(controlled, team, "Pod") for team in (first, second)))
        proxy.stall(on=True)
        proxy.lost["PATCH", "/admitted"] = 1
        controlled.add_nodes(1, gpus=1)
        controlled.until_bound(pod)
        controlled.wait(lambda: "could not be admitted" in controlled.log(), controlled.log)
        quota = f"{QUOTAS}/{second}"
        controlled.cluster.api.patch(quota, {"spec": {"stopPolicy": "None"}})
        controlled.wait(lambda: proxy.looks[pod] or not controlled.waiting(second), controlled.log)
        proxy.stall(on=False)
        controlled.cluster.api.delete(pod, 0)
        controlled.until_bound(other)
        assert "PlaceTaken" not in reasons(controlled, second, "Pod")
        assert proxy.looks[pod] == 1
        controlled.stop()


@pytest.mark.slow
def test_a_controller_that_is_killed_at_any_moment_leaves_nothing_wrong_behind(
    controlled: Controlled, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """While calls are refused, broken off and answered in vain (429, 500, 503, 409), and watches end with 410."""
    with FaultyProxy(controlled.cluster, tmp_path, 0.1, seed=7) as proxy:
        controlled.kubeconfig = proxy.kubeconfig
        killed_again_and_again(controlled, pytestconfig.getoption("--plans"), proxy)
        controlled.stop()
        assert sum(proxy.injected.values()) > pytestconfig.getoption("--plans")


def killed_again_and_again(controlled: Controlled, times: int, proxy: FaultyProxy) -> None:
    draw = random.Random(7)
    controlled.add_nodes(3, gpus=4)
    first, second, third = controlled.team(guaranteed=4), controlled.team(guaranteed=4), controlled.team(guaranteed=4)
    jobs = [controlled.job(third, f"job{i}", gpus=2, gpusPerWorker=1, gracePeriodSeconds=1) for i in range(3)]
    for round_ in range(times):
        for team in (first, second):
            for i in range(draw.randint(0, 3)):
                controlled.pod(team, f"p{round_}-{i}")
            for name in draw.sample(sorted(controlled.pods(team)), k=min(2, len(controlled.pods(team)))):
                controlled.cluster.api.delete(f"/api/v1/namespaces/{team}/pods/{name}")
        controlled.start()
        time.sleep(draw.random() * 0.4)  # a random moment is what is tested
        controlled.kill()
        controlled.check()
    proxy.rate = 0.0
    for team in (first, second):
        for i in range(12):
            controlled.pod(team, f"final-{i}")
    controlled.start()
    controlled.wait(
        lambda: sum(len(controlled.bound(team)) for team in (first, second, third)) == 12,
        lambda: controlled.log()[-8000:],
    )
    assert len(controlled.bound(third)) in {4, 6}
    assert len(controlled.bound(first)) >= 3
    assert len(controlled.bound(second)) >= 3
    controlled.wait(  # statuses are written after the pods
        lambda: (
            sum(controlled.cluster.api.get(job)["status"]["workers"] for job in jobs) == len(controlled.bound(third))
        ),
        lambda: controlled.log()[-8000:],
    )


@pytest.mark.slow
def test_an_api_server_that_is_away_delays_and_loses_nothing(
    controlled: Controlled, pytestconfig: pytest.Config
) -> None:
    controlled.add_nodes(1, gpus=4)
    team = controlled.team(guaranteed=4)
    process = controlled.start()
    controlled.until_bound(controlled.pod(team, "before"))
    with controlled.cluster.away("kube-apiserver"):
        time.sleep(pytestconfig.getoption("--away"))  # how long it is away is what is tested
        assert process.poll() is None
    controlled.cluster.await_healthy()
    controlled.until_bound(controlled.pod(team, "after"))


def test_a_store_that_stands_still_delays_and_loses_nothing(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=4)
    team = controlled.team(guaranteed=4)
    process = controlled.start()
    controlled.until_bound(controlled.pod(team, "before"))
    with controlled.cluster.frozen("etcd"):
        time.sleep(4)  # how long it stands still is what is tested
    controlled.cluster.await_healthy()
    controlled.until_bound(controlled.pod(team, "after"))
    assert process.poll() is None
