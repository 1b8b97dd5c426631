"""Evaluations that all workers share survive the loss of one of them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import elastic_runtime
from elastic_runtime.errors import CollectiveError, LoopError
from elastic_runtime.reduction.gradients import FastReducer
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.sharded_training import whole_state
from tests.elastic_runtime.training import (
    HELD_OUT,
    Gate,
    Plan,
    Points,
    Record,
    evaluated,
    stay_until_killed,
    trained_alone,
)
from tests.forked import preload
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

preload(__name__)


def evaluating(
    plan: Plan,
    index: int,
    directory: Path,
    gate: Gate | None,
    shard: Callable[..., None] | None = None,
    shard_size: int | None = None,
) -> None:
    """Before and after each epoch, and within it after step 5 of each: how many held-out samples all workers together
    have seen.

    `plan.options`: a victim, which stays in the evaluation of step 17 (within an epoch) or 26 (after one), before or
    after it has added its part.
    """
    torch.set_num_threads(1)
    torch.manual_seed(1)
    asked = plan.options
    job = elastic_runtime.init(global_batch_size=16, max_batch_per_gpu=5)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)
    loader: Any = DataLoader(Points(plan.samples), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = job.prepare(
        model, optimizer, loader, scheduler, shard=shard, shard_size=shard_size
    )
    record = Record(job, index, directory, optimizer, dict)
    results = (directory / f"evaluated-{index}.jsonl").open("a", buffering=1)

    def stay(when: str) -> None:
        if gate and (asked.get("victim"), asked.get("when"), asked.get("step")) == (index, when, job.step):
            stay_until_killed(gate, index)

    def evaluate() -> torch.Tensor:
        mine = Points(HELD_OUT).x[job.rank :: job.world_size]
        stay("before")
        with torch.no_grad():
            answers = model(mine)
        seen = torch.tensor([float(len(mine)), answers.sum().item()])
        (torch.distributed.all_reduce if asked.get("own_collective") else job.all_reduce)(seen)
        stay("after")
        found = job.all_gather({"rank": job.rank, "answers": answers})
        assert [each["rank"] for each in found] == list(range(job.world_size))
        torch.testing.assert_close(torch.cat([each["answers"] for each in found]).sum(), seen[1])
        return seen

    def note() -> None:
        count, total = job.repeat(evaluate).tolist()
        results.write(json.dumps({"step": job.step, "count": count, "total": total}) + "\n")

    for _epoch in job.epochs(plan.epochs):
        note()
        for x, y, indices in loader:
            if gate:
                gate.pass_through(index, job.step)
            record.computes(indices)
            job.backward(nn.functional.cross_entropy(model(x), y))
            if job.applied:
                nn.utils.clip_grad_value_(model.parameters(), 1e3)  # which wants gradients
            optimizer.step()
            optimizer.zero_grad()
            if job.applied and job.step % 13 == 4:
                note()
            scheduler.step()
        note()
    state = model.state_dict() if shard is None else whole_state(model)
    torch.save({"model": state, "step": job.step, "lr": scheduler.get_last_lr()}, directory / f"final-{index}.pt")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """(what was trained, what was evaluated) by one undisturbed process."""
    directory = tmp_path_factory.mktemp("alone")
    return trained_alone(evaluating, Plan(), directory), evaluated(directory, 0)


@pytest.mark.parametrize(  # each pair of two values
    ("step", "when", "victim"),
    [(17, "before", 0), (17, "after", 1), (17, "before", 2), (26, "after", 0), (26, "before", 1), (26, "after", 2)],
)
def test_an_evaluation_is_repeated_where_a_worker_is_lost_in_it(
    tmp_path: Path, alone: tuple[dict[str, Any], list[dict[str, float]]], victim: int, when: str, step: int
) -> None:
    plan = replace(Plan(), body=evaluating, options={"victim": victim, "when": when, "step": step})
    with Cluster(tmp_path, plan) as cluster:
        others = cluster.lose_in_evaluation(victim)
        cluster.check_result(alone[0])
    for index in others:
        found = evaluated(tmp_path, index)
        assert [row["step"] for row in found] == [row["step"] for row in alone[1]]
        for ours, expected in zip(found, alone[1], strict=True):
            assert ours["count"] == HELD_OUT
            assert ours["total"] == pytest.approx(expected["total"], rel=1e-3, abs=1e-3)


def test_a_collective_of_the_scripts_own_that_a_loss_breaks_off_is_told_what_to_use(tmp_path: Path) -> None:
    asked = {"victim": 1, "when": "before", "step": 17, "own_collective": True}
    with Cluster(tmp_path, replace(Plan(), body=evaluating, options=asked)) as cluster:
        cluster.start(0, 1)
        cluster.let_go()
        cluster.kill_in_evaluation(1)
        cluster.processes["w0"].join(TIMEOUT_S)
        assert cluster.processes["w0"].exitcode == 1
        assert "only job.all_reduce and job.all_gather are done" in (tmp_path / "log-0").read_text()


def failing_alike(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    """Two workers with shared work that fails each time, although neither is lost."""
    torch.set_num_threads(1)
    job = elastic_runtime.init(global_batch_size=16)
    model = nn.Linear(12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: Any = DataLoader(Points(plan.samples), batch_size=4)
    model, optimizer, loader = job.prepare(model, optimizer, loader)

    def fail() -> None:
        raise CollectiveError("the library refuses this")

    for _epoch in job.epochs(plan.epochs):
        for x, y, _indices in loader:
            if gate:
                gate.pass_through(index, job.step)
            job.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if job.step == 7:
                job.repeat(fail)


def test_work_that_fails_again_and_again_though_no_worker_is_lost_ends_the_training(tmp_path: Path) -> None:
    with Cluster(tmp_path, replace(Plan(), body=failing_alike)) as cluster:
        cluster.start(0, 1)
        cluster.let_go()
        for worker in ("w0", "w1"):
            cluster.processes[worker].join(TIMEOUT_S)
            assert cluster.processes[worker].exitcode == 1
        assert "step 8 5 times in a row, and none of them was lost; the last failure" in cluster.logs()


def missing_a_sum(plan: Plan, index: int, directory: Path, gate: Gate | None, *, nth: int) -> None:
    """In its n-th step the second worker loses what the others have: the end of a sum, with a connection."""
    if index == 1:
        lose_a_sum(nth)
    evaluating(plan, index, directory, gate)


def lose_a_sum(nth: int) -> None:
    original, steps = FastReducer.reduce, itertools.count(1)

    def reduce(self: FastReducer) -> None:
        original(self)
        if next(steps) == nth:
            raise CollectiveError("a peer was lost with the end of the sum")

    FastReducer.reduce = reduce  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("nth", [18, 13, 26, 10], ids=["within-an-epoch", "after-one", "after-two", "elsewhere"])
def test_who_missed_the_sum_that_others_have_applied_meets_them_in_the_evaluation(
    tmp_path: Path, alone: tuple[dict[str, Any], list[dict[str, float]]], nth: int
) -> None:
    plan = replace(Plan(), body=partial(missing_a_sum, nth=nth))
    with Cluster(tmp_path, plan) as cluster:
        cluster.target(0, 1, 2)
        cluster.wait_for_end(0, 1, 2)
        cluster.check_result(alone[0])
        assert [commit.lost_steps for commit in cluster.commits if len(commit.members) == 3][1:]
    for index in range(3):
        found = evaluated(tmp_path, index)
        assert [row["step"] for row in found] == [row["step"] for row in alone[1]]
        assert all(row["count"] == HELD_OUT for row in found)


def test_it_is_not_done_within_a_step() -> None:
    job = elastic_runtime.init(global_batch_size=8, max_batch_per_gpu=4)
    model = nn.Linear(12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.prepare(model, optimizer, DataLoader(Points(50), batch_size=8))
    with pytest.raises(LoopError, match=r"within job\.epochs"):
        job.repeat(lambda: None)
    for x, _y, _i in job.steps(1):
        job.backward(model(x).mean())
        with pytest.raises(LoopError, match=r"where job\.applied, after optimizer\.step"):
            job.repeat(lambda: None)
        optimizer.step()
        optimizer.zero_grad()
    assert job.repeat(lambda: job.all_reduce(torch.tensor(3.0)).item()) == 3.0


def test_what_is_gathered_is_a_copy_and_a_view_comes_without_what_it_is_a_view_of() -> None:
    job = elastic_runtime.init(global_batch_size=8)
    model = nn.Linear(12, 3)
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Points(8), batch_size=8))
    large = torch.arange(1000.0, requires_grad=True)
    given: dict[str, Any] = {"row": large[3:5], "name": "a"}
    (gathered,) = job.all_gather(given)
    assert (gathered["row"].tolist(), gathered["name"]) == ([3.0, 4.0], "a")
    assert gathered["row"].untyped_storage().nbytes() == 8
