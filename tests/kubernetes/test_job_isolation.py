"""The NetworkPolicy of each ElasticJob: its content on a real API server. Whether it is enforced is up to a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.paths import QUOTA_POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kubernetes.controlled import Controlled

SWITCHED_OFF = {
    "apiVersion": labels.API_VERSION,
    "kind": "QuotaPolicy",
    "metadata": {"name": "default"},
    "spec": {"isolateWorkers": False},
}


def policies(team: str) -> str:
    return f"/apis/networking.k8s.io/v1/namespaces/{team}/networkpolicies"


def test_only_workers_of_the_job_are_admitted_to_its_workers_until_it_is_deleted(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    team = controlled.team(guaranteed=2)
    controlled.start()
    jobs = {name: controlled.job(team, name, gracePeriodSeconds=1) for name in ("one", "two")}
    for job in jobs.values():
        controlled.until_phase(job, "Running")
    found = {policy["metadata"]["name"]: policy for policy in controlled.cluster.api.items(policies(team))}
    uids = {name: controlled.cluster.api.get(path)["metadata"]["uid"] for name, path in jobs.items()}
    assert found.keys() == {f"{name}-{uid[:8]}-workers" for name, uid in uids.items()}
    for name, uid in uids.items():
        policy, workers = found[f"{name}-{uid[:8]}-workers"], {"matchLabels": {labels.JOB: name}}
        assert policy["spec"] == {
            "podSelector": workers,
            "policyTypes": ["Ingress"],  # and not Egress: data, DNS and the membership service stay reachable
            "ingress": [{"from": [{"podSelector": workers}]}],
        }
        assert [owner["uid"] for owner in policy["metadata"]["ownerReferences"]] == [uid]
        assert controlled.pods(team)[f"{name}-0"]["metadata"]["labels"][labels.JOB] == name
    controlled.cluster.api.delete(jobs["one"])
    controlled.cluster.api.until_gone(f"{policies(team)}/one-{uids['one'][:8]}-workers")
    assert controlled.cluster.api.exists(f"{policies(team)}/two-{uids['two'][:8]}-workers")


@pytest.fixture
def open_cluster(controlled: Controlled) -> Iterator[Controlled]:
    """A cluster whose rules isolate no workers."""
    controlled.cluster.api.apply(f"{QUOTA_POLICIES}/default", SWITCHED_OFF)
    yield controlled
    controlled.cluster.api.delete(f"{QUOTA_POLICIES}/default")


def test_no_policy_is_created_while_administrators_switch_it_off(open_cluster: Controlled) -> None:
    open_cluster.add_nodes(1, gpus=1)
    team = open_cluster.team(guaranteed=1)
    open_cluster.start()
    api, job = open_cluster.cluster.api, open_cluster.job(team, "open")
    open_cluster.until_phase(job, "Running")
    assert api.items(policies(team)) == []
    assert "networkPolicy" not in api.get(job)["status"]

    api.patch(f"{QUOTA_POLICIES}/default", {"spec": {"isolateWorkers": True}})  # the job that runs is isolated, too
    name = open_cluster.until(job, lambda found: found["status"].get("networkPolicy"))["status"]["networkPolicy"]
    assert [one["metadata"]["name"] for one in api.items(policies(team))] == [name]


def test_a_refused_policy_holds_the_job_back_and_says_why(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    team = controlled.team(guaranteed=1)
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"count/networkpolicies.networking.k8s.io": "0"}}}
    path = f"/api/v1/namespaces/{team}/resourcequotas"
    controlled.cluster.api.create(path, quota)
    controlled.cluster.api.until(f"{path}/few", lambda found: found.get("status", {}).get("hard"))
    controlled.start()
    job = controlled.job(team, "held")
    controlled.until(job, lambda found: "networkpolicies" in found.get("status", {}).get("message", ""))
    assert not controlled.pods(team), "no worker without its protection"
    controlled.cluster.api.delete(f"{path}/few")
    controlled.until_phase(job, "Running")
