"""`gpuquota cluster export` and `restore` on a real API server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.operations.exporting import Outcome, exported, restored
from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls
from kfp_gpuquota.errors import UsageError
from tests.kubernetes.installation import QUOTAS, jobs_of
from tests.kubernetes.test_crds import job, quota
from tests.kubernetes.users import connection_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.devcluster import DevCluster


@pytest.fixture
def calls(crds_cluster: DevCluster) -> Calls:
    return Calls(connection_of(crds_cluster.kubeconfig), retry_for_s=10)


@pytest.fixture
def team(crds_cluster: DevCluster, namespace: str) -> Iterator[str]:
    """A managed namespace with a quota, a job, and a quota that a Profile says."""
    mirrored = quota(f"{namespace}-p", guaranteed=1)
    mirrored["metadata"]["labels"] = {labels.SOURCE: "profile"}
    crds_cluster.api.create(QUOTAS, quota(namespace, guaranteed=2, limit=4))
    crds_cluster.api.create(QUOTAS, mirrored)
    of_a_job = job("of-a-job")
    of_a_job["metadata"]["labels"] = {labels.SOURCE: "job"}
    crds_cluster.api.create(jobs_of(namespace), job("train"))
    crds_cluster.api.create(jobs_of(namespace), of_a_job)
    crds_cluster.api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": {labels.MANAGED: "true"}}})
    yield namespace
    crds_cluster.api.delete(f"{QUOTAS}/{namespace}")
    crds_cluster.api.delete(f"{QUOTAS}/{namespace}-p")


def saved_of(calls: Calls, team: str) -> str:
    """What is exported of one team: the cluster is shared with other tests."""
    whole = json.loads(exported(calls, jobs=True))
    whole["items"] = [one for one in whole["items"] if team in json.dumps(one["metadata"])]
    return json.dumps(whole)


def test_quotas_and_labels_are_restored_as_they_were(crds_cluster: DevCluster, calls: Calls, team: str) -> None:
    saved = saved_of(calls, team)
    crds_cluster.api.delete(f"{QUOTAS}/{team}")
    crds_cluster.api.delete(f"{jobs_of(team)}/train")
    crds_cluster.api.patch(f"/api/v1/namespaces/{team}", {"metadata": {"labels": {labels.MANAGED: None}}})
    outcomes = dict(restored(calls, saved))
    assert outcomes[f"GpuQuota/{team}"] is outcomes["ElasticJob/train"] is Outcome.CREATED
    assert outcomes[f"Namespace/{team}"] is Outcome.CHANGED
    assert f"GpuQuota/{team}-p" not in outcomes, "a Profile's is in the Profile"
    assert "ElasticJob/of-a-job" not in outcomes, "it would be in the way of the Job's own"
    assert {item["kind"] for item in json.loads(exported(calls))["items"]} >= {"GpuQuota", "Namespace"}
    assert crds_cluster.api.get(f"{QUOTAS}/{team}")["spec"]["limit"] == 4
    assert set(dict(restored(calls, saved)).values()) == {Outcome.UNCHANGED}
    crds_cluster.kubectl("apply", "-f", "-", stdin=saved_of(calls, team))
    crds_cluster.api.patch(f"{QUOTAS}/{team}", {"spec": {"limit": 8}})
    assert dict(restored(calls, saved))[f"GpuQuota/{team}"] is Outcome.CHANGED
    assert crds_cluster.api.get(f"{QUOTAS}/{team}")["spec"]["limit"] == 4


def test_a_namespace_that_is_not_there_is_skipped_and_other_files_are_refused(calls: Calls) -> None:
    metadata = {"name": "nowhere", "labels": {labels.MANAGED: "true"}}
    items = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata},
        {**job("train"), "metadata": {"name": "train", "namespace": "nowhere"}},
    ]
    assert set(dict(restored(calls, json.dumps({"items": items}))).values()) == {Outcome.SKIPPED}
    for content in ("[]", "x", '{"items": [{"kind": "Pod"}]}'):
        with pytest.raises(UsageError, match="cluster export"):
            list(restored(calls, content))
    foreign = {"items": [{"kind": "Pod", "metadata": {"name": "p"}}]}
    with pytest.raises(UsageError, match="objects of kind Pod"):
        list(restored(calls, json.dumps(foreign)))
