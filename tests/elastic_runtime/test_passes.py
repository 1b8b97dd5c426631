"""Several backward passes in an iteration, and iterations that count for nothing."""

from __future__ import annotations

import os
import runpy
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import elastic_runtime
from elastic_runtime.errors import LoopError, UsageError
from tests.effort import soaked
from tests.elastic_runtime.adversarial import train_adversaries
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.training import FEATURES, Plan, Points, Record, trained_alone
from tests.forked import preload
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

preload(__name__)

PLAN = Plan(epochs=2, max_batch=None, body=train_adversaries)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one undisturbed process gets, where torch adds the passes up itself."""
    return trained_alone(train_adversaries, PLAN, tmp_path_factory.mktemp("reference"))


@pytest.mark.slow
@soaked
def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    runpy.run_path("examples/train_gan.py", run_name="__main__")
    torch.set_num_threads(threads)
    off = [float(line.split()[2]) for line in capsys.readouterr().out.splitlines()]
    assert off[-1] < off[0] / 2


def test_each_pass_is_summed_by_itself_and_gradients_add_up_over_them(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    with Cluster(tmp_path, PLAN) as cluster:
        cluster.start(0, 1)
        cluster.grow_lose_the_first_and_end()
        cluster.check_result(reference)


def train_quasi_newton(plan: Plan, index: int, directory: Path, gate: Any, *, dies: tuple[int, int] = (-1, -1)) -> None:
    """`dies`: in which step, and after how many evaluations of it, worker 1 ends."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    job = elastic_runtime.init(global_batch_size=plan.global_batch, **plan.options)
    model = nn.Linear(FEATURES, 3).double()
    optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3, line_search_fn="strong_wolfe")
    model, optimizer, loader = job.prepare(model, optimizer, DataLoader(Points(plan.samples), batch_size=8))
    record = Record(job, index, directory, optimizer, dict)
    losses = []
    for _epoch in job.epochs(plan.epochs):
        for x, y, indices in loader:
            if gate:
                gate.pass_through(index, job.step)
            record.computes(indices)
            evaluations = 0

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> Any:
                nonlocal evaluations
                if (index, job.step, evaluations) == (1, *dies):
                    os.kill(os.getpid(), signal.SIGKILL)
                evaluations += 1
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x.double()), y)
                job.backward(loss)
                return loss

            losses.append(float(optimizer.step(closure)))
    final: dict[str, Any] = {"model": model.state_dict(), "lr": [0.3], "step": job.step, "losses": losses[-5:]}
    torch.save(final, directory / f"final-{index}.pt")


def test_a_worker_that_dies_between_two_evaluations_of_a_closure_leaves_nothing_of_them(tmp_path: Path) -> None:
    """The others return to the step's beginning from within the optimizer, and all of them read the same losses."""
    plan = Plan(epochs=2, max_batch=None, body=partial(train_quasi_newton, dies=(9, 2)))
    expected = trained_alone(train_quasi_newton, plan, tmp_path)
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1, 2)
        cluster.let_go()
        assert cluster.wait_for_size(2).lost_steps == 0
        cluster.wait_for_end(0, 2)
        cluster.check_result(expected)
        first, second = (final["losses"] for final in cluster.finals().values())
        assert first == second
        assert first == pytest.approx(expected["losses"])


@pytest.mark.parametrize("passes", [1, 2])
def test_a_worker_that_dies_between_two_passes_takes_the_others_back_to_the_beginning_of_the_step(
    tmp_path: Path, reference: dict[str, Any], passes: int
) -> None:
    plan = Plan(epochs=2, max_batch=None, body=partial(train_adversaries, dies=(1, 9, passes)))
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1, 2)
        cluster.let_go()
        assert cluster.wait_for_size(2).lost_steps == 0
        cluster.wait_for_end(0, 2)
        cluster.check_result(reference)


def test_a_loop_left_between_two_passes_goes_on_from_the_beginning_of_the_step() -> None:
    job, model, optimizer, loader = prepared(global_batch_size=8)
    before = [parameter.clone() for parameter in model.parameters()]
    for _epoch in job.epochs(1):
        for x, _y, _indices in loader:
            job.backward(model(x).mean(), more=True)
            optimizer.step()
            assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            break
        assert job.step == 0
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        break


def test_a_step_that_is_cut_cannot_have_several_passes() -> None:
    refused(LoopError, "leave max_batch_per_gpu out", more_passes, global_batch_size=8, max_batch_per_gpu=3)


def test_exact_training_cannot_have_several_passes() -> None:
    try:
        refused(UsageError, "this training is exact", more_passes, global_batch_size=8, reduction="exact")
    finally:
        torch.use_deterministic_algorithms(False)  # noqa: FBT003


def test_the_last_pass_must_be_there() -> None:
    refused(LoopError, r"ended without a job\.backward\(loss\) without more=True", more_passes, global_batch_size=8)


def test_a_second_pass_that_was_not_announced_is_an_error_that_names_the_way() -> None:
    def twice(job: Any, loss: torch.Tensor) -> None:
        job.backward(loss, more=False)
        job.backward(loss)

    refused(LoopError, "pass more=True to all calls but the last", twice, global_batch_size=8)


