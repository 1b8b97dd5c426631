"""`gpuquota migrate`: what quotas of Kueue and ResourceQuotas amount to; the API server accepts what is printed.

Kueue's objects are written by hand, from its API documentation (v1beta1 and v1beta2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.operations.migration import Old, migrated
from tests.kubernetes.installation import QUOTAS
from tests.kubernetes.test_uninstall import gpuquota

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kubernetes.controlled import Controlled

Object = dict[str, Any]
GPU, AMD = labels.GPU_RESOURCE, "amd.com/gpu"


def cluster_queue(name: str, flavors: dict[str, list[Object]], **spec: Any) -> Object:
    groups = [{"flavors": [{"name": flavor, "resources": rows} for flavor, rows in flavors.items()]}]
    return {"metadata": {"name": name}, "spec": {"resourceGroups": groups, **spec}}


def local_queue(namespace: str, queue: str) -> Object:
    return {"metadata": {"name": "main", "namespace": namespace}, "spec": {"clusterQueue": queue}}


def row(name: str, nominal: object, **more: object) -> Object:
    return {"name": name, "nominalQuota": nominal, **more}


def kueue(*queues: Object, **more: Any) -> Old:
    return Old({GPU: 1.0, AMD: 0.5}, cluster_queues=list(queues), **more)


def specs(old: Old) -> dict[str, Object]:
    return {one["metadata"]["name"]: one["spec"] for one in migrated(old).objects}


def test_a_team_with_a_queue_of_its_own_keeps_its_numbers() -> None:
    rows = [row(GPU, "8", borrowingLimit=4), row("cpu", 64, borrowingLimit=0), row("memory", "1Gi", borrowingLimit=0)]
    queue = cluster_queue("q", {"a100": rows}, cohortName="all", fairSharing={"weight": "2"})
    assert specs(kueue(queue, local_queues=[local_queue("team-a", "q")])) == {
        "team-a": {
            "guaranteed": 8,
            "limit": 12,
            "overQuotaWeight": 2.0,
            "guaranteedCpu": "64",
            "limitCpu": "64",
            "guaranteedMemory": "1073741824",
            "limitMemory": "1073741824",
        }
    }


@pytest.mark.parametrize(
    ("spec", "limit"), [({}, 8), ({"cohort": "all"}, None), ({"cohortName": "all"}, None)]
)  # fmt: skip
def test_only_a_queue_of_a_cohort_borrows(spec: Object, limit: int | None) -> None:
    queue = cluster_queue("q", {"a100": [row(GPU, 8)]}, **spec)
    assert specs(kueue(queue, local_queues=[local_queue("t", "q")]))["t"].get("limit") == limit


def test_flavors_are_node_pools_and_other_vendors_count_as_the_policy_says() -> None:
    queue = cluster_queue("q", {"h100": [row(GPU, 8)], "amd": [row(AMD, 4)]})
    flavor = {"metadata": {"name": "h100"}, "spec": {"nodeLabels": {"gpu": "h100"}}}
    old = kueue(queue, local_queues=[local_queue("t", "q")], flavors=[flavor])
    assert specs(old)["t"] == {
        "guaranteed": 10,
        "limit": 10,
        "pools": {"h100": {"guaranteed": 8, "limit": 8}, "amd": {"guaranteed": 2, "limit": 2}},
    }
    assert any("kubectl label nodes -l gpu=h100 gpuquota.dev/pool=h100" in note for note in migrated(old).notes)


def test_a_shared_queue_and_a_cohort_are_departments() -> None:
    shared = cluster_queue("shared", {"x": [row(GPU, 6)]}, cohortName="org")
    queues = [local_queue("a", "shared"), local_queue("b", "shared")]
    cohort = {"metadata": {"name": "org"}, "spec": {"parentName": "company"}}
    assert specs(kueue(shared, local_queues=queues, cohorts=[cohort])) == {
        "shared": {"guaranteed": 6, "parent": "org"},
        "a": {"guaranteed": 0, "parent": "shared"},
        "b": {"guaranteed": 0, "parent": "shared"},
        "org": {"guaranteed": 6, "parent": "company"},
    }


def test_a_department_does_not_get_the_name_of_a_namespace() -> None:
    """Else a quota was its own parent, and one of the two with its name was lost."""
    shared = cluster_queue("ml", {"x": [row(GPU, 6)]}, cohortName="ml")
    queues = [local_queue("ml", "ml"), local_queue("ml-dev", "ml")]
    old = kueue(shared, local_queues=queues, cohorts=[{"metadata": {"name": "ml"}}])
    assert len(migrated(old).objects) == 4
    assert specs(old) == {
        "ml-department": {"guaranteed": 6, "parent": "ml-department-department"},
        "ml": {"guaranteed": 0, "parent": "ml-department"},
        "ml-dev": {"guaranteed": 0, "parent": "ml-department"},
        "ml-department-department": {"guaranteed": 6},
    }
    assert "the department is ml-department" in "\n".join(migrated(old).notes)


def test_what_is_not_carried_over_is_said() -> None:
    rows = [row(GPU, "many", lendingLimit=1), row("example.com/licenses", 3)]
    queue = cluster_queue(
        "q", {"x": rows}, admissionChecks=["p"], queueingStrategy="StrictFIFO",
        preemption={"reclaimWithinCohort": "Never"},
    )  # fmt: skip
    other, idle = cluster_queue("r", {"x": [row(GPU, 1)]}), cluster_queue("idle", {"x": [row(GPU, 1)]})
    priority = {"metadata": {"name": "urgent"}, "value": 1000}
    queues = [local_queue("t", "q"), local_queue("t", "r")]
    queues[0]["spec"]["stopPolicy"] = "HoldAndDrain"
    notes = "\n".join(migrated(kueue(queue, other, idle, local_queues=queues, priorities=[priority])).notes)
    for words in (
        "it counts as 0", "lendingLimit", "example.com/licenses is no GPU", "admission checks", "StrictFIFO",
        "reclaimWithinCohort Never", "namespace t: it is in ClusterQueue q and r",
        "ClusterQueue idle: it has no LocalQueue", "WorkloadPriorityClass urgent (1000)",
        "stopPolicy HoldAndDrain; gpuquota project drain t",
    ):  # fmt: skip
        assert words in notes, words


def test_a_queue_that_is_held_stays_held() -> None:
    queue = cluster_queue("q", {"x": [row(GPU, 2)]}, stopPolicy="Hold")
    (made,) = migrated(kueue(queue, local_queues=[local_queue("t", "q")])).objects
    assert made["spec"]["stopPolicy"] == "Hold"


def test_a_profile_keeps_its_other_plugins() -> None:
    plugins = [{"kind": "WorkloadIdentity", "spec": {}}, {"kind": "GpuQuota", "spec": {"guaranteed": 1}}]
    profile = {"metadata": {"name": "t"}, "spec": {"plugins": plugins}}
    queue = cluster_queue("q", {"x": [row(GPU, 2)]})
    (made,) = migrated(kueue(queue, local_queues=[local_queue("t", "q")], profiles={"t": profile})).objects
    assert made["kind"] == "Profile"
    assert made["spec"]["plugins"] == [plugins[0], {"kind": "GpuQuota", "spec": {"guaranteed": 2, "limit": 2}}]


def test_resource_quotas_of_a_cluster_are_printed_and_accepted(controlled: Controlled, tmp_path: Path) -> None:
    api = controlled.cluster.api
    team = controlled.cluster.make_namespace("had-a-resource-quota")
    quotas = f"/api/v1/namespaces/{team}/resourcequotas"
    api.create(quotas, {"metadata": {"name": "gpus"}, "spec": {"hard": {f"requests.{GPU}": "8", "pods": "50"}}})
    api.create(quotas, {"metadata": {"name": "pods"}, "spec": {"hard": {"pods": "50"}}})
    code, output = gpuquota(controlled.cluster, tmp_path, "migrate", "--from", "resourcequota", "--dry-run")
    assert code == 0, output
    (made,) = [one for one in yaml.safe_load_all(output) if one["metadata"]["name"] == team]
    assert made["spec"] == {"guaranteed": 8, "limit": 8}
    assert f"# not carried over: {team}: remove requests.nvidia.com/gpu" in output
    api.create(QUOTAS, made, dryRun="All")
    code, output = gpuquota(controlled.cluster, tmp_path, "migrate", "--from", "resourcequota")
    assert code == 2
    assert "add --dry-run" in output
    api.delete(f"/api/v1/namespaces/{team}")
