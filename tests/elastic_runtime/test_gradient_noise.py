"""The gradient noise scale, and the learning rates, schedules and lengths that follow the gain of a batch."""

from __future__ import annotations

import itertools
import json
import math
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.utils.data import DataLoader

import elastic_runtime
from elastic_runtime.errors import SettingsError, UsageError
from elastic_runtime.plan.batches import micro_batches
from elastic_runtime.reduction.gradient_noise import LEAST, Averages, squared_norm
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.training import Gate, Plan, Points, tokens_of, trained_alone

if TYPE_CHECKING:
    from pathlib import Path

DATA = Points(160)
DATA.y = DATA.x[:, :3].argmax(1)  # there is something to learn: the noise does not hide the gradient
FREEDOM = st.integers(1, 64)


# The estimates


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 1, 1)])
def test_both_estimates_are_right_on_average_over_every_batch_that_can_be_drawn(sizes: tuple[int, ...]) -> None:
    """The oracle: a sample's gradient is one of three vectors, and all batches of them are enumerated."""
    gradients = torch.tensor([[1.0, 0.0], [4.0, -1.0], [-2.0, 3.0]], dtype=torch.float64)
    mean, batch = gradients.mean(0), sum(sizes)
    variances, signals = [], []
    for drawn in itertools.product(range(3), repeat=batch):
        parts = [part.mean(0) for part in torch.split(gradients[list(drawn)], list(sizes))]
        of_parts = sum(size / batch * float(part.square().sum()) for size, part in zip(sizes, parts, strict=True))
        of_whole = float(gradients[list(drawn)].mean(0).square().sum())
        found = Averages().with_step(batch, len(sizes), of_parts, of_whole)
        variances.append(found.variance)
        signals.append(found.signal)
    weight = (1 - math.exp(-(len(sizes) - 1) / LEAST)) * len(variances)
    assert sum(variances) / weight == pytest.approx(float((gradients - mean).square().sum()) / 3)
    assert sum(signals) / weight == pytest.approx(float(mean.square().sum()))


@given(variance=st.floats(0, 1e6), signal=st.floats(-1e6, 1e6), batch=FREEDOM, base=FREEDOM)
def test_the_gain_lies_between_one_and_the_ratio_of_the_batches(
    variance: float, signal: float, batch: int, base: int
) -> None:
    gain = Averages(variance, signal, LEAST).gain(batch, base)
    assert min(1, batch / base) - 1e-9 <= gain <= max(1, batch / base) + 1e-9


def test_the_gain_is_that_of_adascale_and_cautious_while_nothing_is_known() -> None:
    assert Averages(30.0, 1.0, LEAST).gain(40, 10) == pytest.approx((3 + 1) / (3 / 4 + 1))
    assert [Averages(30.0, 1.0, LEAST - 1).gain(batch, 10) for batch in (5, 10, 40)] == [0.5, 1.0, 1.0]
    assert Averages(30.0, 1.5, LEAST).noise_scale == 20
    assert Averages(30.0, -0.1, LEAST).noise_scale is None
    assert Averages(30.0, 1.5, LEAST - 1).noise_scale is None


def test_the_norm_of_coarse_and_of_complex_gradients_is_not_rounded() -> None:
    coarse = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    pairs = torch.complex(torch.ones(3), 2 * torch.ones(3))
    exact = float(coarse.double().square().sum())
    assert squared_norm([coarse]) == pytest.approx(exact, rel=1e-5)
    assert squared_norm([pairs, torch.ones(1)]) == pytest.approx(16)


# Jobs


