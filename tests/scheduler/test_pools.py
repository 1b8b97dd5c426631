"""Node pools: a project has a quota in each, and each is shared by itself."""

from __future__ import annotations

import pytest

from kfp_gpuquota.api import PoolQuota, Project, ReasonCode
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.scheduler import QuotaRemoved
from kfp_gpuquota.scheduler.state.copying import copied
from tests.scheduler.test_resources import Cluster


def pooled() -> Cluster:
    """Two H100s and four T4s in pools, and two GPUs in none; both projects have guarantees in the first pool."""
    cluster = Cluster()
    cluster.node("plain", 2)
    cluster.node("h", 2, pool="h100")
    cluster.node("t", 4, pool="t4")
    cluster.project("a", 1, pools={"h100": PoolQuota(guaranteed=1)})
    cluster.project("b", 1, pools={"h100": PoolQuota(guaranteed=1), "t4": PoolQuota(limit=1)})
    return cluster


def test_a_job_runs_in_its_pool_and_one_without_a_pool_on_nodes_of_none() -> None:
    cluster = pooled()
    cluster.submit("anywhere")
    cluster.submit("fast", node_pool="h100")
    cluster.run()
    assert cluster.where("anywhere")[0][0] == "plain"
    assert cluster.where("fast")[0][0] == "h"


def test_a_guarantee_in_one_pool_is_taken_back_there_and_nowhere_else() -> None:
    cluster = pooled()
    for i in range(2):
        cluster.submit(f"fast-{i}", node_pool="h100")
        cluster.submit(f"plain-{i}")
        cluster.run()
    cluster.submit("owner", "b", node_pool="h100")
    assert [e.job for e in cluster.run().evict] == ["fast-1"]
    cluster.run()
    assert cluster.where("owner")[0][0] == "h"


def test_limits_and_fair_shares_are_those_of_the_pool() -> None:
    cluster = pooled()
    for i in range(2):
        cluster.submit(f"b-{i}", "b", node_pool="t4")
    for i in range(4):
        cluster.submit(f"a-{i}", "a", node_pool="t4")
    cluster.run()
    held = [name for name in ("b-0", "b-1", "a-0", "a-1", "a-2", "a-3") if cluster.where(name)]
    assert held == ["b-0", "a-0", "a-1", "a-2"]
    code, message = cluster.why("b-1")
    assert code == ReasonCode.OVER_LIMIT
    assert "project b (node pool t4) holds 1 of its limit of 1" in message


def test_departments_hold_in_pools_too() -> None:
    cluster = Cluster()
    cluster.node("h", 4, pool="h100")
    cluster.project("department", 0, pools={"h100": PoolQuota(limit=2)})
    cluster.project("a", 0, parent="department")
    for i in range(3):
        cluster.submit(f"job-{i}", node_pool="h100")
    cluster.run()
    assert [bool(cluster.where(f"job-{i}")) for i in range(3)] == [True, True, False]
    assert "project department (node pool h100) holds 2 of its limit of 2" in cluster.why("job-2")[1]


def test_a_pool_without_nodes_is_named() -> None:
    cluster = pooled()
    cluster.submit("job", node_pool="b200")
    assert cluster.why("job") == (
        ReasonCode.NODE_AFFINITY,
        "needs 1 GPU; node pool b200 has no ready node that it may use",
    )


def test_a_quota_that_changes_changes_in_every_pool_and_goes_with_its_project() -> None:
    cluster = pooled()
    cluster.submit("job", "b", node_pool="t4")
    cluster.project("b", 1, pools={"t4": PoolQuota(limit=0)})
    assert cluster.why("job")[0] == ReasonCode.OVER_LIMIT
    cluster.state.apply(QuotaRemoved("b"))
    assert "project b does not exist" in cluster.why("job")[1]
    assert copied(cluster.state).ledger.pools == cluster.state.ledger.pools


def test_a_pools_quota_is_checked_as_a_projects_is() -> None:
    with pytest.raises(InvalidFieldError, match=r"pools.limit is 1, but it must be at least the guaranteed 2 GPUs"):
        PoolQuota(guaranteed=2, limit=1)
    with pytest.raises(InvalidFieldError, match="pools is 'a b'"):
        Project(name="a", pools={"a b": PoolQuota()})
