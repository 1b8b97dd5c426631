"""Shares of devices, CPU and memory, and the nodes that a job may use, driven by events as from a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from kfp_gpuquota.api import (
    Device,
    JobSpec,
    Kind,
    Node,
    NodeTerm,
    Operator,
    Project,
    ReasonCode,
    Requirement,
    Taint,
    TaintEffect,
    Toleration,
)
from kfp_gpuquota.scheduler import JobSubmitted, NodeChanged, Plan, QuotaChanged, State, WorkerGone, WorkerStarted, plan


class Cluster:
    """Carries plans out at once; jobs are named by their uid."""

    def __init__(self) -> None:
        self.state, self.now, self.workers = State(), 0.0, 0

    def node(self, name: str, gpus: int, gpu_memory_mib: int = 0, **more: Any) -> None:
        devices = tuple(Device(index=i, memory_mib=gpu_memory_mib) for i in range(gpus))
        self.state.apply(NodeChanged(Node(name=name, devices=devices, **more)))

    def project(self, name: str, guaranteed: int = 0, **more: Any) -> None:
        self.state.apply(QuotaChanged(Project(name=name, guaranteed=guaranteed, **more)))

    def submit(self, name: str, project: str = "a", **fields: Any) -> None:
        self.now += 1
        spec = JobSpec(name=name, project=project, command=("true",), **fields)
        self.state.apply(JobSubmitted(name, spec, self.now))

    def run(self) -> Plan:
        """Plan, start bound workers, end leaving ones."""
        decided = plan(self.state, self.now)
        received = [*(w for e in decided.evict for w in e.workers), *(w for r in decided.resize for w in r.remove)]
        for worker in (*received, *(m.worker for m in decided.move)):
            self.state.apply(WorkerGone(worker))
        placements = [(b.job, p) for b in decided.bind for p in b.placements]
        placements += [(r.job, p) for r in decided.resize for p in r.add] + [(m.job, m.to) for m in decided.move]
        for job, placement in placements:
            self.workers += 1
            self.state.apply(WorkerStarted(f"w{self.workers}", job, placement.node, placement.devices, self.now))
        return decided

    def where(self, job: str) -> list[tuple[str, tuple[int, ...]]]:
        tasks = self.state.jobs[job].tasks.values()
        return sorted((task.node.name, task.devices) for task in tasks if task.node is not None)

    def why(self, job: str) -> tuple[str, str]:
        reason = plan(self.state, self.now).waiting[job]
        return reason.code, reason.message


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster()
    made.project("a", 100)
    return made


# Shares


def test_shares_fill_the_fullest_device_on_which_they_fit(cluster: Cluster) -> None:
    cluster.node("node", 3)
    for name, part in (("half", 0.5), ("big", 0.7), ("small", 0.25), ("tiny", 0.25)):
        cluster.submit(name, gpu_fraction=part)
        cluster.run()
    assert [cluster.where(n)[0][1] for n in ("half", "big", "small", "tiny")] == [(0,), (1,), (1,), (0,)]


def test_the_same_share_of_several_devices_is_on_one_node(cluster: Cluster) -> None:
    cluster.node("small", 2, 80)
    cluster.node("wide", 8, 80)
    for name in ("one", "two"):
        cluster.submit(name, gpu_memory_mib=40, gpu_memory_limit_mib=80, gpu_devices=8)
    cluster.run()
    everything = ("wide", tuple(range(8)))
    assert cluster.where("one") == cluster.where("two") == [everything]


def test_three_thirds_are_a_whole_and_floating_point_adds_nothing(cluster: Cluster) -> None:
    cluster.node("node", 2)
    for name, part in (("x", 0.55), ("y", 0.45), ("a", 0.07), ("b", 0.29), ("c", 0.64)):
        cluster.submit(name, gpu_fraction=part)
    cluster.run()
    assert {cluster.where(n)[0][1] for n in ("x", "y")} == {(0,)} or {cluster.where(n)[0][1] for n in "abc"} == {(0,)}
    assert all(cluster.where(n) for n in ("x", "y", "a", "b", "c"))


def test_memory_goes_where_devices_are_large_enough(cluster: Cluster) -> None:
    cluster.node("small", 8, 16384)
    cluster.node("large", 1, 81920)
    cluster.submit("fits-large", gpu_memory_mib=20000)
    cluster.submit("never", gpu_memory_mib=90000)
    cluster.run()
    assert cluster.where("fits-large") == [("large", (0,))]
    assert cluster.why("never") == (
        ReasonCode.TOO_LARGE,
        "needs 90000Mi of a GPU; the largest GPU that it may use has 80Gi",
    )


def test_computing_power_is_promised_once(cluster: Cluster) -> None:
    cluster.node("node", 2, 16384)
    for name, part in (("one", 0.7), ("two", 0.6), ("three", 0.3)):
        cluster.submit(name, gpu_memory_mib=1024, gpu_compute=part)
    cluster.run()
    assert [cluster.where(name)[0][1] for name in ("one", "two", "three")] == [(0,), (1,), (0,)]


def test_a_limit_takes_no_room_from_others(cluster: Cluster) -> None:
    cluster.node("node", 1)
    cluster.submit("one", gpu_fraction=0.25, gpu_fraction_limit=0.8)
    cluster.submit("two", gpu_fraction=0.75, gpu_fraction_limit=1)
    cluster.run()
    assert cluster.where("one") == cluster.where("two") == [("node", (0,))]


def test_a_session_on_a_share_is_within_the_guarantee_and_never_preempted() -> None:
    cluster = Cluster()
    cluster.node("node", 1)
    cluster.project("a", 1)
    cluster.project("b", 1)
    for name in ("one", "two", "three"):
        cluster.submit(name, gpu_fraction=0.4, kind=Kind.BUILD)
    cluster.run()
    assert cluster.where("one")
    assert cluster.where("two")
    code, message = cluster.why("three")
    assert code == ReasonCode.OVER_QUOTA_BUILD
    assert "project a uses 0.8 GPUs of its guaranteed 1 GPU" in message
    assert "those release 0.2 GPUs or the guaranteed quota grows by as much" in message
    cluster.submit("owner", "b", gpu_fraction=0.5)
    assert plan(cluster.state, cluster.now).evict == ()


def test_the_youngest_sharer_whose_going_suffices_gives_a_guaranteed_share_back() -> None:
    cluster = Cluster()
    cluster.node("node", 2)
    cluster.project("a", 0)
    cluster.project("b", 1)
    for name, part in (("old", 0.6), ("young", 0.4), ("other", 0.8), ("youngest", 0.1)):
        cluster.submit(name, gpu_fraction=part)
        cluster.run()
    cluster.submit("owner", "b", gpu_fraction=0.3)
    decided = cluster.run()
    assert [e.job for e in decided.evict] == ["other"]
    cluster.run()
    assert cluster.where("owner") == [("node", (1,))]


# CPU, memory, places


def test_a_job_goes_where_cpu_and_memory_are_left_as_well(cluster: Cluster) -> None:
    cluster.node("thin", 8, cpu=1, memory_mib=1024)
    cluster.node("wide", 8, cpu=8, memory_mib=65536)
    cluster.submit("job", gpus=4, gpus_per_worker=1, cpu=2)
    cluster.submit("more", cpu=1, memory_mib=2048)
    cluster.run()
    assert {node for node, _ in cluster.where("job")} == {"wide"}
    assert cluster.where("more") == []
    code, message = cluster.why("more")
    assert code == ReasonCode.NODE_FULL
    assert message.startswith("needs 1 GPU, 1 CPU and 2Gi of memory; ")


def test_a_job_without_gpus_waits_for_cpus_wherever_gpus_are_idle() -> None:
    cluster = Cluster()
    cluster.project("a", 0)
    cluster.node("node", 8, cpu=4)
    cluster.submit("first", gpus=0, cpu=3)
    cluster.submit("second", gpus=0, cpu=2)
    cluster.run()
    assert cluster.why("second")[1].startswith("needs 2 CPUs; at most 1 CPU are left, on node, and")


def test_a_job_that_waits_for_cpu_names_the_workers_that_release_it() -> None:
    cluster = Cluster()
    cluster.node("node", 8, cpu=4)
    cluster.project("a", 0, guaranteed_cpu=0)
    cluster.project("b", 1)
    cluster.submit("borrower", cpu=4)
    cluster.run()
    cluster.submit("owner", "b", cpu=2)
    (nomination,) = plan(cluster.state, cluster.now).nominate
    assert (nomination.job, nomination.waiting_for) == ("owner", ("w1",))
    assert nomination.reason.message == "starts when 1 worker of borrower is gone"


def test_what_no_node_has_is_said_at_once(cluster: Cluster) -> None:
    cluster.node("node", 8, cpu=4, memory_mib=1024)
    cluster.submit("cores", cpu=8)
    cluster.submit("memory", memory_mib=2048)
    cluster.submit("gang", gpus=3, gpus_per_worker=1, cpu=2)
    assert cluster.why("cores")[1] == "needs 1 GPU and 8 CPUs; the largest node that it may use has 4 CPUs"
    assert (
        cluster.why("memory")[1] == "needs 1 GPU and 2Gi of memory; the largest node that it may use has 1Gi of memory"
    )
    assert cluster.why("gang")[1] == "needs 3 GPUs and 6 CPUs; the nodes that it may use have room for 2 such workers"


def test_a_node_takes_so_many_workers_and_no_more(cluster: Cluster) -> None:
    cluster.node("node", 8, max_workers=2)
    for name in ("one", "two", "three"):
        cluster.submit(name)
    cluster.run()
    assert cluster.where("three") == []
    assert cluster.why("three")[0] == ReasonCode.NODE_FULL


def test_quotas_cover_cpu_and_memory() -> None:
    cluster = Cluster()
    cluster.node("node", 8, cpu=16, memory_mib=65536)
    cluster.project("a", 0, guaranteed_cpu=4, limit_cpu=8)
    cluster.project("b", 0, guaranteed_cpu=12)
    cluster.submit("one", cpu=4)
    cluster.submit("two", cpu=4)
    cluster.submit("three", cpu=1)
    cluster.run()
    assert cluster.why("three") == (
        ReasonCode.OVER_LIMIT,
        "needs 1 GPU and 1 CPU; project a holds 8 CPUs of its limit of 8 CPUs, so it starts when it releases 1 CPU or "
        "its limit grows by as much",
    )
    cluster.submit("owner", "b", cpu=12)
    decided = cluster.run()
    assert [e.job for e in decided.evict] == ["two"]
    cluster.run()
    assert cluster.where("owner")


def test_where_nobody_counts_cpu_asking_for_it_bars_nobody() -> None:
    """Nodes do not report how much they have: no fair share of it is too small."""
    cluster = Cluster()
    cluster.node("node", 2)
    cluster.project("a", 0)
    cluster.project("b", 1)
    cluster.submit("borrower", gpus=2, cpu=1000)
    cluster.run()
    cluster.submit("owner", "b", cpu=1000)
    assert [e.job for e in cluster.run().evict] == ["borrower"]


# Nodes


def labelled() -> Cluster:
    cluster = Cluster()
    cluster.project("a", 100)
    cluster.node("a100", 4, labels={"gpu": "A100", "count": "4"})
    cluster.node("h100", 8, labels={"gpu": "H100", "count": "8"})
    cluster.node("kept", 8, labels={"gpu": "H100"}, taints=(Taint("team", TaintEffect.NO_SCHEDULE, "b"),))
    return cluster


def term(key: str, operator: Operator, *values: str) -> NodeTerm:
    return NodeTerm((Requirement(key, operator, values),))


@pytest.mark.parametrize(
    ("fields", "nodes"),
    [
        ({}, {"a100", "h100"}),
        ({"node_selector": {"gpu": "H100"}}, {"h100"}),
        ({"node_affinity": (term("count", Operator.GT, "4"),)}, {"h100"}),
        ({"node_affinity": (term("gpu", Operator.IN, "A100"), term("count", Operator.LT, "9"))}, {"a100", "h100"}),
        ({"tolerations": (Toleration("team", value="b"),)}, {"a100", "h100", "kept"}),
        ({"tolerations": (Toleration("team", value="b"),), "node_selector": {"gpu": "H100"}}, {"h100", "kept"}),
        ({"node": "h100"}, {"h100"}),
        ({"node": "kept"}, set()),
        ({"node_selector": {"gpu": "B200"}}, set()),
    ],
)
def test_workers_run_only_on_nodes_that_admit_them(fields: dict[str, Any], nodes: set[str]) -> None:
    cluster = labelled()
    for i in range(20):
        cluster.submit(f"job-{i:02}", **fields)
    cluster.run()
    assert {node for i in range(20) for node, _ in cluster.where(f"job-{i:02}")} == nodes


def test_it_is_said_that_no_node_admits_a_job() -> None:
    cluster = labelled()
    cluster.submit("selector", node_selector={"gpu": "B200"})
    cluster.submit("tainted", node="kept")
    nowhere = "no node that is ready has the labels it asks for, or none whose taints it tolerates"
    assert cluster.why("selector") == (ReasonCode.NODE_AFFINITY, f"needs 1 GPU; {nowhere}")
    assert cluster.why("tainted")[1] == "needs 1 GPU; node kept does not exist, is not ready, or keeps it off"


def test_victims_are_only_taken_where_the_job_may_run() -> None:
    cluster = labelled()
    cluster.project("b", 4)
    cluster.submit("old", node_selector={"gpu": "A100"}, gpus=4)
    cluster.submit("young", node_selector={"gpu": "H100"}, gpus=8)
    cluster.run()
    cluster.project("a", 0)
    cluster.submit("owner", "b", node_selector={"gpu": "A100"})
    assert [e.job for e in cluster.run().evict] == ["old"]


def test_a_node_that_changes_its_labels_admits_others() -> None:
    cluster = labelled()
    cluster.submit("job", node_selector={"gpu": "B200"})
    cluster.run()
    cluster.node("a100", 4, labels={"gpu": "B200"})
    cluster.run()
    assert [node for node, _ in cluster.where("job")] == ["a100"]
