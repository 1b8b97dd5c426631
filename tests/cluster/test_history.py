"""What is kept of the past is bounded, survives a restart, and adds up."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.api import JobSpec, JobStatus, Node, Phase, Progress, Project
from kfp_gpuquota.api.history import OTHER_USERS, HeldHours, Holder
from kfp_gpuquota.api.wire import NodeView, ProjectView, ShareView
from kfp_gpuquota.cluster.local.storage.history import (
    KEPT_S,
    MEMORY_SAMPLES,
    MOST_HOLDERS,
    MOST_REPORTS,
    MOST_REPORTS_OF_ENDED,
    SAMPLE_S,
    MemoryHistory,
    ReportHistory,
    UsageHistory,
    gpu_hours,
    held_hours,
)
from kfp_gpuquota.cluster.local.storage.store import Store
from kfp_gpuquota.engine.job_book import Change
from kfp_gpuquota.engine.records import JobRecord, with_status

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "state.db")
    yield opened
    opened.close()


def job() -> JobRecord:
    return JobRecord(uid="u", spec=JobSpec(name="j", project="p", command=("c",)), status=JobStatus())


def report(history: ReportHistory, store: Store, before: JobRecord, step: int, **more: object) -> JobRecord:
    after = with_status(before, progress=Progress(step=step, at=float(step), **more))  # type: ignore[arg-type]
    with store.transaction(durable=False):
        history.write(Change(jobs={"u": after}), {"u": before})
    return after


def test_reports_are_thinned_out_evenly_and_never_more_than_the_limit(store: Store) -> None:
    history, record = ReportHistory(store), job()
    for step in range(10 * MOST_REPORTS):
        record = report(history, store, record, step)
        assert len(history.of("u")) <= MOST_REPORTS
        if step % 777 == 0:  # a new daemon
            assert ReportHistory(store).of("u") == history.of("u")
            history = ReportHistory(store)
    steps = [each.step for each in history.of("u")]
    assert steps[0] == 0
    gaps = {after - before for before, after in itertools.pairwise(steps)}
    assert max(gaps) <= 2 * 16
    assert len(steps) >= MOST_REPORTS / 2 - 20


def test_of_a_job_that_has_ended_fewer_reports_are_kept_and_of_a_short_one_all(store: Store) -> None:
    for count in (50, 3 * MOST_REPORTS):
        history, record = ReportHistory(store), job()
        for step in range(count):
            record = report(history, store, record, step)
        with store.transaction():
            history.write(Change(jobs={"u": with_status(record, phase=Phase.SUCCEEDED)}), {"u": record})
        kept = history.of("u")
        assert ReportHistory(store).of("u") == kept
        assert len(kept) == 50 if count == 50 else 50 <= len(kept) <= MOST_REPORTS_OF_ENDED
        with store.transaction():
            store.delete_job("u")


def test_what_a_training_reports_is_bounded(store: Store) -> None:
    history = ReportHistory(store)
    metrics = {f"{i:03}" + "x" * 500: float("nan") if i == 0 else 1.0 for i in range(100)}
    report(history, store, job(), 1, metrics=metrics, not_finite={"loss": "nan"})
    (kept,) = ReportHistory(store).of("u")
    assert len(kept.metrics) == 8
    assert not kept.not_finite
    assert max(map(len, kept.metrics)) == 60
    assert not any(name.startswith("000") for name in kept.metrics)


def test_a_metric_that_is_not_finite_is_kept(store: Store) -> None:
    report(ReportHistory(store), store, job(), 1, metrics={"accuracy": 0.5}, not_finite={"loss": "-inf"})
    (kept,) = ReportHistory(store).of("u")
    assert kept.figures == {"accuracy": 0.5, "loss": float("-inf")}


def test_the_reports_of_a_deleted_job_are_deleted(store: Store) -> None:
    history, record = ReportHistory(store), job()
    report(history, store, record, 1)
    with store.transaction():
        history.write(Change(jobs={"u": None}), {"u": record})
        store.delete_job("u")
    assert history.of("u") == []
    assert ReportHistory(store).of("u") == []


def views(held: float, wanted: float = 0) -> list[ProjectView]:
    project = Project(name="p", guaranteed=2)
    return [ProjectView(project=project, allocated=held, over_quota=max(0, held - 2), requested=wanted)]


def test_usage_is_added_up_by_interval_also_by_the_next_daemon(store: Store) -> None:
    began = 1_000_020.0
    history = UsageHistory(store)
    history.sample(views(9), {}, began)
    history.sample(views(4, 6), {}, began + 10)
    after = UsageHistory(store)
    after.sample(views(9), {}, began + 10)
    after.sample(views(1, 6), {}, began + 20)
    (one,) = store.load_usage(30, 0)
    assert (one.at, one.seconds, one.held, one.borrowed, one.wanted, one.guaranteed) == (1_000_020, 20, 2.5, 1, 6, 2)
    assert [len(store.load_usage(width, 0)) for width in KEPT_S] == [1, 1, 1, 1]


def test_gpu_hours_are_added_up_within_the_guarantee_and_borrowed_for_the_time_asked(store: Store) -> None:
    history, end = UsageHistory(store), 1_008_000.0
    for tick in range(721):  # two hours, of which the second borrows
        history.sample(views(6 if tick > 360 else 2), {}, end - 7200 + tick * SAMPLE_S)
    (all_of_it,) = gpu_hours(store, end, 86_400)
    assert (all_of_it.guaranteed, all_of_it.borrowed, all_of_it.total) == (4.0, 4.0, 8.0)
    (last,) = gpu_hours(store, end, 1800)
    # an interval that began before counts as a whole
    assert (last.guaranteed, last.borrowed, last.total) == pytest.approx((1.0, 2.0, 3.0), abs=0.03)
    assert gpu_hours(store, end + 1e6, 3600) == ()


def test_gpu_hours_of_users_and_types_are_added_up_also_by_the_next_daemon(store: Store) -> None:
    end, eve, bob = 1_008_000.0, Holder("p", "eve", "H100"), Holder("p", "bob", "")
    for half, held in enumerate(({eve: 2.0}, {eve: 1.5, bob: 0.5})):
        history = UsageHistory(store)
        for tick in range(361):
            history.sample(views(4), held, end - 7200 + half * 3600 + tick * SAMPLE_S)
    rows = held_hours(store, end, 86_400)
    assert rows == (
        HeldHours(project="p", user="eve", gpu_type="H100", gpu_hours=3.5),
        HeldHours(project="p", user="bob", gpu_hours=0.5),
    )
    assert [row.gpu_hours for row in held_hours(store, end, 1800)] == pytest.approx([0.75, 0.25], abs=0.01)
    assert held_hours(store, end + 1e6, 3600) == ()


def test_users_beyond_a_bound_are_counted_together_in_their_project(store: Store) -> None:
    history, begin = UsageHistory(store), 1_000_800.0
    users = [Holder("p", f"u{number}", "") for number in range(MOST_HOLDERS + 50)]
    history.sample(views(4), {}, begin)
    for turn, some in enumerate((users[:400], users[400:], users)):
        history.sample(views(4), dict.fromkeys(some, 1.0), begin + (turn + 1) * SAMPLE_S)
    held = store.load_held(86_400, 0)
    assert len(held) <= MOST_HOLDERS + 1
    assert held[Holder("p", OTHER_USERS, "")] == 2 * 50 * SAMPLE_S
    assert held[users[0]] == held[users[MOST_HOLDERS - 1]] == 2 * SAMPLE_S
    assert sum(held.values()) == 2 * len(users) * SAMPLE_S


def test_time_in_which_nothing_was_measured_counts_for_nothing(store: Store) -> None:
    history = UsageHistory(store)
    for now in (1000.0, 1000.0 + 3 * SAMPLE_S, 900.0):
        history.sample(views(4), {}, now)
    assert store.load_usage(30, 0) == []


def test_old_intervals_are_deleted(store: Store) -> None:
    history = UsageHistory(store)
    for now in (1_000_000.0, 1_000_010.0, 1_003_700.0, 1_003_710.0):
        history.sample(views(4), {}, now)
    assert [one.at for one in store.load_usage(30, 0)] == [1_003_710 // 30 * 30]
    assert len(store.load_usage(600, 0)) == 2


def test_memory_is_kept_for_workers_that_run_and_for_some_minutes_only() -> None:
    def look(*workers: str) -> list[NodeView]:
        shares = tuple(
            ShareView(
                worker=worker, job="j", project="p", device=0,
                total_mib=9, used_mib=4, request_mib=3, limit_mib=9, granted_mib=9,
            )
            for worker in workers
        )  # fmt: skip
        return [NodeView(node=Node(name="n", devices=()), held={}, shares=shares)]

    history = MemoryHistory()
    for now in range(2 * MEMORY_SAMPLES):
        history.sample(look("a", "b"), now)
    assert len(history.of("a", 0)) == MEMORY_SAMPLES
    assert history.of("a", 0)[-1] == (2 * MEMORY_SAMPLES - 1, 4)
    history.sample(look("b"), 999)
    assert history.of("a", 0) == ()
    assert len(history.of("b", 0)) == MEMORY_SAMPLES
