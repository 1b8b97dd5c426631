"""job.gather_batch: rows of the whole global batch, whatever the workers' shares are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import elastic_runtime
from elastic_runtime.errors import LoopError, UsageError
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.training import Plan
from tests.elastic_runtime.zoo import driver
from tests.elastic_runtime.zoo.contrastive import pair_of_towers
from tests.elastic_runtime.zoo.parts import flat, vectors

if TYPE_CHECKING:
    from pathlib import Path

    from tests.elastic_runtime.training import Gate


def train_pairs(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    with driver.recording(index, directory, gate) as sessions:
        model = flat(pair_of_towers(global_batch_size=plan.global_batch))
        torch.save({"model": model, "step": sessions[-1].position.step}, directory / f"final-{index}.pt")


@pytest.mark.parametrize("global_batch", [10, 2], ids=["uneven shares", "workers without a sample"])
def test_three_workers_train_what_one_trains(global_batch: int, tmp_path: Path) -> None:
    plan = Plan(body=train_pairs, global_batch=global_batch)
    (tmp_path / "alone").mkdir()
    train_pairs(plan, 0, tmp_path / "alone", None)
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
