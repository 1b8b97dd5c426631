"""Kubeflow's Profiles, with everything of manifests/ installed and the controller under its own shipped rights."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.paths import QUOTA_POLICIES, WORKLOAD_POLICIES
from tests.kubernetes.controlled import Controlled, pod_body
from tests.kubernetes.faulty_proxy import FaultyProxy
from tests.kubernetes.installation import ACCOUNT, KEYS, NAMESPACE, PROFILES, QUOTAS, jobs_of
from tests.kubernetes.test_client import run
from tools.devcluster.api import APPLY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.devcluster import DevCluster


@pytest.fixture
def controlled(kubeflow_cluster: DevCluster, tmp_path: Path) -> Iterator[Controlled]:
    """The controller as its ServiceAccount; nodes and Profiles are the test's."""
    running = Controlled(kubeflow_cluster, tmp_path)
    running.kubeconfig = kubeflow_cluster.kubeconfig_of_service_account(NAMESPACE, ACCOUNT)
    running.arguments = [f"--keys-namespace={KEYS}"]
    yield running
    running.close()


def profile(controlled: Controlled, quota: object, *, name: str = "", **spec: object) -> str:
    """A Profile with its namespace, as Kubeflow's own controller would make it; the name."""
    name = name or f"profile-{uuid.uuid4().hex[:6]}"
    controlled.cluster.make_namespace(name)
    plugins = [{"kind": "WorkloadIdentity", "spec": {}}, {"kind": "GpuQuota", "spec": quota}]
    body = {"apiVersion": "kubeflow.org/v1", "kind": "Profile", "metadata": {"name": name}}
    controlled.cluster.api.create(PROFILES, {**body, "spec": {"plugins": plugins, **spec}})
    controlled.teams.append(name)
    return name


def events_of(controlled: Controlled, namespace: str) -> dict[str, str]:
    events = controlled.cluster.api.items(f"/api/v1/namespaces/{namespace}/events")
    return {event["reason"]: event["message"] for event in events}


def test_a_profiles_quota_is_mirrored_and_its_pods_wait_for_it(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=4)
    controlled.start()
    name = profile(controlled, {"guaranteed": 1, "limit": 2, "priority": 200})
    quota = controlled.until(f"{QUOTAS}/{name}", lambda q: q["spec"].get("limit") == 2)
    assert quota["metadata"]["labels"][labels.SOURCE] == "profile"
    assert quota["metadata"]["ownerReferences"][0]["kind"] == "Profile"
    controlled.until(f"/api/v1/namespaces/{name}", lambda n: n["metadata"]["labels"].get(labels.MANAGED) == "true")
    for i in range(3):  # as a user makes them: the webhook gates them
        controlled.cluster.api.create(f"/api/v1/namespaces/{name}/pods", pod_body(f"p{i}", gated=False))
    controlled.wait(lambda: len(controlled.bound(name)) == 2, lambda: controlled.log()[-4000:])
    assert len(controlled.waiting(name)) == 1
    controlled.cluster.api.patch(
        f"{PROFILES}/{name}", {"spec": {"plugins": [{"kind": "GpuQuota", "spec": {"guaranteed": 3}}]}}
    )
    controlled.wait(lambda: len(controlled.bound(name)) == 3)


def test_a_quota_that_could_not_be_written_is_written_later(controlled: Controlled, tmp_path: Path) -> None:
    with FaultyProxy(controlled.cluster, tmp_path, 0.0, seed=1) as proxy:
        controlled.kubeconfig = proxy.kubeconfig
        controlled.start()
        gone = profile(controlled, {"guaranteed": 1})
        controlled.until(f"{QUOTAS}/{gone}", lambda q: q["spec"]["guaranteed"] == 1)
        kept = f"kept-{uuid.uuid4().hex[:6]}"
        proxy.conflicts.update({("PATCH", kept): 2, ("DELETE", gone): 1})  # its quota, and its namespace's label
        profile(controlled, {"guaranteed": 2}, name=kept)
        controlled.cluster.api.patch(f"{PROFILES}/{gone}", {"spec": {"plugins": []}})
        controlled.until(f"{QUOTAS}/{kept}", lambda q: q["spec"]["guaranteed"] == 2)
        controlled.until(f"/api/v1/namespaces/{kept}", lambda n: n["metadata"]["labels"].get(labels.MANAGED) == "true")
        controlled.cluster.api.until_gone(f"{QUOTAS}/{gone}")
        assert not +proxy.conflicts  # all of them were met
        controlled.stop()


