"""Evaluations of a sharded training survive the loss of a worker, and its shards, at any of their moments."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

import elastic_runtime
from elastic_runtime.errors import CollectiveError
from elastic_runtime.sharded import files
from elastic_runtime.sharded.mirror import Mirror
from elastic_runtime.sharded.mode import ShardedReducer
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.test_repeat import evaluating
from tests.elastic_runtime.training import (
    HELD_OUT,
    Gate,
    Plan,
    Points,
    evaluated,
    stay_until_killed,
    trained_alone,
)
from tests.forked import preload
from tests.polling import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from elastic_runtime.sharded.state import Parts

preload(__name__)

VICTIM, LAST = 1, 2


def shard(model: nn.Sequential, mesh: DeviceMesh) -> None:
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)


def lost_while_copying(plan: Plan, index: int, directory: Path, gate: Gate | None, *, step: int, nth: int) -> None:
    """The victim stays where it copies its shards before the n-th evaluation of this step, and sends nothing."""
    original, seen = Mirror.begin_round, []

    at = step

    def begin_round(self: Mirror, number: int, step: int, capture: Callable[[], Parts]) -> None:
        seen.extend([step] if step == at else [])
        if gate and index == VICTIM and len(seen) == nth:
            stay_until_killed(gate, index)
        original(self, number, step, capture)

    Mirror.begin_round = begin_round  # type: ignore[method-assign]
    evaluating(plan, index, directory, gate, shard)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """(what was trained, what was evaluated) by one undisturbed process, without shards."""
    directory = tmp_path_factory.mktemp("alone")
    return trained_alone(evaluating, Plan(), directory), evaluated(directory, 0)


@pytest.mark.parametrize(
    ("victim", "when", "step", "shard_size"),
    [
        (0, "before", 17, None),
        pytest.param(2, "after", 26, None, marks=pytest.mark.slow),
        pytest.param(0, "after", 17, 1, marks=pytest.mark.slow, id="replica-groups"),
    ],
)
def test_an_evaluation_is_repeated_where_a_worker_and_its_shards_are_lost_in_it(
    tmp_path: Path,
    alone: tuple[dict[str, Any], list[dict[str, float]]],
    victim: int,
    when: str,
    step: int,
    shard_size: int | None,
) -> None:
    asked = {"victim": victim, "when": when, "step": step}
    body = partial(evaluating, shard=shard, shard_size=shard_size)
    with Cluster(tmp_path, replace(Plan(), body=body, options=asked)) as cluster:
        others = cluster.lose_in_evaluation(victim)
        cluster.check_result(alone[0])
        assert all(commit.lost_steps == 0 for commit in cluster.commits)
    for index in others:
        check_rows(evaluated(tmp_path, index), alone[1])


@pytest.mark.parametrize(
    ("step", "nth"),
    [
        pytest.param(18, 1, id="within-an-epoch"),
        pytest.param(26, 1, id="after-one", marks=pytest.mark.slow),
        pytest.param(26, 2, id="before-one"),
    ],
)
def test_a_loss_while_shards_are_copied_before_an_evaluation_repeats_the_step_before(
    tmp_path: Path, alone: tuple[dict[str, Any], list[dict[str, float]]], step: int, nth: int
) -> None:
    """The evaluation that was asked for has the state of a step earlier, and comes again after that step."""
    check_loss(tmp_path, alone, partial(lost_while_copying, step=step, nth=nth))


@pytest.mark.parametrize(
    "step", [pytest.param(18, id="within-an-epoch", marks=pytest.mark.slow), pytest.param(26, id="after-one")]
)
def test_a_worker_that_is_still_in_the_step_before_the_evaluation_comes_to_it(
    tmp_path: Path, alone: tuple[dict[str, Any], list[dict[str, float]]], step: int
) -> None:
    """It runs to the evaluation without effect, and all train the step again."""
    check_loss(tmp_path, alone, partial(lost_in_the_step_before, step=step))


def check_loss(tmp_path: Path, alone: tuple[dict[str, Any], list[dict[str, float]]], body: Callable[..., None]) -> None:
    plan = replace(Plan(), body=body)
    with Cluster(tmp_path, plan) as cluster:
        others = cluster.lose_in_evaluation(VICTIM)
        cluster.check_result(alone[0])
        assert sum(commit.lost_steps for commit in cluster.commits) >= 1
    for index in others:
        found = evaluated(tmp_path, index)
        assert len(found) > len(alone[1])
        check_rows(list({row["step"]: row for row in found}.values()), list({r["step"]: r for r in alone[1]}.values()))


def lost_in_the_step_before(plan: Plan, index: int, directory: Path, gate: Gate | None, *, step: int) -> None:
    """The last worker has not got the sum of the step before that evaluation, when the victim is lost in it."""
    original, seen = ShardedReducer.reduce, 0

    def reduce(self: ShardedReducer) -> None:
        nonlocal seen
        original(self)
        seen += 1
        if gate and index == LAST and seen == step:
            until(lambda: self._sharding.link.group._interrupt.is_set, lambda: "the loss")
            raise CollectiveError("the sum was lost")

    ShardedReducer.reduce = reduce  # type: ignore[method-assign]
    lost_while_copying(plan, index, directory, gate, step=step, nth=1)


def leaving_the_loop(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    """An evaluation follows an iteration that was left before its backward pass, whose copies are on their way."""
    torch.set_num_threads(1)
    job = elastic_runtime.init(global_batch_size=16)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    loader: Any = DataLoader(Points(plan.samples), batch_size=4)
    model, optimizer, loader = job.prepare(model, optimizer, loader, shard=shard)
    for _epoch in job.epochs(2):
        for x, y, _indices in loader:
            if job.position.index >= 2:
                break
            job.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        assert job.repeat(lambda: job.all_reduce(torch.ones(1)).item()) == job.world_size
    (directory / f"steps-{index}").write_text(str(job.step))


def test_an_evaluation_may_follow_an_iteration_that_was_left(tmp_path: Path) -> None:
    with Cluster(tmp_path, replace(Plan(), body=leaving_the_loop)) as cluster:
        cluster.target(0, 1)
        cluster.wait_for_end(0, 1)
    assert [(tmp_path / f"steps-{index}").read_text() for index in (0, 1)] == ["4", "4"]


def check_rows(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    by_step = {row["step"]: row for row in expected}
    assert {row["step"] for row in found} >= by_step.keys()
    for row in found:
        assert row["count"] == HELD_OUT
        if row["step"] in by_step:
            assert row["total"] == pytest.approx(by_step[row["step"]]["total"], rel=1e-3, abs=1e-3)


def shard_for_bfloat16(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def test_a_state_that_is_saved_after_an_evaluation_in_bfloat16_is_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP leaves the gathered parameters of the outermost module, of another type, until its next backward pass."""
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path))
    for epochs in (1, 2):
        job = elastic_runtime.init(global_batch_size=4, checkpoint_every_s=1e-9)
        model: Any = nn.Linear(12, 3)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(Points(8), batch_size=4)
        model, optimizer, loader = job.prepare(model, optimizer, loader, shard=shard_for_bfloat16)
        for _epoch in job.epochs(epochs):
            for x, _y, _indices in loader:
                assert job.step > 0 or epochs == 1
                if job.step > 0:
                    until(lambda: files.whole_ones(str(tmp_path)), "a checkpoint of step 1")
                job.backward(model(x).float().mean())
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model(x)
        assert job.step == 2 * epochs
