"""What scripts do beside the loop of the manual: each either works as its author means it, or is named."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import elastic_runtime
from elastic_runtime.data.sources import Source
from elastic_runtime.errors import LoopError, StateError, UsageError
from tests.elastic_runtime.training import Points
from tests.polling import TIMEOUT_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DATA = Points(50)


def made(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> tuple[Any, Any]:
    """(job, loader) of steps of 8."""
    job = elastic_runtime.init(global_batch_size=8, **options)
    return job, job.prepare(model, optimizer, DataLoader(DATA, batch_size=8))[2]


def linear() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(12, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


# Samplers


class Evens(RandomSampler):
    """A subclass that has its own idea."""

    def __iter__(self) -> Iterator[int]:
        yield from (2 * i for i in range(len(self)))


class ByEpoch(Sampler[int]):
    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from ((i + self.epoch) % 50 for i in range(50))

    def __len__(self) -> int:
        return 50


def orders(sampler: Sampler[int], epochs: int = 2) -> list[list[int]]:
    source = Source(DataLoader(DATA, batch_size=8, sampler=sampler), 7)
    return [list(source.epoch(epoch)[:]) for epoch in range(epochs)]


def test_a_random_sampler_of_fewer_samples_draws_from_all_of_them() -> None:
    few = orders(RandomSampler(DATA, num_samples=20))
    assert [len(order) for order in few] == [20, 20]
    assert max(few[0]) >= 20
    assert few[0] != few[1]


def test_a_random_sampler_with_replacement_repeats() -> None:
    (order,) = orders(RandomSampler(DATA, replacement=True, num_samples=200), 1)
    assert len(order) == 200
    assert len(set(order)) <= 50


def test_a_samplers_subclass_is_asked() -> None:
    assert orders(Evens(DATA, num_samples=25), 1) == [list(range(0, 50, 2))]


@pytest.mark.parametrize("kind", ["weighted", "subset", "random", "batches"])
def test_a_sampler_with_a_generator_of_its_own_draws_the_same_wherever_a_worker_begins(kind: str) -> None:
    def order_of_epoch(drawn_before: int) -> list[int]:
        generator = torch.Generator().manual_seed(3)
        torch.randperm(5 + drawn_before, generator=generator)
        samplers: dict[str, Any] = {
            "weighted": lambda: WeightedRandomSampler([1.0] * 50, 50, generator=generator),
            "subset": lambda: SubsetRandomSampler(range(50), generator=generator),
            "random": lambda: RandomSampler(DATA, num_samples=30, generator=generator),
            "batches": lambda: RandomSampler(DATA, generator=generator),
        }
        sampler = samplers[kind]()
        loader: DataLoader[Any] = (
            DataLoader(DATA, batch_sampler=BatchSampler(sampler, 8, drop_last=False))
            if kind == "batches"
            else DataLoader(DATA, batch_size=8, sampler=sampler)
        )
        source = Source(loader, 7)
        for epoch in range(drawn_before):
            source.epoch(epoch)
        return list(source.epoch(2)[:])

    assert order_of_epoch(0) == order_of_epoch(2)


def test_a_sampler_is_told_the_epoch() -> None:
    first, second = orders(ByEpoch())
    assert (first[0], second[0]) == (0, 1)


def test_torchs_own_batch_sampler_makes_the_steps() -> None:
    model, optimizer = linear()
    batches = BatchSampler(SequentialSampler(DATA), 10, drop_last=False)
    job = elastic_runtime.init()
    loader = job.prepare(model, optimizer, DataLoader(DATA, batch_sampler=batches))[2]
    assert len(loader) == 5


# Optimizers


def test_a_parameter_that_is_none_of_the_models_is_named() -> None:
    model = nn.Linear(12, 3)
    temperature = nn.Parameter(torch.ones(7))
    with pytest.raises(UsageError, match=r"shape \(7,\) in its group 0 .*prepare\(\[model, criterion\]"):
        made(model, torch.optim.SGD([*model.parameters(), temperature], lr=0.1))


def sparse_table() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(10, 4, sparse=True))


def test_sparse_gradients_are_refused_if_they_are_not_summed_or_an_optimizer_keeps_them() -> None:
    model = sparse_table()
    with pytest.raises(UsageError, match="sparse=True, whose gradients are summed with reduction='fast'"):
        made(model, torch.optim.SGD(model.parameters(), lr=0.1), reduction="exact")
    with pytest.raises(UsageError, match="SGD with momentum keeps the momentum of an embedding"):
        made(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def test_a_step_in_micro_batches_has_torchs_own_sparse_gradients() -> None:
    words = torch.randint(0, 30, (40, 3), generator=torch.Generator().manual_seed(1))
    given = DataLoader(TensorDataset(words), batch_size=8)
    found = []
    for cut in (None, 3):
        torch.manual_seed(0)
        model = nn.EmbeddingBag(30, 4, mode="sum", sparse=True)
        optimizer: Any = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        if cut is None:
            for (batch,) in given:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        else:
            job = elastic_runtime.init(global_batch_size=8, max_batch_per_gpu=cut)
            job.prepare(model, optimizer, given)
            for (batch,) in job.steps(5):
                job.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        found.append(model.weight.detach())
    torch.testing.assert_close(found[0], found[1])


def test_a_dense_gradient_of_a_sparse_embedding_is_refused_and_a_sparse_one_of_another_parameter() -> None:
    for sparse in (True, False):
        model = nn.Embedding(10, 4, sparse=sparse)
        job, _ = made(model, torch.optim.SGD(model.parameters(), lr=0.1))
        wanted = "dense" if sparse else "sparse"
        indices = torch.tensor([1, 2])
        with pytest.raises(UsageError, match=f"'weight' got a {wanted} gradient"):  # noqa: PT012
            for _ in job.steps(1):
                job.backward(nn.functional.embedding(indices, model.weight, sparse=not sparse).sum())


def test_an_optimizer_that_was_not_prepared_is_named_when_it_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 3))
    prepared, forgotten = (torch.optim.AdamW(layer.parameters()) for layer in model)
    elsewhere = nn.Linear(1, 1)
    job, loader = made(model, prepared)
    for _ in job.epochs(1):
        for x, y, _i in loader:
            elsewhere(torch.ones(1)).backward()
            torch.optim.SGD(elsewhere.parameters()).step()
            job.backward(nn.functional.cross_entropy(model(x), y))
            prepared.step()
            with pytest.raises(UsageError, match=r"AdamW steps parameters .* prepare\(model, \[first, second\]"):
                forgotten.step()
            model.zero_grad()
    forgotten.step()


def test_an_optimizer_may_be_made_of_others() -> None:
    class Slow(torch.optim.Optimizer):
        """Step another scheduler, without effect on others."""

        def __init__(self, fast: torch.optim.Optimizer) -> None:
            super().__init__(fast.param_groups, {})
            self.fast = fast

        def step(self, closure: Any = None) -> Any:
            return self.fast.step(closure)

    model, fast = linear()
    before = model.weight.clone()
    slow = Slow(fast)
    job, loader = made(model, slow)
    for x, y, _i in job.steps(3):
        job.backward(nn.functional.cross_entropy(model(x), y))
        slow.step()
        slow.zero_grad()
    assert not torch.equal(model.weight, before)
    assert loader


@pytest.mark.parametrize(
    ("prepared", "remedy"), [(True, "call it after job.backward"), (False, "not given to prepare")]
)
def test_stepping_within_the_backward_pass_is_refused(*, prepared: bool, remedy: str) -> None:
    """Its gradients are not summed yet: silently, nothing was trained, or by each worker alone."""
    model, optimizer = linear()
    each = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: each[p].step())  # type: ignore[no-untyped-call]
    job = elastic_runtime.init(global_batch_size=8, max_batch_per_gpu=4)
    given: Any = list(each.values()) if prepared else optimizer
    job.prepare(model, given, DataLoader(DATA, batch_size=8))
    batches = job.steps(1)
    x, y, _i = next(batches)
    with pytest.raises((LoopError, UsageError), match=remedy):
        job.backward(nn.functional.cross_entropy(model(x), y))


def test_a_closure_without_its_backward_pass_is_refused() -> None:
    model, optimizer = linear()
    job, loader = made(model, optimizer)
    job_steps = ((x, _epoch) for _epoch in job.epochs(1) for x, _y, _i in loader)
    x, _ = next(job_steps)
    with pytest.raises(LoopError, match=r"the closure .* calls job.backward"):
        optimizer.step(partial(model, x))


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_layers_may_be_frozen_and_trained_again_in_the_middle(reduction: str) -> None:
    def train(*, elastic: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
        model[0].requires_grad_(requires_grad=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        job = elastic_runtime.init(global_batch_size=8, reduction=reduction, shards=1)  # type: ignore[arg-type]
        loader: Any = DataLoader(DATA, batch_size=8)
        if elastic:
            loader = job.prepare(model, optimizer, loader)[2]
        for epoch in job.epochs(3) if elastic else range(3):
            model[0].requires_grad_(epoch == 1)
            for x, _y, _i in loader:
                loss = model(x).square().mean()
                job.backward(loss) if elastic else loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    torch.use_deterministic_algorithms(mode=False)
    for ours, plain in zip(train(elastic=True), train(elastic=False), strict=True):
        torch.testing.assert_close(ours, plain)


ONE_SAMPLE = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import elastic_runtime

model = torch.nn.Sequential(torch.nn.Linear(12, 3), torch.nn.BatchNorm1d(3))
job = elastic_runtime.init(global_batch_size=4, max_batch_per_gpu=1)
optimizer = torch.optim.SGD(model.parameters())
model, _, loader = job.prepare(model, optimizer, DataLoader(TensorDataset(torch.ones(8, 12)), batch_size=4))
for _epoch in job.epochs(1):
    for (x,) in loader:
        job.backward(model(x).sum())
"""


