"""Iterable datasets with a state: each sample exactly once an epoch, whatever happens to the workers."""

from __future__ import annotations

import json
import runpy
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import elastic_runtime
from elastic_runtime.errors import StateError, UsageError
from tests.elastic_runtime.harness import Cluster
from tests.elastic_runtime.training import Plan, Points, Stream, train, trained_alone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLAN = Plan(streamed=True)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one undisturbed process gets."""
    directory = tmp_path_factory.mktemp("reference")
    return trained_alone(train, PLAN, directory)


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_stream_is_read_once_though_workers_join_and_die(
    tmp_path: Path, reference: dict[str, Any], loader_workers: int
) -> None:
    plan = Plan(streamed=True, loader_workers=loader_workers)
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1)
        cluster.grow_lose_the_first_and_end()
        cluster.check_result(reference)
        rows = [json.loads(line) for line in (tmp_path / "consumed-1.jsonl").read_text().splitlines()]
        assert len({tuple(sorted(row["processes"])) for row in rows}) == 1, "loader processes were replaced"
        assert len({row["generation"] for row in rows}) == 3


def test_a_stream_goes_on_from_a_checkpoint_at_another_size(tmp_path: Path, reference: dict[str, Any]) -> None:
    with Cluster(tmp_path, PLAN, checkpoints=True) as cluster:
        cluster.start(0, 1, step=20)
        cluster.target()
        cluster.wait_until_prepared()
        cluster.let_go()
        cluster.wait_for_end(0, 1)
        cluster.target(2, 3, 4)
        cluster.wait_for_end(2, 3, 4)
        cluster.check_result(reference)


def test_more_workers_than_samples_in_a_step_of_a_stream(tmp_path: Path) -> None:
    plan = Plan(epochs=2, samples=10, global_batch=4, streamed=True)
    with Cluster(tmp_path, plan) as cluster:
        cluster.start(0, 1, 2, step=2)
        cluster.let_go()
        cluster.wait_for_end(0, 1, 2)
        alone = tmp_path / "alone"
        alone.mkdir()
        train(plan, 0, alone, None)
        cluster.check_result(torch.load(alone / "final-0.pt"))


# Alone

DATA = Points(50)


def read(dataset: Any, epochs: int = 2, **options: Any) -> list[list[int]]:
    """The samples of each step."""
    loader_options = {k: options.pop(k) for k in ("num_workers", "drop_last") if k in options}
    job = elastic_runtime.init(**{"global_batch_size": 8, "max_batch_per_gpu": 3, "seed": 2, **options})
    model = nn.Linear(12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context = "fork" if loader_options.get("num_workers") else None
    loader = DataLoader(dataset, batch_size=8, multiprocessing_context=context, **loader_options)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    steps: dict[int, list[int]] = {}
    for _epoch in job.epochs(epochs):
        for x, _y, indices in loader:
            steps.setdefault(job.step, []).extend(indices.tolist())
            job.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
    return [steps[k] for k in sorted(steps)]


def flat(steps: list[list[int]]) -> list[int]:
    return [index for step in steps for index in step]


def test_the_order_depends_neither_on_loader_processes_nor_on_micro_batches() -> None:
    steps = read(Stream(DATA))
    assert [len(step) for step in steps] == [8, 8, 8, 8, 8, 8, 2] * 2
    assert sorted(flat(steps[:7])) == sorted(flat(steps[7:])) == list(range(50))
    assert steps[:7] != steps[7:]
    assert read(Stream(DATA), max_batch_per_gpu=None) == steps
    assert read(Stream(DATA), num_workers=1) == steps
    assert read(Stream(DATA), num_workers=2) == steps


def test_the_rest_that_fills_no_step_is_dropped_where_that_is_asked_for() -> None:
    assert [len(step) for step in read(Stream(DATA), drop_last=True)] == [8] * 12
    assert [len(step) for step in read(Stream(Points(48)), drop_last=True)] == [8] * 12


def test_an_exact_training_reads_a_stream_in_the_same_order() -> None:
    try:
        steps = read(Stream(DATA), reduction="exact", shards=4)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert steps == read(Stream(DATA))


class Forgetful(Stream):
    """Its state lacks what its buffer held."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": []}


class Loaded(Stream):
    """Counts how often its state is set."""

    loads = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        super().load_state_dict(state)


def test_one_worker_never_goes_back_in_a_stream() -> None:
    model, data = nn.Linear(12, 3), Loaded(Points(50))
    job = elastic_runtime.init(global_batch_size=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = job.prepare(model, optimizer, DataLoader(data, batch_size=4))[2]
    data.loads = 0
    for _epoch in job.epochs(2):
        seen: list[int] = []
        for x, _y, indices in loader:
            seen += indices.tolist()
            job.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        assert sorted(seen) == list(range(50))
    assert data.loads == 2  # at the beginning of each epoch


class Lines(IterableDataset[Any]):
    """Its iterator has the state."""

    def __iter__(self) -> Iterator[Any]:
        return LineIterator()


class LineIterator:
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> LineIterator:
        return self

    def __next__(self) -> Any:
        if self.at == len(DATA):
            raise StopIteration
        self.at += 1
        return DATA[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_the_state_may_be_the_iterators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path))
    whole = read(Lines(), checkpoint_every_s=1e-9)
    assert flat(whole[:7]) == flat(whole[7:]) == list(range(50))
    rest = read(Lines(), epochs=3)  # from the newest checkpoint on
    both = [*whole, *whole[:7]]
    assert 0 < len(rest) < 14
    assert rest == both[-len(rest) :]


def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path("examples/train_stream.py", run_name="__main__")
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2


class Stateless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (DATA[i] for i in range(50))


class Exhausted(Stream):
    def __iter__(self) -> Iterator[Any]:
        yield from ()


class Unpicklable(Stream):
    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


@pytest.mark.parametrize(
    ("dataset", "error", "words"),
    [
        (Stateless(), UsageError, r"Stateless, is an IterableDataset without a state.*state_dict\(\)"),
        (Exhausted(DATA), UsageError, "gave no sample"),
        (Forgetful(DATA), UsageError, "its state leaves something out, like the content of a buffer"),
        (Unpicklable(DATA), StateError, "keep open files"),
    ],
)
def test_a_stream_that_cannot_be_used_is_refused_with_a_remedy(dataset: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        read(dataset)


def test_a_stream_has_no_length() -> None:
    job, model = elastic_runtime.init(), nn.Linear(12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = job.prepare(model, optimizer, DataLoader(Stream(DATA), batch_size=8))
    with pytest.raises(TypeError, match="known when an epoch ends"):
        len(loader)
