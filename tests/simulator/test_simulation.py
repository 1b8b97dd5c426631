"""Traces of a few jobs, whose outcome under each policy can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gpuquota.api.defragmentation import Defragmentation
from kfp_gpuquota.simulator import POLICIES, Result, SimulationOptions, TraceJob, TraceNode, defragmenting, simulate
from kfp_gpuquota.simulator.simulation import guarantees


def node(gpus: int, name: str = "n0") -> TraceNode:
    return TraceNode(name, gpus, cpu_milli=64_000, memory_mib=262_144)


def job(name: str, at: float, lasts: float, gpus: int = 1, project: str = "a", **more: int) -> TraceJob:
    return TraceJob(name, project, float(at), float(lasts), gpus, **more)  # type: ignore[arg-type]


def run(policy: str, nodes: list[TraceNode], jobs: list[TraceJob], **options: object) -> Result:
    return simulate(nodes, jobs, POLICIES[policy], SimulationOptions(clock=perf_counter, **options))  # type: ignore[arg-type]


OVERTAKING = [job("first", 0, 100), job("large", 10, 100, gpus=2), job("small", 20, 10)]


def test_first_come_first_served_lets_nobody_overtake() -> None:
    result = run("fifo", [node(2)], OVERTAKING)
    # large waits for first until 100, small for large until 200
    assert result.completion.max_s == 190
    assert result.waiting["a"].max_s == 180


def test_best_fit_lets_overtake_who_fits() -> None:
    result = run("best-fit", [node(2)], OVERTAKING)
    assert result.waiting["a"].max_s == 90
    assert result.completion.max_s == 190


def test_best_fit_reserves_nothing() -> None:
    jobs = [job("first", 0, 1000), job("large", 10, 100, gpus=2), *(job(f"s{i}", 20, 1000) for i in range(4))]
    waited = run("best-fit", [node(2)], jobs).waiting["a"]
    # the small ones overtake large for 2,000 s more; with a reservation it would start at 1020
    assert waited.max_s == 2990


def test_backfill_lets_overtake_who_delays_nobody() -> None:
    jobs = [*OVERTAKING, job("long", 30, 100)]
    result = run("backfill", [node(2)], jobs)
    # small ends before large can start at 100; long would not, and starts when large has ended
    assert result.waiting["a"].max_s == 170
    assert sorted([result.waiting["a"].mean_s * 4]) == [0 + 90 + 0 + 170]


TWO_TEAMS = {"a": 1, "b": 1}


def test_static_quotas_leave_idle_what_another_team_does_not_use() -> None:
    jobs = [job("one", 0, 100), job("two", 0, 100)]
    static = run("static", [node(2)], jobs, guaranteed=TWO_TEAMS)
    borrowing = run("gpuquota", [node(2)], jobs, guaranteed=TWO_TEAMS)
    assert (static.waiting["a"].max_s, borrowing.waiting["a"].max_s) == (100, 0)


def test_a_guarantee_is_got_back_and_what_was_stopped_goes_on_from_its_checkpoint() -> None:
    jobs = [job("one", 0, 100), job("two", 1, 100), job("owner", 31, 100, project="b")]
    result = run("gpuquota", [node(2)], jobs, guaranteed=TWO_TEAMS, leave_s=0.0, checkpoint_s=20.0)
    # two is the one that loses less: it ran for 30 s and keeps 20, waits for one until 100, and needs 80 s more.
    assert (result.evictions, result.waiting["b"].max_s) == (1, 0)
    assert result.lost_gpu_hours == pytest.approx(10 / 3600)
    assert result.completion.max_s == 179


def test_what_was_reclaimed_for_a_job_starts_no_other_one_while_workers_leave() -> None:
    """Plans forgot what they had promised: the job of a waited for 160 s, and one job was stopped six times for it."""
    sizes = [(60, 100, 4), (80, 100, 1), (140, 30, 1), (200, 300, 2), (205, 300, 1), (225, 300, 2), (285, 30, 1)]
    jobs = [job(f"b{at}", at, lasts, gpus, "b") for at, lasts, gpus in sizes]
    policy = replace(POLICIES["gpuquota"], reserve_after_s=60.0)
    options = SimulationOptions(clock=perf_counter, guaranteed={"a": 4, "b": 4})
    owner = job("owner", 345, 30, gpus=4)
    result = simulate([node(4), node(4, "n1")], [*jobs, owner], policy, options)
    assert (result.evictions, result.waiting["a"].max_s) == (1, 10)


def test_a_job_that_has_run_for_long_is_moved_at_the_cost_of_its_last_checkpoint() -> None:
    """Plans counted all of its work as lost, so the large job waited until it had ended."""
    jobs = [
        job("old", 0, 100_000),
        job("filler", 1, 40_000),
        job("other", 2, 100_000),
        job("large", 45_000, 100, gpus=2),
    ]
    nodes = [node(2), node(2, "n1")]
    assert run("gpuquota", nodes, jobs, guaranteed={"a": 4}, leave_s=0.0).waiting["a"].max_s == 0
    assert run("gpuquota", nodes, jobs, guaranteed={"a": 4}, leave_s=0.0, checkpoint_s=1e9).waiting["a"].max_s > 50_000


def test_a_worker_that_must_go_holds_its_gpu_for_a_while() -> None:
    jobs = [job("one", 0, 100), job("two", 1, 100), job("owner", 30, 100, project="b")]
    result = run("gpuquota", [node(2)], jobs, guaranteed=TWO_TEAMS, leave_s=10.0)
    assert result.waiting["b"].max_s == 10


def test_an_elastic_job_is_done_sooner_with_what_is_idle() -> None:
    jobs = [job("elastic", 0, 100, workers=1, fewest=1, most=2)]
    result = run("gpuquota", [node(2)], jobs, serial=0.0)
    assert result.completion.max_s == 50
    half = run("gpuquota", [node(2)], jobs, serial=0.5)
    assert half.completion.max_s == pytest.approx(75)


def test_an_elastic_job_shrinks_for_a_guarantee_and_loses_no_work() -> None:
    jobs = [job("elastic", 0, 100, workers=1, fewest=1, most=2), job("owner", 20, 1000, project="b")]
    result = run("gpuquota", [node(2)], jobs, guaranteed=TWO_TEAMS, serial=0.0, leave_s=0.0)
    # lent one at once: 40 s of work in the first 20 s, then 60 s more
    assert (result.resizes, result.evictions, result.lost_gpu_hours) == (1, 0, 0)
    assert result.completion.median_s == 1000
    assert result.completion.mean_s == (80 + 1000) / 2


def test_shares_of_a_gpu_are_packed_onto_one() -> None:
    jobs = [job(f"half-{i}", i, 100, milli=500) for i in range(2)] + [job("whole", 5, 100, gpus=1)]
    result = run("best-fit", [node(2)], jobs)
    assert result.waiting["a"].max_s == 0


def test_a_job_goes_only_to_the_models_it_allows() -> None:
    nodes = [node(1), TraceNode("n1", 1, 64_000, 262_144, model="T4")]
    jobs = [TraceJob(f"j{i}", "a", 0.0, 100.0, 1, models=frozenset({"T4"})) for i in range(2)]
    assert run("best-fit", nodes, jobs).waiting["a"].max_s == 100


def test_a_job_that_fits_nowhere_never_starts_and_holds_up_nobody_else() -> None:
    result = run("gpuquota", [node(2)], [job("huge", 0, 10, gpus=4), job("small", 1, 10)])
    assert (result.jobs, result.finished) == (2, 1)


def test_utilisation_is_of_the_time_between_arrivals() -> None:
    jobs = [job("early", 0, 50), job("late", 100, 10)]
    assert run("best-fit", [node(2)], jobs).utilisation_percent == pytest.approx(25)


def test_what_is_idle_and_unusable_counts_as_fragmented() -> None:
    jobs = [job(f"pair-{i}", i, 100, gpus=2) for i in range(2)]
    scattered = [node(1, "n0"), node(1, "n1"), node(2, "n2")]
    assert run("best-fit", scattered, jobs).fragmentation_percent > 90
    assert run("best-fit", [node(4)], jobs).fragmentation_percent == 0


def test_jobs_that_are_moved_in_a_window_leave_a_whole_node_free_and_repeat_some_work() -> None:
    """Two nodes are half full from 100 s on; in the window one job moves, back to its checkpoint."""
    nodes, ends = [node(2, "n0"), node(2, "n1")], [100, 8000, 100, 8000]
    jobs = [*(job(f"j{i}", i, lasts) for i, lasts in enumerate(ends)), job("last", 7000, 1)]
    rule = Defragmentation(window="00:30-01:00", time_zone="UTC")
    options = SimulationOptions(clock=perf_counter, leave_s=0.0, checkpoint_s=600.0)
    plain, moving = (simulate(nodes, jobs, one, options) for one in (POLICIES["gpuquota"], defragmenting(rule)))
    assert (plain.moves, moving.moves) == (0, 1)
    assert plain.free_nodes_percent < 1
    assert moving.free_nodes_percent == pytest.approx(100 * 0.5 * (7000 - 2100) / 7000, abs=1)
    assert 0 < moving.lost_gpu_hours * 3600 < 600
    assert moving.finished == len(jobs)
    none = defragmenting(Defragmentation(window="00:30-01:00", time_zone="UTC", budget_gpu_minutes=0.5))
    assert simulate(nodes, jobs, none, options).moves == 0


def test_what_is_not_given_is_guaranteed_by_the_gpu_time_asked_for() -> None:
    jobs = [job("x", 0, 30), job("y", 0, 10, project="b"), job("z", 0, 1, project="c")]
    assert guarantees([node(10)], jobs, {"c": 2}) == {"a": 6, "b": 2, "c": 2}


jobs_drawn = st.lists(
    st.builds(
        lambda at, lasts, gpus, project, more: (at, lasts, gpus, project, more),
        st.integers(0, 100),
        st.integers(1, 100),
        st.integers(1, 4),
        st.sampled_from("ab"),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=12,
)


@given(jobs_drawn, st.sampled_from(sorted(POLICIES)), st.sampled_from([0.0, 5.0]))
@settings(max_examples=80, deadline=None)
def test_every_job_that_fits_ends_whatever_the_policy(
    drawn: list[tuple[int, int, int, str, int]], policy: str, leave_s: float
) -> None:
    jobs = [
        job(f"j{i}", at, lasts, project=project, workers=gpus, fewest=1 if more else gpus, most=gpus + more)
        for i, (at, lasts, gpus, project, more) in enumerate(sorted(drawn))
    ]
    result = run(policy, [node(4), node(2, "n1")], jobs, guaranteed={"a": 4, "b": 4}, leave_s=leave_s)
    assert result.finished == len(jobs)
    again = run(policy, [node(4), node(2, "n1")], jobs, guaranteed={"a": 4, "b": 4}, leave_s=leave_s)
    assert again == msgspec.structs.replace(result, seconds=again.seconds, slowest_plan_ms=again.slowest_plan_ms)
