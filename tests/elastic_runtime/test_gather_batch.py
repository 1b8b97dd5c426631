"""job.gather_batch and SyncBatchNorm: the whole global batch counts, whatever the workers' shares are."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import elastic_runtime
from elastic_runtime.errors import LoopError, UsageError
from elastic_runtime.loop.sync_batch_norm import combine
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.training import Plan
from tests.elastic_runtime.zoo import driver
from tests.elastic_runtime.zoo.parts import SCRIPTS, flat, vectors
from tests.forked import preload

if TYPE_CHECKING:
    from pathlib import Path

    from tests.elastic_runtime.training import Gate

preload(__name__)


def train_whole(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    with driver.recording(index, directory, gate) as sessions:
        model = flat(SCRIPTS[str(plan.options["script"])].body(global_batch_size=plan.global_batch))
        torch.save({"model": model, "step": sessions[-1].position.step}, directory / f"final-{index}.pt")


@pytest.mark.parametrize("global_batch", [10, 2], ids=["uneven shares", "workers without a sample"])
@pytest.mark.parametrize("script", ["language_image_pairs_over_the_whole_batch", "normalisation_over_the_whole_batch"])
def test_three_workers_train_what_one_trains(global_batch: int, script: str, tmp_path: Path) -> None:
    plan = Plan(body=train_whole, global_batch=global_batch, options={"script": script})
    (tmp_path / "alone").mkdir()
    train_whole(plan, 0, tmp_path / "alone", None)
    expected = torch.load(tmp_path / "alone" / "final-0.pt")
    (tmp_path / "three").mkdir()
    with Cluster(tmp_path / "three", plan) as cluster:
        cluster.start(0, step=2)
        cluster.resize(0, 1, up_to=5)
        cluster.wait_until_at(5, 0, 1)
        cluster.resize(0, 1, 2, up_to=8)
        cluster.let_go()
        cluster.wait_for_end(0, 1, 2)
        found = cluster.finals()["final-0"]
    assert found["step"] == expected["step"]
    for name, value in expected["model"].items():
        torch.testing.assert_close(found["model"][name], value, rtol=2e-3, atol=2e-4, msg=name)


def test_what_is_gathered_must_have_a_row_for_each_sample() -> None:
    job, model = elastic_runtime.init(), nn.Linear(8, 3)
    model, _optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())
    with pytest.raises(LoopError, match=r"job\.gather_batch comes in an iteration"):
        job.gather_batch(torch.zeros(12, 2))
    for _epoch in job.epochs(1):
        for x, _ in loader:
            with pytest.raises(UsageError, match=r"shape \(24, 8\) in an iteration with 12 samples"):
                job.gather_batch(torch.cat([x, x]))
            with pytest.raises(UsageError, match=r"cannot exchange torch\.bool"):
                job.gather_batch(x > 0)
            assert torch.equal(job.gather_batch(x), x)
            assert job.batch_start == 0
            job.backward(model(x).sum())
            with pytest.raises(LoopError, match=r"before job\.backward"):
                job.gather_batch(x)
            break
        break


def test_synchronized_normalization_alone_is_batch_norm_and_a_copy_takes_no_part() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.SyncBatchNorm(4))
    plain = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    plain.load_state_dict(model.state_dict())
    job = elastic_runtime.init()
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())
    for _epoch in job.epochs(1):
        for x, _ in loader:
            assert torch.equal(model(x), plain(x))
            assert torch.equal(copy.deepcopy(model)(x), plain(x))
            job.backward(model(x).sum())
            optimizer.step()
            break
        break
    job.close()
    assert type(model[1]) is nn.SyncBatchNorm


def test_statistics_of_shares_combine_to_those_of_all_values() -> None:
    values = torch.randn(10, 3, dtype=torch.float64)
    rows = []
    for share in (values[:7], values[7:], values[:1]):
        variance, mean = torch.var_mean(share, 0, correction=0)
        weight = torch.tensor([0.0 if len(share) == 1 else float(len(share))], dtype=torch.float64)
        rows.append(torch.cat([mean, variance, weight]))
    mean, variance, number = combine(torch.stack(rows))
    torch.testing.assert_close(mean, values.mean(0))
    torch.testing.assert_close(variance, values.var(0, correction=0))
    assert number == 10


def test_an_iteration_is_not_skipped_where_all_workers_gather() -> None:
    job, model = elastic_runtime.init(), nn.Linear(8, 3)
    model, _optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors())
    for _epoch in job.epochs(1):
        for x, _ in loader:
            job.gather_batch(model(x))
            with pytest.raises(LoopError, match=r"call job\.backward\(loss, weight=0\.0\)"):
                job.skip()
            break
        break