def test_batch_normalization_that_gets_one_sample_ends_with_the_remedy() -> None:
    ended = subprocess.run([sys.executable, "-c", ONE_SAMPLE], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "more than 1 value per channel" in ended.stderr
    assert "this iteration has one sample of the global batch, and its statistics need two" in ended.stderr


def test_hooks_taken_between_two_sessions_are_called_once_each() -> None:
    """init_process_group takes the interpreter's hook at each call, and calls the one before it."""
    script = """
import sys
import torch
import elastic_runtime

def train():
    model = torch.nn.Linear(1, 1)
    data = torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=4)
    job = elastic_runtime.init(global_batch_size=4)
    model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters()), data)
    for _ in job.epochs(1):
        for x in loader:
            job.backward(model(x).sum())

for _ in range(2):
    train()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.distributed.destroy_process_group()
train()
raise ValueError("of the script")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "Error in sys.excepthook" not in ended.stderr, ended.stderr
    assert ended.stderr.count("ValueError: of the script") == 1


def test_another_default_device_is_refused() -> None:
    model, optimizer = linear()
    torch.set_default_device("meta")
    try:
        with pytest.raises(UsageError, match=r"set_default_device\('cpu'\) before prepare"):
            made(model, optimizer)
    finally:
        torch.set_default_device(None)


def test_gradients_that_are_added_up_by_the_loop_itself_are_refused() -> None:
    model, optimizer = linear()
    job, loader = made(model, optimizer)

    def train() -> None:
        for _epoch in job.epochs(1):
            for number, (x, _y, _i) in enumerate(loader):
                job.backward(model(x).mean())
                if number % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()

    with pytest.raises(LoopError, match=r"were not cleared before parameter 'bias'.*in every iteration"):
        train()


def test_a_step_may_be_left_out_where_its_gradients_are_cleared() -> None:
    model, optimizer = linear()
    job, loader = made(model, optimizer)
    for _epoch in job.epochs(1):
        for number, (x, _y, _i) in enumerate(loader):
            optimizer.zero_grad(set_to_none=number % 3 == 0)
            job.backward(model(x).mean())
            if number % 4 == 3:
                optimizer.step()
    assert job.step == 7


# Leaving the loop, and coming back


def test_a_step_that_was_applied_counts_where_the_loop_is_left_right_after_it() -> None:
    model, optimizer = linear()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    job = elastic_runtime.init(global_batch_size=8)
    loader = job.prepare(model, optimizer, DataLoader(DATA, batch_size=8), scheduler)[2]
    steps = []
    for _epoch in job.epochs(2):
        for x, _y, _i in loader:
            job.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            if job.step % 3 == 2:
                break
        steps.append(job.step)
        scheduler.step()
    assert steps == [3, 6]
    assert scheduler.get_last_lr() == [0.1 / 4]


def test_a_step_that_was_not_complete_is_dropped_where_the_loop_is_left() -> None:
    model, optimizer = linear()
    job, loader = made(model, optimizer, max_batch_per_gpu=4)
    before = model.weight.detach().clone()
    for _epoch in job.epochs(1):
        for x, _y, _i in loader:
            job.backward(model(x).mean())
            optimizer.step()
            break
    assert job.step == 0
    assert model.weight.grad is None
    assert torch.equal(model.weight, before)


def test_after_the_training_the_model_is_the_scripts_again() -> None:
    model, optimizer = linear()
    job, loader = made(model, optimizer, max_batch_per_gpu=3)
    for x, _y, _i in job.steps(3):
        job.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert loader is not None
    model(DATA.x).mean().backward()
    assert model.weight.grad is not None
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_a_notebooks_cell_that_trains_may_be_run_again_to_train_further(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = linear()
    job, loader = made(model, optimizer)

    def cell(epochs: int) -> list[int]:
        seen = []
        for epoch in job.epochs(epochs):
            seen.append(epoch)
            for x, _y, _i in loader:
                job.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
        return seen

    assert cell(2) == [0, 1]
    assert cell(4) == [2, 3]
    assert cell(4) == []
    assert "4 epochs are trained already: nothing to do" in caplog.text


@pytest.mark.parametrize("max_batch", [None, 3])
def test_a_notebooks_cell_that_was_interrupted_may_be_run_anew(max_batch: int | None) -> None:
    """The same model and optimizer, in a job of their own, as if there had been none before."""
    model, optimizer = linear()

    def cell(stop_at: int | None) -> int:
        job, loader = made(model, optimizer, max_batch_per_gpu=max_batch)
        for _epoch in job.epochs(1):
            for number, (x, _y, _i) in enumerate(loader):
                job.backward(model(x).mean())
                if number == stop_at:
                    raise KeyboardInterrupt
                optimizer.step()
                optimizer.zero_grad()
        return int(job.step)

    with pytest.raises(KeyboardInterrupt):
        cell(4)
    before = model.weight.detach().clone()
    assert cell(None) == 7
    assert not torch.equal(model.weight, before)


# Errors that are raised immediately


def test_a_state_that_cannot_be_saved_is_named_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path))

    class Open:
        def state_dict(self) -> dict[str, Any]:
            return {"callback": lambda: None}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    model, optimizer = linear()
    job, _loader = made(model, optimizer)
    job.track(it=Open())
    with pytest.raises(StateError, match="cannot be saved"):
        next(job.epochs(1))


def test_another_dataset_or_optimizer_is_not_mixed_up_with_a_saved_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path))

    def train(samples: int, kind: type[torch.optim.Optimizer]) -> None:
        model = nn.Linear(12, 3)
        job = elastic_runtime.init(global_batch_size=8, checkpoint_every_s=1e-9)
        optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        job.prepare(model, optimizer, DataLoader(Points(samples), batch_size=8))
        for x, _y, _i in job.steps(4):
            job.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()

    train(50, torch.optim.SGD)
    with pytest.raises(StateError, match="50 samples in the order of seed=0, this script has 60 samples"):
        train(60, torch.optim.SGD)
    with pytest.raises(StateError, match="trained with SGD, this script has AdamW"):
        train(50, torch.optim.AdamW)


def test_another_random_split_is_not_mixed_up_with_that_of_a_saved_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would train on what was held out before; the same text is what workers have to have in common."""
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path))

    def train(seed: int) -> None:
        model, optimizer = linear()
        half, _ = random_split(Points(50), [0.5, 0.5], torch.Generator().manual_seed(seed))
        job = elastic_runtime.init(global_batch_size=8, checkpoint_every_s=1e-9)
        job.prepare(model, optimizer, DataLoader(half, batch_size=8))
        for x, _y, _i in job.steps(2 + 2 * seed):
            job.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        assert job._state is not None
        assert "25 samples of a Subset" in job._state.agreement()

    train(0)
    train(0)
    with pytest.raises(StateError, match=r"25 samples of a Subset .* samples or optimizer state would be mixed up"):
        train(1)