def prepared(scaler: Any = None, optimizer: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    job = elastic_runtime.init(**{"global_batch_size": 16, "max_batch_per_gpu": 5, "noise_scale": True} | options)
    model = nn.Linear(12, 3).to(dtype)
    made = optimizer(model) if optimizer else torch.optim.SGD(model.parameters(), lr=0.0)
    schedule = torch.optim.lr_scheduler.StepLR(made, 1, 0.99)
    loader = DataLoader(DATA, batch_size=16)
    return job, *job.prepare(model, made, loader, schedule, scaler=scaler)


def expected(parts: list[tuple[int, int]], *, tokens: bool, dtype: torch.dtype = torch.float32) -> float:
    """Return the noise scale of 20 steps of 16 samples, by the formula and autograd."""
    torch.manual_seed(0)
    model, found = nn.Linear(12, 3).to(dtype), Averages()
    for step in range(20):
        start = 16 * (step % 10)
        weights, gradients = [], []
        for first, last in parts:
            at = torch.arange(start + first, start + last)
            losses = nn.functional.cross_entropy(model(DATA.x[at].to(dtype)).float(), DATA.y[at], reduction="none")
            weight = tokens_of(at) if tokens else torch.ones(len(at))
            loss = (losses * weight).sum() / weight.sum()
            gradient = torch.autograd.grad(loss, list(model.parameters()))
            weights.append(float(weight.sum()))
            gradients.append(torch.cat([each.double().flatten() for each in gradient]))
        share = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        of_parts = sum(float(w * g.square().sum()) for w, g in zip(share, gradients, strict=True))
        whole = sum(w * g for w, g in zip(share, gradients, strict=True))
        found = found.with_step(16, len(parts), of_parts, float(whole.square().sum()))
    assert found.noise_scale is not None
    return found.noise_scale


UNEVEN = [(each.start, each.stop) for each in micro_batches(16, 0, 1, 7)]  # 6, 5, 5
EIGHT = [(at, at + 2) for at in range(0, 16, 2)]


@pytest.mark.parametrize(
    ("options", "parts", "tokens", "scaled", "dtype"),
    [
        ({"max_batch_per_gpu": 7}, UNEVEN, False, False, torch.float32),
        ({"max_batch_per_gpu": 7}, UNEVEN, True, False, torch.float32),
        ({"max_batch_per_gpu": 7}, UNEVEN, False, True, torch.float32),
        ({"max_batch_per_gpu": 7}, UNEVEN, False, False, torch.bfloat16),
        ({"reduction": "exact"}, EIGHT, False, False, torch.float32),
    ],
    ids=["uneven", "tokens", "scaler", "half", "exact"],
)
def test_a_job_measures_what_the_gradients_of_its_parts_are(
    options: dict[str, Any], parts: list[tuple[int, int]], tokens: bool, scaled: bool, dtype: torch.dtype
) -> None:
    """With gradients that the script clips; the loss scale grows meanwhile."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=7) if scaled else None
    job, model, optimizer, loader, _ = prepared(scaler, dtype=dtype, **options)
    try:
        for _epoch in job.epochs(2):
            for x, y, indices in loader:
                losses = nn.functional.cross_entropy(model(x.to(dtype)).float(), y, reduction="none")
                weight = tokens_of(indices) if tokens else torch.ones(len(x))
                loss = (losses * weight).sum() / weight.sum()
                job.backward(loss, weight=float(weight.sum()) if tokens else None)
                if scaler:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                if scaler:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                optimizer.zero_grad()
    finally:
        torch.use_deterministic_algorithms(mode=False)
    tolerance = 0.05 if dtype is torch.bfloat16 else 1e-4  # autograd's gradients of the parts are rounded there
    assert job.noise_scale == pytest.approx(expected(parts, tokens=tokens, dtype=dtype), rel=tolerance)
    assert (job.gain, job.scaled_steps) == (1.0, 20.0)
    other = prepared(torch.amp.GradScaler("cpu") if scaled else None, dtype=dtype, **options)[0]
    other._state.load(job._state.capture())
    assert (other.noise_scale, other.scaled_steps) == (job.noise_scale, 20.0)
    other._state.load({**job._state.capture(), "noise": None})  # of a training that did not measure it
    assert (other.noise_scale, other.scaled_steps) == (None, 20.0)


def test_a_step_that_is_not_finite_or_skipped_is_not_measured_and_counts() -> None:
    found = []
    for broken in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        job, model, optimizer, loader, _ = prepared(scaler)
        for _epoch in job.epochs(2):
            for number, (x, y, _) in enumerate(loader):
                kind = 0 if not broken or job.step < 15 else number // 4 % 3
                if kind == 1:
                    job.skip()
                else:
                    job.backward(nn.functional.cross_entropy(model(x), y) * (math.inf if kind == 2 else 1.0))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        found.append(job.noise_scale)
        assert job.scaled_steps == 20
    assert found[1] is not None


@pytest.mark.parametrize("skips", [False, True])
def test_a_training_whose_weights_are_not_numbers_ends(*, skips: bool) -> None:
    """A plain loop of so many steps ends, too."""
    job, model, optimizer, *_ = prepared(scale_batch=(1, 64), scale_lr="adascale", noise_scale=False)
    nn.init.constant_(next(model.parameters()), math.nan)
    for x, y, _ in itertools.islice(job.steps(5), 200):
        if skips:
            job.skip()
        else:
            job.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    assert job.step == 5


def test_one_micro_batch_in_a_step_measures_nothing() -> None:
    job, model, optimizer, loader, _ = prepared(max_batch_per_gpu=None)
    for _epoch in job.epochs(3):
        for x, y, _ in loader:
            job.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    assert (job.noise_scale, job.gain, job.scaled_steps) == (None, 1.0, 30.0)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_gain_scales_the_learning_rate_advances_the_schedule_and_ends_the_training(kind: Any) -> None:
    """A batch of 16, where the learning rate is for 8: each step is worth between one and two."""
    rates: list[float] = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = kind(model.parameters(), lr=1e-3)
        made.register_step_pre_hook(lambda found, *_: rates.append(found.param_groups[0]["lr"]))
        return made

    scale: dict[str, Any] = {"scale_batch": (1, 64), "scale_lr": "adascale", "noise_scale": False}
    job, model, made, _loader, schedule = prepared(optimizer=optimizer, global_batch_size=8, **scale)
    gains, total = [], 0.0
    for x, y, _ in job.steps(30):
        job.backward(nn.functional.cross_entropy(model(x), y))
        before = made.param_groups[0]["lr"]
        made.step()
        if job.applied:
            gains.append(job.gain)
            total += job.gain
            factor = job.gain if kind is torch.optim.SGD else math.sqrt(job.gain)
            assert rates[-1] == pytest.approx(before * factor)
            assert made.param_groups[0]["lr"] == before
        schedule.step()
        assert schedule.last_epoch == math.floor(total)
        made.zero_grad()
    assert all(1 <= gain <= 2 for gain in gains)
    assert gains[0] == 1 < gains[-1]
    assert total - gains[-1] < 30 <= total == pytest.approx(job.scaled_steps)
    assert job.step == len(gains) < 30


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_lr": "adascale"}, "give scale_batch"),
        ({"noise_scale": True, "shard": lambda model, _mesh: model}, "noise_scale=True .* and shard= exclude"),
    ],
)
def test_options_that_exclude_the_measurement_are_named(options: dict[str, Any], message: str) -> None:
    shard = options.pop("shard", None)
    model = nn.Linear(12, 3)
    with pytest.raises(SettingsError, match=message):
        elastic_runtime.init(global_batch_size=8, **options).prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(DATA, batch_size=8), shard=shard
        )


@pytest.mark.parametrize("what", ["sum", "more", "gather_batch"])
def test_what_cannot_be_measured_is_refused_by_name(what: str) -> None:
    job, model, _optimizer, loader, _ = prepared(max_batch_per_gpu=None)
    named = {"sum": "a loss that is a sum", "more": "more=True", "gather_batch": "job.gather_batch"}
    with pytest.raises(UsageError, match=f"{named[what]}.* excludes noise_scale=True"):  # noqa: PT012
        for _epoch in job.epochs(1):
            for x, _y, _ in loader:
                output = job.gather_batch(model(x)) if what == "gather_batch" else model(x)
                job.backward(output.mean(), reduction="sum" if what == "sum" else "mean", more=what == "more")


def test_sparse_gradients_are_refused_by_name() -> None:
    job = elastic_runtime.init(global_batch_size=8, noise_scale=True)
    model = nn.Embedding(10, 3, sparse=True)
    with pytest.raises(UsageError, match="sparse=True, whose gradients noise_scale=True"):
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(DATA, batch_size=8))


# Several workers


def train_measured(plan: Plan, index: int, directory: Path, gate: Gate | None) -> None:
    """Write down the measurement of each applied step."""
    torch.manual_seed(1)
    job = elastic_runtime.init(global_batch_size=plan.global_batch, max_batch_per_gpu=plan.max_batch, **plan.options)
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = job.prepare(model, optimizer, DataLoader(DATA, batch_size=plan.global_batch))
    with (directory / f"noise-{index}.jsonl").open("a", buffering=1) as file:
        for _epoch in job.epochs(plan.epochs):
            for x, y, _ in loader:
                if gate:
                    gate.pass_through(index, job.step)
                job.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if job.applied:
                    file.write(json.dumps([job.step, job.noise_scale, job.scaled_steps]) + "\n")
    torch.save({"model": model.state_dict()}, directory / f"final-{index}.pt")


def measured(directory: Path) -> list[dict[int, tuple[float | None, float]]]:
    """Return, by worker, what it has measured by each step."""
    paths = sorted(directory.glob("noise-*.jsonl"))
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    return [{step: (noise, scaled) for step, noise, scaled in of_worker} for of_worker in rows]


def test_workers_measure_the_same_as_one_alone_through_a_growth_and_a_loss(tmp_path: Path) -> None:
    """With micro-batches of 4 the parts of a step of 16 are the same at one worker and at two."""
    plan = Plan(epochs=4, max_batch=4, options={"noise_scale": True}, body=train_measured)
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, step=9)
        cluster.resize(0, 1, up_to=20)
        cluster.wait_until_at(20, 0, 1)
        cluster.kill("w0")
        cluster.let_go()
        cluster.wait_for_end(1)
        first, second = measured(tmp_path)
        reports = [report for report in cluster.progress if report.noise_scale is not None]
    trained_alone(train_measured, plan, tmp_path / "alone")
    (alone,) = measured(tmp_path / "alone")
    assert set(first) == set(range(20))
    assert max(second) == 39
    assert {step: second[step] for step in second if step in first} == {s: first[s] for s in first if s in second}
    for step, (noise, scaled) in (first | second).items():
        assert noise == (None if alone[step][0] is None else pytest.approx(alone[step][0], rel=1e-3)), step
        assert scaled == alone[step][1] == step, step
    assert all(report.batch_size == 16 and report.metrics["gain"] == 1.0 for report in reports)
    assert reports[-1].noise_scale == pytest.approx(alone[39][0], rel=0.2)
