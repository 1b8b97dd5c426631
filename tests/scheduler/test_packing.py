"""Shared GPUs: a new worker is placed where it leaves the most capacity that others can use."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kfp_gpuquota.scheduler.actions.cycle import Cycle
from kfp_gpuquota.scheduler.placement.packing import Packing
from kfp_gpuquota.scheduler.planner import plan
from kfp_gpuquota.scheduler.state.copying import copied
from tests.scheduler.test_resources import Cluster


def busy() -> Cluster:
    """Two nodes with an idle GPU each, one of them with CPUs to go with it; on a third a GPU is shared."""
    cluster = Cluster()
    cluster.project("a", 100)
    cluster.node("a-rich", 4, cpu=20)
    cluster.node("b-poor", 4, cpu=4)
    cluster.node("c-other", 1, cpu=1)
    for node in ("a-rich", "b-poor"):
        cluster.submit(f"on-{node}", gpus=3, node=node, cpu=1)
    cluster.submit("share", gpu_fraction=0.6, node="c-other", cpu=1)
    cluster.run()
    for i in range(3):
        cluster.submit(f"heavy-{i}", cpu=16, priority=10)
    return cluster


def test_a_job_that_needs_no_cpu_leaves_the_gpu_that_has_some_to_others() -> None:
    cluster = busy()
    cluster.submit("light", priority=60)
    cluster.run()
    assert cluster.where("light")[0][0] == "b-poor"


def test_so_does_a_share() -> None:
    cluster = busy()
    cluster.submit("half", gpu_fraction=0.5, priority=60)
    cluster.run()
    assert cluster.where("half")[0][0] == "b-poor"


def test_a_share_joins_another_where_whole_gpus_are_wanted() -> None:
    cluster = Cluster()
    cluster.project("a", 100)
    cluster.node("a", 2)
    cluster.node("b", 2)
    cluster.submit("first", gpu_fraction=0.4, node="b")
    cluster.submit("wide", gpus=1, node="a")
    cluster.run()
    for i in range(5):
        cluster.submit(f"whole-{i}", gpus=2, priority=10)
    cluster.submit("second", gpu_fraction=0.4, priority=60)
    cluster.run()
    assert cluster.where("second") == cluster.where("first")


def test_a_share_goes_where_those_who_need_a_model_cannot() -> None:
    cluster = Cluster()
    cluster.project("a", 100)
    for name, model in (("a-wanted", "H100"), ("b-other", "T4")):
        cluster.node(name, 2, labels={"gpu": model})
        cluster.submit(f"on-{name}", node=name)
    cluster.run()
    for i in range(3):
        cluster.submit(f"picky-{i}", gpus=1, node_selector={"gpu": "H100"}, priority=10)
    cluster.submit("half", gpu_fraction=0.5, priority=60)
    cluster.run()
    assert cluster.where("half")[0][0] == "b-other"


def test_a_share_moves_into_a_gap_though_larger_ones_that_have_none_are_cheaper_to_try() -> None:
    """Moving twenty small shares would free enough, but no other node has their CPUs; one larger share fits."""
    cluster = Cluster()
    cluster.project("a", 100)
    cluster.node("mobile", 1, cpu=1)
    cluster.submit("moves", gpu_fraction=0.4)
    cluster.submit("stays", gpu_fraction=0.5, preemptible=False)
    cluster.run()
    cluster.node("gap", 1, cpu=1)
    cluster.submit("keeps", gpu_fraction=0.6, node="gap", preemptible=False)
    for i in range(20):
        cluster.node(f"full-{i:02}", 1, cpu=4)
        cluster.submit(f"rest-{i:02}", gpu_fraction=0.55, node=f"full-{i:02}", preemptible=False)
        cluster.submit(f"stuck-{i:02}", gpu_fraction=0.35, cpu=4)
    cluster.run()
    cluster.submit("newcomer", gpu_fraction=0.45)
    cluster.run()
    cluster.run()
    assert cluster.where("moves")[0][0] == "gap"
    assert cluster.where("newcomer")[0][0] == "mobile"


@pytest.mark.parametrize("more", [0, 3])
def test_the_answer_is_the_same_for_a_copy_and_for_another_plan(more: int) -> None:
    cluster = busy()
    for i in range(more):
        cluster.submit(f"share-{i}", gpu_fraction=0.3)
    assert plan(cluster.state, 50.0) == plan(cluster.state, 50.0) == plan(copied(cluster.state), 50.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.3, 0.7, 1.0]), st.integers(1, 9)), min_size=3, max_size=12))
def test_the_order_of_the_running_jobs_does_not_matter(jobs: list[tuple[float, int]]) -> None:
    cluster = Cluster()
    cluster.project("a", 100)
    for number in range(3):
        cluster.node(f"n{number}", 4, cpu=40)
    for number, (share, cpu) in enumerate(jobs):
        cluster.submit(f"j{number}", gpu_fraction=share if share < 1 else None, cpu=cpu)
    cluster.run()
    ledger = cluster.state.ledger
    before = Packing(ledger)._packer._fragments.tolist()
    for queue in ledger.queues.values():
        queue.running = dict(reversed(queue.running.items()))
        queue.waiting = dict(reversed(queue.waiting.items()))
    assert Packing(ledger)._packer._fragments.tolist() == before


def crowded() -> Cycle:
    """Return a full cluster after a plan for a job that needs more CPUs than any node has."""
    cluster = Cluster()
    cluster.project("a", 100)
    for node in ("one", "two"):
        cluster.node(node, 4, cpu=20)
        for part in range(2):
            cluster.submit(f"{node}-{part}", gpu_fraction=0.5, node=node, cpu=1)
    cluster.node("three", 4, cpu=20)
    cluster.submit("wide", gpus=3, node="three", cpu=1)
    cluster.run()
    cluster.submit("large", gpus=2, cpu=64, priority=60)
    cycle = Cycle(copied(cluster.state).ledger)
    cycle.run()
    return cycle


def test_moves_are_not_searched_for_what_no_node_could_hold() -> None:
    cycle = crowded()
    assert not cycle.moves.mobile
    assert not cycle.moves.candidates


def test_the_mix_of_jobs_is_not_counted_for_a_job_that_fits_nowhere_now() -> None:
    cycle = crowded()
    assert cycle.ledger.packing is None