def test_a_malformed_plugin_is_told_of_and_leaves_the_last_good_quota(controlled: Controlled) -> None:
    controlled.start()
    good, bad = profile(controlled, {"guaranteed": 1}), profile(controlled, {"guaranteed": 1})
    controlled.until(f"{QUOTAS}/{bad}", lambda q: q["spec"]["guaranteed"] == 1)
    slips: list[Any] = [{"guarantee": 5}, {"guaranteed": "many"}, {"guaranteed": 3, "limit": 2}]
    for slip in slips:
        plugins = {"spec": {"plugins": [{"kind": "GpuQuota", "spec": slip}]}}
        controlled.cluster.api.patch(f"{PROFILES}/{bad}", plugins)
    controlled.wait(lambda: "InvalidGpuQuota" in events_of(controlled, bad))
    plugins = {"spec": {"plugins": [{"kind": "GpuQuota", "spec": {"guaranteed": 2}}]}}
    controlled.cluster.api.patch(f"{PROFILES}/{good}", plugins)
    controlled.until(f"{QUOTAS}/{good}", lambda q: q["spec"]["guaranteed"] == 2)
    assert controlled.cluster.api.get(f"{QUOTAS}/{bad}")["spec"]["guaranteed"] == 1


def test_a_resource_quota_that_counts_gpus_is_warned_of(controlled: Controlled) -> None:
    controlled.start()
    name = profile(controlled, {"guaranteed": 1}, resourceQuotaSpec={"hard": {"requests.nvidia.com/gpu": "1"}})
    controlled.wait(lambda: "ResourceQuotaCountsGpus" in events_of(controlled, name))


def test_a_mirrored_quota_that_is_changed_or_deleted_by_hand_comes_back_and_goes_with_the_plugin(
    controlled: Controlled,
) -> None:
    controlled.start()
    name = profile(controlled, {"guaranteed": 1})
    path = f"{QUOTAS}/{name}"
    controlled.until(path, lambda q: q["spec"]["guaranteed"] == 1)
    controlled.cluster.api.patch(path, {"spec": {"guaranteed": 9}})
    controlled.until(path, lambda q: q["spec"]["guaranteed"] == 1)
    before = controlled.cluster.api.get(path)["metadata"]["uid"]
    controlled.cluster.api.delete(path)
    controlled.until(path, lambda q: q["metadata"]["uid"] != before)
    controlled.cluster.api.patch(f"{PROFILES}/{name}", {"spec": {"plugins": []}})
    controlled.cluster.api.until_gone(path)


