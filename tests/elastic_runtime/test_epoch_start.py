"""The code before the loader's loop runs again in an epoch that others have begun, without an effect; that after the
loop runs again in a training that resumes there, with the state of the loop's end.
"""

from __future__ import annotations

import json
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import elastic_runtime
from elastic_runtime.errors import LoopError
from elastic_runtime.reduction.buffers import FollowedBuffers
from elastic_runtime.state import epoch_start
from elastic_runtime.state.epoch_start import NOTHING, EpochStart
from elastic_runtime.state.packing import pack, unpack
from elastic_runtime.state.random_streams import RandomStreams
from elastic_runtime.state.training_state import TrainingState
from tests.elastic_runtime.test_batches import DATA, Hungry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")]  # it is the first thing here


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


# The code after the loader's loop


class Killed(Exception):  # noqa: N818  (no error of the script's)
    """The process is killed in the code after the loop, once the thread that saves in time has tried to."""


class Training:
    """Two epochs of a small script, whose process is killed after the loop of one, or is not."""

    def __init__(self, killed_after: int = -1, capacity: int = 16) -> None:
        torch.manual_seed(0)
        self.job = elastic_runtime.init(global_batch_size=16, max_batch_per_gpu="auto", checkpoint_every_s=1e9)
        self.model, self.counts = Hungry(capacity, "forward"), [0, 0]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.loader = self.job.prepare(self.model, self.optimizer, DataLoader(DATA, batch_size=16))[2]
        self.killed_after = killed_after

    def run(self, after: Callable[[Training], None] = lambda _: None) -> dict[str, torch.Tensor]:
        """`after`: what follows the loop, and changes something."""
        for epoch in self.job.epochs(2):
            for x, y, _i in self.loader:
                with self.job.retrying():
                    loss = nn.functional.cross_entropy(self.model(x), y)
                    self.job.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.counts[epoch] += 1
                    self.job.report(loss=loss.item())
            after(self)
            if epoch == self.killed_after:
                self.save_in_time()
                raise Killed
        return self.model.state_dict()

    def save_in_time(self) -> None:
        preemption, checkpoints = self.job._member._preemption, self.job._member._checkpoints
        assert preemption is not None
        assert preemption._save is not None
        preemption._save()
        checkpoints.settle()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("ELASTIC_REPORT_FILE", str(tmp_path / "report.jsonl"))
    return tmp_path


def reports(files: Path, event: str) -> list[int]:
    """The steps of the report's lines of this event."""
    lines = map(json.loads, (files / "report.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["event"] == event]


def test_the_iteration_without_effect_reports_no_figures(files: Path) -> None:
    with pytest.raises(Killed):
        Training(killed_after=0).run()
    Training().run()
    assert reports(files, "checkpoint") == reports(files, "restored") == [4]
    assert reports(files, "metrics") == [*range(8)]


def test_the_iteration_without_effect_is_repeated_in_halves_where_it_does_not_fit(files: Path) -> None:
    with pytest.raises(Killed):
        Training(killed_after=0).run()
    tight = Training(capacity=5)
    found = tight.run()
    assert tight.model.failures == 2  # 16, then 8
    assert tight.counts[0] == 1
    shutil.rmtree(files / "checkpoints")
    for name, value in Training().run().items():
        torch.testing.assert_close(found[name], value)


def lower_rate(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] *= 0.5


@torch.no_grad()
def shrink(training: Training) -> None:
    training.model.weight.mul_(0.5)


@pytest.mark.parametrize(("after", "saved"), [(lower_rate, [4]), (shrink, [])])
def test_what_the_code_after_the_loop_has_changed_is_not_saved_before_the_next_epoch(
    files: Path, after: Callable[[Training], None], saved: list[int]
) -> None:
    with pytest.raises(Killed):
        Training(killed_after=0).run(after)
    assert reports(files, "checkpoint") == saved
    found = Training().run(after)
    shutil.rmtree(files / "checkpoints")
    for name, value in Training().run(after).items():
        assert torch.equal(found[name], value), name


def test_a_worker_that_must_go_in_the_code_after_the_loop_says_what_it_cannot_save(
    files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()

    def leave(training: Training) -> None:
        assert training.job._state is not None
        shrink(training)
        training.job._member._checkpoints.now(training.job._state)
        raise Killed

    with pytest.raises(Killed):
        training.run(leave)
    assert "the steps since the last checkpoint are trained again" in caplog.text
    assert reports(files, "checkpoint") == []