def test_a_schedule_can_be_made_before_the_loader_is_prepared() -> None:
    model, optimizer = linear()
    job = elastic_runtime.init(global_batch_size=16)
    loader = DataLoader(DATA, batch_size=4)
    steps = job.steps_per_epoch(loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=2, steps_per_epoch=steps)
    loader = job.prepare(model, optimizer, loader, scheduler)[2]
    assert len(loader) == steps == 4
    for _epoch in job.epochs(2):
        for x, _y, _i in loader:
            job.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    assert scheduler.last_epoch == 8


def test_where_nothing_durable_is_there_init_says_what_would_be_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        elastic_runtime.init()
    assert "ELASTIC_CHECKPOINT_DIR is not set" in caplog.text
    assert "everything that was trained is lost" in caplog.text
    caplog.clear()
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", "")  # as for loops of Ray Train, which report checkpoints of their own
    elastic_runtime.init()
    assert "ELASTIC_CHECKPOINT_DIR" not in caplog.text


def test_a_callback_that_fails_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path))
    model, optimizer = linear()
    job, _loader = made(model, optimizer, checkpoint_every_s=1e-9)

    def fail(_line: dict[str, Any]) -> None:
        raise RuntimeError("the dashboard is away")

    job.on_checkpoint(fail)
    for x, _y, _i in job.steps(3):
        job.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert "the dashboard is away" in caplog.text
    assert list(tmp_path.glob("*.elastic"))