def more_passes(job: Any, loss: torch.Tensor) -> None:
    job.backward(loss, more=True)


def refused(error: type[Exception], message: str, compute: Callable[[Any, torch.Tensor], None], **options: Any) -> None:
    def train() -> None:
        job, model, _optimizer, loader = prepared(**options)
        for _epoch in job.epochs(1):
            for x, _y, _indices in loader:
                compute(job, model(x).mean())
                model.zero_grad()

    with pytest.raises(error, match=message):
        train()


def prepared(**options: Any) -> tuple[Any, nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(1)
    job, model = elastic_runtime.init(**options), nn.Linear(FEATURES, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _, _, loader = job.prepare(model, optimizer, DataLoader(Points(24), batch_size=8))
    return job, model, optimizer, loader


# Skipping


def train_skipping(plan: Plan, index: int, directory: Path, gate: Any) -> None:
    """Samples that can be divided by 3 break their iteration; in step 4 all do."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    job = elastic_runtime.init(global_batch_size=plan.global_batch, max_batch_per_gpu=1, **plan.options)
    model = nn.Linear(FEATURES, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    loader = DataLoader(Points(plan.samples), batch_size=1, shuffle=True)
    _, _, elastic_loader, _ = job.prepare(model, optimizer, loader, scheduler)
    for _epoch in job.epochs(plan.epochs):
        for x, y, indices in elastic_loader:
            if gate:
                gate.pass_through(index, job.step)
            if int(indices) % 3 == 0 or job.step == 4:
                job.skip()
            else:
                job.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    final = {"model": model.state_dict(), "lr": scheduler.get_last_lr(), "step": job.step}
    torch.save(final, directory / f"final-{index}.pt")


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_the_mean_of_a_step_is_over_what_was_not_skipped_on_any_worker(tmp_path: Path, reduction: str) -> None:
    options = {"reduction": "exact", "shards": 16} if reduction == "exact" else {}
    plan = Plan(epochs=2, samples=64, body=train_skipping, options=options)
    with Cluster(tmp_path, plan) as cluster:
        cluster.target(0, 1, 2)
        cluster.wait_for_end(0, 1, 2)
        model, lr = by_hand(tmp_path)
        for final in cluster.finals().values():
            assert final["step"] == 8
            assert final["lr"] == pytest.approx(lr)
            for name, value in model.state_dict().items():
                torch.testing.assert_close(final["model"][name], value, rtol=2e-4, atol=2e-5)


def by_hand(directory: Path) -> tuple[nn.Module, list[float]]:
    """The same in plain torch, in the order that a lone worker sees."""
    job = elastic_runtime.init(global_batch_size=16)
    elsewhere = nn.Linear(FEATURES, 3)
    sgd = torch.optim.SGD(elsewhere.parameters(), lr=0.0)
    _, _, elastic_loader = job.prepare(elsewhere, sgd, DataLoader(Points(64), batch_size=16, shuffle=True))
    torch.manual_seed(1)
    model = nn.Linear(FEATURES, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    for _epoch in job.epochs(2):
        for x, y, indices in elastic_loader:
            kept = indices % 3 != 0
            if job.step != 4:
                nn.functional.cross_entropy(model(x[kept]), y[kept]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            job.backward(elsewhere(x).mean())
            elsewhere.zero_grad()
    return model, list(map(float, scheduler.get_last_lr()))


def test_a_step_in_which_everything_is_skipped_changes_nothing_and_counts() -> None:
    job, model, optimizer, loader = prepared(global_batch_size=8)
    before = [parameter.clone() for parameter in model.parameters()]
    for _epoch in job.epochs(1):
        for _batch in loader:
            job.skip()
            optimizer.step()
    assert job.step == 3
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_skipped_part_of_a_step_may_come_before_a_weighted_one() -> None:
    job, model, optimizer, loader = prepared(global_batch_size=8, max_batch_per_gpu=4)
    bias = next(parameter for name, parameter in model.named_parameters() if name == "bias")
    for _epoch in job.epochs(1):
        for number, (x, _y, _indices) in enumerate(loader):
            if number % 2 == 0:
                job.skip()
            else:
                job.backward(model(x).mean(), weight=5)
                assert bias.grad is not None
                torch.testing.assert_close(bias.grad, torch.full((3,), 1 / 3))
            optimizer.step()
            optimizer.zero_grad()
    assert job.step == 3


def train_leaving_the_optimizer_out(plan: Plan, index: int, directory: Path, gate: Any) -> None:
    job, model, optimizer, loader = prepared(global_batch_size=8)
    for _epoch in job.epochs(1):
        for x, _y, _indices in loader:
            if job.rank == 1:
                job.skip()
                continue
            job.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()


def test_who_skips_must_still_step_for_the_others_samples(tmp_path: Path) -> None:
    with Cluster(tmp_path, Plan(body=train_leaving_the_optimizer_out)) as cluster:
        cluster.target(0, 1)
        cluster.processes["w1"].join(TIMEOUT_S)
        assert "an iteration with job.skip() ended without optimizer.step()" in cluster.logs()
        cluster.wait_for_end(0)
