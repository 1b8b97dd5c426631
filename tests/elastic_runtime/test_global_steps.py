"""`job.global_steps`: one turn of the loop is one step, whatever it is cut into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import elastic_runtime
from elastic_runtime.errors import LoopError
from tests.elastic_runtime.training import Points


def prepared(**options: Any) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(1)
    job = elastic_runtime.init(global_batch_size=8, **options)
    model = nn.Linear(12, 3)
    loader = DataLoader(Points(50), batch_size=8, shuffle=True)
    return (job, *job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader))


def trained(**options: Any) -> tuple[list[int], list[int], torch.Tensor]:
    """(the steps of the turns, the micro-batches of each, the weights)."""
    job, model, optimizer, loader = prepared(**options)
    steps, sizes = [], []
    for _epoch in job.epochs(2):
        assert len(job.global_steps(loader)) == 7
        for step, micro_batches in job.global_steps(loader):
            steps.append(step)
            sizes.append(0)
            for x, y, _ in micro_batches:
                sizes[-1] += 1
                job.backward(nn.functional.cross_entropy(model(x), y))
            assert job.applied
            assert all(parameter.grad is not None for parameter in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    return steps, sizes, model.weight.detach()


def test_a_turn_is_a_step_and_trains_the_same_however_it_is_cut() -> None:
    steps, sizes, whole = trained()
    assert (steps, set(sizes)) == (list(range(14)), {1})
    steps, sizes, cut = trained(max_batch_per_gpu=3)
    assert (steps, sizes[:7]) == (list(range(14)), [3, 3, 3, 3, 3, 3, 1])
    torch.testing.assert_close(cut, whole)
    assert trained(reduction="exact")[1][0] == 8
    torch.use_deterministic_algorithms(mode=False)


def test_a_number_of_steps_across_epochs_is_counted_in_turns() -> None:
    job, model, optimizer, _loader = prepared(max_batch_per_gpu=4)
    steps = []
    for step, micro_batches in job.global_steps(job.steps(10)):
        steps.append(step)
        for x, y, _ in micro_batches:
            job.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    assert steps == list(range(10))


def test_an_iteration_that_is_repeated_is_repeated_within_its_turn() -> None:
    job, model, optimizer, loader = prepared(max_batch_per_gpu="auto")
    sizes: dict[int, list[int]] = {}
    for _epoch in job.epochs(1):
        for step, micro_batches in job.global_steps(loader):
            for x, y, _ in micro_batches:
                sizes.setdefault(step, []).append(len(x))
                with job.retrying():
                    if len(x) > 4:
                        raise torch.OutOfMemoryError
                    job.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    assert sizes[0] == [8, 4, 4]
    assert sizes[1] == [4, 4]
    assert list(sizes) == list(range(7))


def leave_early() -> None:
    job, model, _, loader = prepared(max_batch_per_gpu=4)
    for _epoch in job.epochs(1):
        for _step, micro_batches in job.global_steps(loader):
            for x, y, _ in micro_batches:
                job.backward(nn.functional.cross_entropy(model(x), y))
                break


def iterate_twice() -> None:
    job, model, _, loader = prepared()
    for _epoch in job.epochs(1):
        for _step, micro_batches in job.global_steps(loader):
            for x, y, _ in [*micro_batches, *micro_batches]:
                job.backward(nn.functional.cross_entropy(model(x), y))


def test_a_step_whose_micro_batches_are_left_is_named() -> None:
    with pytest.raises(LoopError, match="micro-batches of step 0 was not run to its end"):
        leave_early()


def test_micro_batches_that_are_fetched_before_they_are_computed_are_named() -> None:
    with pytest.raises(LoopError, match="where something fetches a batch ahead"):
        iterate_twice()