# Loader processes


class Noisy(Points):
    """Draws at random, and keeps what its processes were given."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x, y, _ = super().__getitem__(index)
        return x + torch.rand(1) + self.offset, y, index

    offset = 0.0


def give_offset(_worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.offset = 100.0  # type: ignore[attr-defined]


def test_what_loader_processes_draw_depends_on_the_step_and_not_on_what_they_did_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that resumes at a checkpoint has the same augmentations as an uninterrupted one."""

    def train(directory: Path, steps: int) -> dict[int, torch.Tensor]:
        monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(directory))
        model, optimizer = linear()
        job = elastic_runtime.init(global_batch_size=8, checkpoint_every_s=1e-9)
        loader = DataLoader(
            Noisy(50), batch_size=8, num_workers=2, worker_init_fn=give_offset, multiprocessing_context="fork"
        )
        job.prepare(model, optimizer, loader)
        seen = {}
        for x, _y, _i in job.steps(steps):
            seen[job.step] = x
            job.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    whole = train(tmp_path / "a", 10)
    train(tmp_path / "b", 4)
    rest = train(tmp_path / "b", 10)
    assert float(whole[0].min()) > 90
    assert rest
    for step, x in rest.items():
        assert torch.equal(x, whole[step])


# SIGTERM


VALIDATES = """
import pathlib, sys, time
import torch
from torch.utils.data import DataLoader
import elastic_runtime
from tests.elastic_runtime.training import Points

model = torch.nn.Linear(12, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = elastic_runtime.init(global_batch_size=25)
_, _, loader = job.prepare(model, optimizer, DataLoader(Points(50), batch_size=25))
for epoch in job.epochs(3):
    for x, _, _ in loader:
        job.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    print("validating", job.step, flush=True)
    while epoch == 1 and len(sys.argv) > 1:
        time.sleep(0.01)
"""


