"""The code before the loader's loop runs again in an epoch that others have begun, without an effect."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from elastic_runtime.errors import LoopError
from elastic_runtime.reduction.buffers import FollowedBuffers
from elastic_runtime.state import epoch_start
from elastic_runtime.state.epoch_start import NOTHING, EpochStart
from elastic_runtime.state.packing import pack, unpack
from elastic_runtime.state.random_streams import RandomStreams
from elastic_runtime.state.training_state import TrainingState


class Worker:
    """A worker's objects."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        self.first, *_, self.second = self.model.parameters()
        self.model.register_buffer("tau", torch.ones(()))
        self.optimizer = torch.optim.SGD(self.model[1].parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        parts: list[Any] = [("optimizer", self.optimizer), ("scheduler", self.scheduler)]
        self.state = TrainingState(self.model, parts)
        self.start = EpochStart(self.state, FollowedBuffers([self.model]), RandomStreams())

    def code(self) -> float:
        """What a script has between the epoch's begin and its loader."""
        self.scheduler.step()
        self.optimizer.state.clear()
        self.model.get_buffer("tau").mul_(0.5)
        if len(self.optimizer.param_groups) == 1:
            self.optimizer.add_param_group({"params": list(self.model[0].parameters()), "lr": 0.3})
        self.second.data.mul_(0.5)
        return float(torch.rand(()))

    def step(self) -> None:
        self.model(torch.ones(2, 3)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def captured(self) -> str:
        found = {name: value for name, value in self.state.capture().items() if name != "epoch_start"}
        skeleton, tensors = pack(found)
        return f"{skeleton!r} {[tensor.tolist() for tensor in tensors]}"


def moved(worker: Worker) -> dict[str, Any]:
    """The state of a worker as another one receives it."""
    skeleton, tensors = pack(worker.state.capture())
    received: dict[str, Any] = unpack(skeleton, [tensor.clone() for tensor in tensors])
    return received


def begun() -> tuple[Worker, float]:
    """A worker in the middle of an epoch, and what its code drew before."""
    worker = Worker()
    worker.start.begin()
    drawn = worker.code()
    worker.start.enter()
    worker.step()
    return worker, drawn


def test_a_joiner_runs_the_code_from_the_epochs_beginning_and_goes_on_in_its_middle() -> None:
    first, drawn = begun()
    second = Worker()
    second.state.load(moved(first))
    torch.manual_seed(77)
    own = torch.get_rng_state()
    second.start.begin()
    assert [group["lr"] for group in second.optimizer.param_groups] == [0.1]
    assert float(second.model.get_buffer("tau")) == 1.0
    assert second.code() == drawn
    second.start.enter()
    assert second.captured() == first.captured()
    assert torch.equal(torch.get_rng_state(), own)


def test_a_worker_that_receives_the_first_state_keeps_its_own_random_streams() -> None:
    first, second = Worker(), Worker()
    first.start.capture()
    second.state.load(moved(first))
    torch.manual_seed(77)
    own = torch.get_rng_state()
    second.start.begin()
    second.start.enter()
    assert torch.equal(torch.get_rng_state(), own)
    assert second.state.epoch_start is not None
    assert second.state.epoch_start["entered"]


def test_code_that_changes_parameters_on_the_second_run_only_is_refused() -> None:
    first = Worker()
    first.start.begin()
    first.start.enter()
    second = Worker()
    second.state.load(moved(first))
    second.start.begin()
    second.first.data.mul_(0.5)
    with pytest.raises(LoopError, match="did not when the epoch began"):
        second.start.enter()


@pytest.mark.parametrize("most", [1 << 20, 4])
def test_a_change_that_autograd_does_not_see_is_noticed_in_small_and_large_states(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch_start, "MOST_ELEMENTS", most)
    worker = Worker()
    worker.start.begin()
    worker.first.data.mul_(0.5)
    worker.start.enter()
    assert worker.state.epoch_start is not None
    assert worker.state.epoch_start["changes"]


def test_results_of_shared_work_are_those_of_the_epochs_beginning() -> None:
    first = Worker()
    first.start.begin()
    for result in (0.5, threading.Lock()):
        assert first.start.next_result() is NOTHING
        first.start.note(result)
    first.start.enter()
    first.start.note(0.7)  # within the loop: nobody runs it again
    second = Worker()
    second.state.load(moved(first))
    second.start.begin()
    assert second.start.next_result() == 0.5
    with pytest.raises(LoopError, match="cannot be carried"):
        second.start.next_result()
    with pytest.raises(LoopError, match="more often than it did when the epoch began"):
        second.start.next_result()


def test_a_checkpoint_of_an_older_version_is_continued_in_its_middle() -> None:
    first, _ = begun()
    received = moved(first)
    del received["epoch_start"]
    second = Worker()
    second.state.load(received)
    second.start.begin()
    second.code()
    second.start.enter()
    assert second.captured() == first.captured()