def test_an_elastic_job_runs_under_the_shipped_rights_and_policies(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    controlled.start()
    name = profile(controlled, {"guaranteed": 2})
    job = controlled.job(name, "train", gpus=2, gpusPerWorker=1, gracePeriodSeconds=1)
    controlled.until_phase(job, "Running")
    controlled.wait(lambda: len(controlled.bound(name)) == 2)
    controlled.cluster.api.patch(job, {"spec": {"suspend": True}})
    controlled.until_phase(job, "Suspended")
    assert "Forbidden" not in controlled.log()


def test_a_deleted_profile_is_explained_on_the_pods_that_run_and_by_explain(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=2)
    controlled.start()
    name = profile(controlled, {"guaranteed": 2})
    controlled.until(f"{QUOTAS}/{name}", lambda q: q["spec"]["guaranteed"] == 2)
    runs = controlled.until_bound(controlled.pod(name, "runs"))
    job = controlled.job(name, "train", gpus=1, gracePeriodSeconds=1)
    controlled.until_phase(job, "Running")
    assert "no quota any more" not in run(controlled.cluster, name, "explain", "train").stdout
    controlled.cluster.api.delete(f"{PROFILES}/{name}")
    controlled.cluster.api.until_gone(f"{QUOTAS}/{name}")

    def explained() -> dict[str, str]:
        events = controlled.cluster.api.items(f"/api/v1/namespaces/{name}/events")
        found = [event for event in events if event["reason"] == "QuotaDeleted"]
        return {event["involvedObject"]["name"]: event["message"] for event in found}

    controlled.wait(lambda: set(explained()) == {"runs", "train-0"}, controlled.log)
    assert f"with its Profile {name}" in explained()["runs"]
    assert "no quota any more" in run(controlled.cluster, name, "explain", "train").stdout
    bare = run(controlled.cluster, name, "explain", "runs").stdout
    assert "pod runs holds 1 GPU on node " in bare
    assert f"QuotaDeleted: GpuQuota {name} was deleted with its Profile {name}" in bare
    assert "no quota any more" in bare
    assert run(controlled.cluster, name, "explain", "nothing").returncode == 2
    now = controlled.pods(name)["runs"]
    assert (now["metadata"]["uid"], controlled.bound(name)) == (runs["metadata"]["uid"], {"runs", "train-0"})


def test_what_a_gitops_tool_has_applied_does_not_drift(controlled: Controlled) -> None:
    """Applied under another field manager, changed by the controller, and applied again: no conflict, no difference."""
    controlled.add_nodes(1, gpus=2)
    controlled.start()
    name = profile(controlled, {"guaranteed": 1})
    team = controlled.team(guaranteed=1)
    template = {"spec": {"containers": [{"name": "main", "image": "none"}]}}
    plugins = [{"kind": "GpuQuota", "spec": {"guaranteed": 1, "limit": 2}}]
    own, rules = labels.API_VERSION, {"project": team, "gpuFractionLimit": {"most": 1}}
    files: dict[str, dict[str, Any]] = {
        f"{QUOTAS}/{team}": {"apiVersion": own, "kind": "GpuQuota", "spec": {"guaranteed": 1, "limit": 2}},
        f"{QUOTA_POLICIES}/default": {"apiVersion": own, "kind": "QuotaPolicy", "spec": {"moves": True}},
        f"{WORKLOAD_POLICIES}/{team}": {"apiVersion": own, "kind": "WorkloadPolicy", "spec": rules},
        f"{PROFILES}/{name}": {"apiVersion": "kubeflow.org/v1", "kind": "Profile", "spec": {"plugins": plugins}},
        f"{jobs_of(team)}/train": {"apiVersion": own, "kind": "ElasticJob", "spec": {"gpus": 1, "template": template}},
    }
    bodies = {path: {**body, "metadata": {"name": path.rpartition("/")[2]}} for path, body in files.items()}
    for path, body in bodies.items():
        controlled.cluster.api.patch(path, body, APPLY, fieldManager="argocd-controller", force="true")
    controlled.until_phase(f"{jobs_of(team)}/train", "Running")
    controlled.until(f"{QUOTAS}/{team}", lambda quota: quota.get("status", {}).get("gpus") == 1)
    controlled.until(f"{QUOTAS}/{name}", lambda quota: quota["spec"].get("limit") == 2)
    for path, body in bodies.items():
        live = controlled.cluster.api.get(path)
        merged = controlled.cluster.api.patch(path, body, APPLY, fieldManager="argocd-controller", dryRun="All")
        assert _without_bookkeeping(merged) == _without_bookkeeping(live), path
    controlled.cluster.api.delete(f"{WORKLOAD_POLICIES}/{team}")


def _without_bookkeeping(found: dict[str, Any]) -> dict[str, Any]:
    """Return what a difference is computed of: the status may change between two requests."""
    metadata = {
        name: one for name, one in found["metadata"].items() if name not in {"managedFields", "resourceVersion"}
    }
    return {**found, "metadata": metadata, "status": None}