def test_sigterm_in_a_long_validation_saves_the_epoch_that_was_trained(
    tmp_path: Path, forked_python: tuple[str, ...]
) -> None:
    environment = {**os.environ, "ELASTIC_CHECKPOINT_DIR": str(tmp_path)}
    command = [*forked_python, "-c", VALIDATES]
    with subprocess.Popen([*command, "long"], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            while process.stdout.readline() != "validating 4\n":
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            until(lambda: list(tmp_path.glob("*.elastic")), "a checkpoint")
        finally:
            process.kill()
    second = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S)
    assert second.stdout.split("\n")[:2] == ["validating 4", "validating 6"]


PREEMPTED = """
import os, signal, torch
from torch.utils.data import DataLoader
import elastic_runtime
from tests.elastic_runtime.training import Points

model = torch.nn.Linear(12, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = elastic_runtime.init(global_batch_size=25)
_, _, loader = job.prepare(model, optimizer, DataLoader(Points(50), batch_size=25))

@job.on_preempt
def note(line):
    print(line["event"], line["step"], job.step, flush=True)

for epoch in job.epochs(3):
    for x, _, _ in loader:
        if job.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        job.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_preempted_worker_calls_the_scripts_function_before_it_ends(
    tmp_path: Path, forked_python: tuple[str, ...]
) -> None:
    environment = {**os.environ, "ELASTIC_CHECKPOINT_DIR": str(tmp_path)}
    ended = subprocess.run([*forked_python, "-c", PREEMPTED], env=environment, stdout=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, b"left 4 4\n")


HANDLES = """
import os, signal, sys
import elastic_runtime
signal.signal(signal.SIGTERM, lambda *_: (print("cleaned up", flush=True), os._exit(7)))
elastic_runtime.init()
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_scripts_own_handler_of_sigterm_is_called_where_there_is_nothing_to_save(
    tmp_path: Path, forked_python: tuple[str, ...]
) -> None:
    environment = {**os.environ, "ELASTIC_CHECKPOINT_DIR": str(tmp_path)}
    ended = subprocess.run([*forked_python, "-c", HANDLES], env=environment, stdout=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stdout) == (7, b"cleaned up\n")
