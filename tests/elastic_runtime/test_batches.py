"""Losses that are means, sums or token-weighted; steps that do not fit into memory; steps that follow the workers."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.utils.data import DataLoader

import elastic_runtime
from elastic_runtime.errors import BatchPlanError, LoopError, SettingsError, UsageError
from elastic_runtime.plan.batch_sizes import GlobalBatch, MicroBatchLimit
from elastic_runtime.reduction.buffers import FollowedBuffers
from elastic_runtime.reduction.step_metadata import Share, StepMetadata
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.training import Plan, Points, tokens_of, train

if TYPE_CHECKING:
    from pathlib import Path

DATA = Points(50)


def prepared(samples: int = 50, batch: int = 8, **options: Any) -> tuple[Any, nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    job = elastic_runtime.init(global_batch_size=batch, **options)
    model = nn.Linear(12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.utils.data.Subset(DATA, range(samples)), batch_size=batch)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    return job, model, optimizer, loader


def gradient_of_one_step(kind: str, max_batch: int | None) -> torch.Tensor:
    job, model, _optimizer, loader = prepared(samples=8, max_batch_per_gpu=max_batch)
    for _epoch in job.epochs(1):
        for x, y, indices in loader:
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
            tokens = tokens_of(indices)
            if kind == "tokens":
                job.backward((losses * tokens).sum() / tokens.sum(), weight=float(tokens.sum()))
            else:
                job.backward(losses.sum() if kind == "sum" else losses.mean(), reduction=kind)
    assert isinstance(model.weight.grad, torch.Tensor)
    return model.weight.grad


def expected(kind: str) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(12, 3)
    losses = nn.functional.cross_entropy(model(DATA.x[:8]), DATA.y[:8], reduction="none")
    tokens = tokens_of(torch.arange(8))
    loss = {"mean": losses.mean(), "sum": losses.sum(), "tokens": (losses * tokens).sum() / tokens.sum()}[kind]
    loss.backward()  # type: ignore[no-untyped-call]
    assert isinstance(model.weight.grad, torch.Tensor)
    return model.weight.grad


@pytest.mark.parametrize("max_batch", [None, 3])
@pytest.mark.parametrize("kind", ["mean", "sum", "tokens"])
def test_a_loss_of_any_kind_gives_the_gradient_of_the_whole_batch(kind: str, max_batch: int | None) -> None:
    torch.testing.assert_close(gradient_of_one_step(kind, max_batch), expected(kind), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weighting", ["sum", "tokens"])
def test_three_workers_weight_losses_as_one_does(tmp_path: Path, weighting: str) -> None:
    plan = Plan(epochs=1, max_batch=3, weighting=weighting)
    with Cluster(tmp_path, plan) as cluster:
        cluster.target(0, 1, 2)
        cluster.wait_for_end(0, 1, 2)
        alone = tmp_path / "alone"
        alone.mkdir()
        train(plan, 0, alone, None)
        cluster.check_result(torch.load(alone / "final-0.pt"))


def backward_with(arguments: list[dict[str, Any]]) -> None:
    """One step of as many iterations."""
    job, model, _, _loader = prepared(max_batch_per_gpu=8 // len(arguments))
    for (x, _y, _i), keywords in zip(job.steps(1), arguments, strict=False):
        job.backward(model(x).mean(), **keywords)


@pytest.mark.parametrize("wrong", [{"weight": -1.0}, {"weight": 2.0, "reduction": "sum"}, {"reduction": "median"}])
def test_what_a_weight_cannot_be_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"job\.backward got"):
        backward_with([wrong])


@pytest.mark.parametrize("second", [{}, {"reduction": "sum"}])
def test_a_step_has_losses_of_one_kind(second: dict[str, Any]) -> None:
    with pytest.raises(LoopError, match="in one iteration of a step and a weighted one in another"):
        backward_with([{"weight": 1.0}, second])


@given(weights=st.lists(st.integers(0, 1 << 30), min_size=1, max_size=8))
def test_whole_weights_are_added_up_exactly(weights: list[int]) -> None:
    of_workers = [StepMetadata(FollowedBuffers([])) for _ in weights]
    sections = [torch.zeros(metadata.size) for metadata in of_workers]
    for metadata, section, weight in zip(of_workers, sections, weights, strict=True):
        metadata.fill(section, Share(1, weight=weight), leader=False)
    of_workers[0].take(torch.stack(sections).sum(0), keeps=False, samples=len(weights), workers=len(weights))
    assert of_workers[0].weight == sum(weights)


class Hungry(nn.Linear):
    """Has memory for so many samples, in its forward or its backward pass."""

    def __init__(self, capacity: int, where: str) -> None:
        super().__init__(12, 3)
        self.capacity, self.where, self.failures = capacity, where, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        if self.where == "forward":
            self.check(len(x))
        elif y.requires_grad:
            y.register_hook(lambda _: self.check(len(x)))  # type: ignore[no-untyped-call]
        return y

    def check(self, size: int) -> None:
        if size > self.capacity:
            self.failures += 1
            raise torch.OutOfMemoryError(f"{size} samples")


def train_hungry(capacity: int, where: str) -> tuple[dict[str, torch.Tensor], list[int], Hungry]:
    torch.manual_seed(0)
    job = elastic_runtime.init(global_batch_size=16, max_batch_per_gpu="auto")
    model, sizes = Hungry(capacity, where), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = job.prepare(model, optimizer, DataLoader(DATA, batch_size=16))
    for _epoch in job.epochs(2):
        for x, y, _i in loader:
            with job.retrying() if where == "forward" else nullcontext():
                job.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                sizes.append(len(x))
    return model.state_dict(), sizes, model


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_does_not_fit_into_memory_is_repeated_in_halves(where: str) -> None:
    roomy, _, _ = train_hungry(16, where)
    tight, sizes, model = train_hungry(5, where)
    assert model.failures == 2  # 16, then 8; 4 fits, and is remembered
    assert max(sizes[2:]) == 4
    for name, value in roomy.items():
        torch.testing.assert_close(tight[name], value, rtol=1e-5, atol=1e-6)


def test_one_sample_that_does_not_fit_ends_the_training() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train_hungry(0, "backward")
    assert "an iteration of one sample does not fit into memory" in caught.value.__notes__


def test_a_worker_without_memory_makes_the_others_wait_not_end(tmp_path: Path) -> None:
    plan = Plan(epochs=1, max_batch=None, capacities=(100, 3, 100))
    with Cluster(tmp_path, plan) as cluster:
        cluster.target(0, 1, 2)
        cluster.wait_for_end(0, 1, 2)
        rows = [json.loads(line) for line in (tmp_path / "report-1.jsonl").read_text().splitlines()]
        assert {(row["samples"], row["max_batch"]) for row in rows if row["event"] == "out_of_memory"} == {(5, 2)}
        alone = tmp_path / "alone"
        alone.mkdir()
        train(replace(plan, capacities=()), 0, alone, None)
        cluster.check_result(torch.load(alone / "final-0.pt"))


@given(failed=st.integers(2, 500), allowed=st.none() | st.integers(1, 500))
def test_a_halved_limit_is_smaller_than_what_failed(failed: int, allowed: int | None) -> None:
    limit = MicroBatchLimit(allowed)
    assert limit.halve(failed)
    assert limit.now is not None
    assert 1 <= limit.now < failed


def test_the_batch_follows_the_workers_and_the_learning_rate_follows_the_batch() -> None:
    batch = GlobalBatch(64, 32, (48, 200), "linear")
    assert [batch.at(n) for n in (1, 2, 4, 8)] == [48, 64, 128, 200]
    assert batch.lr_factor(4) == 2
    assert GlobalBatch(64, 32, (48, 200), "sqrt").lr_factor(4) == math.sqrt(2)


def test_a_job_whose_batch_follows_its_size_trains_each_sample_once(tmp_path: Path) -> None:
    plan = Plan(epochs=2, options={"scale_batch": (4, 40)}, loader_batch=8)
    with Cluster(tmp_path, plan) as cluster:
        cluster.hold_at(5)
        cluster.target(0)
        cluster.wait_until_at(5, 0)
        for joiner, step in ((1, 7), (2, 9)):
            cluster.target(*range(joiner + 1))
            cluster.wait_until_prepared(*range(joiner + 1))
            cluster.hold_at(step)
            cluster.wait_until_at(step, *range(joiner + 1))
        cluster.kill("w0")
        cluster.let_go()
        cluster.wait_for_end(1, 2)
        sizes = {step: len(samples) for step, samples in cluster.consumed().items()}
        assert {8, 24, 16} <= set(sizes.values())
        seen = sorted(i for samples in cluster.consumed().values() for i in samples)
        assert seen == sorted([*range(plan.samples)] * 2)


def test_the_scaled_learning_rate_is_the_optimizers_alone() -> None:
    job = elastic_runtime.init(global_batch_size=16, scale_batch=(1, 64))
    model = nn.Linear(12, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _loader = job.prepare(model, optimizer, DataLoader(DATA, batch_size=8))
    for x, _y, _i in job.steps(1):
        before = model.weight.detach().clone()
        job.backward(model(x).sum() / len(x))
        optimizer.step()
        assert model.weight.grad is not None
        torch.testing.assert_close(model.weight, before - 0.05 * model.weight.grad)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_batch": (8, 4)}, "must be .least, most."),
        ({"scale_batch": (1, 64), "reduction": "exact"}, "exclude each other"),
        ({"max_batch_per_gpu": "auto", "reduction": "exact", "global_batch_size": 8}, "cannot be 'auto'"),
        ({"max_batch_per_gpu": "most", "global_batch_size": 8}, "max_batch_per_gpu is 'most'"),
    ],
)
def test_batches_that_cannot_be_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchPlanError, match=message):
        elastic_runtime.init(**options)


def test_a_rule_that_is_not_known_is_named() -> None:
    with pytest.raises(SettingsError, match="scale_lr is 'cubic'"):
        elastic_runtime.init(scale_lr="cubic")  # type: ignore[arg-type]
