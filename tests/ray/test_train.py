"""ElasticTorchTrainer on a real Ray cluster of two raylets."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("ray")

import ray
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchTrainer

from elastic_runtime.errors import UsageError
from elastic_runtime.integrations.ray import ElasticTorchTrainer, current_workers, limit_workers
from elastic_runtime.integrations.ray.controller import NAMESPACE
from elastic_runtime.integrations.ray.datasets import shards_of
from elastic_runtime.integrations.ray.leave import drain, is_empty
from tests.polling import TIMEOUT_S, until
from tests.ray.conftest import FEW_PROCESSES
from tests.ray.train_loops import (
    OUTSIDE,
    ROWS,
    STEPS_PER_EPOCH,
    STREAM_EPOCHS,
    Seen,
    fail,
    in_all_ways,
    one_fails,
    over_stream,
    train,
)
from tests.ray.transformations import drawn

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.xdist_group("ray-train")]

EPOCHS = 20
NODE = {"num_cpus": 1, **FEW_PROCESSES}


@pytest.fixture(scope="module")
def raylets() -> Iterator[Any]:
    """Two raylets with one CPU each."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415 (takes a second)

    cluster = Cluster(initialize_head=True, head_node_args=NODE, shutdown_at_exit=True)
    try:
        cluster.add_node(**NODE)
        ray.init(cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


class Training:
    """A training in a thread of its own, in a directory; `go()` lets it train as fast as possible."""

    def __init__(self, directory: Path, name: str, **run: Any) -> None:
        self.directory, self.name = directory, name
        self.trainer = ElasticTorchTrainer(
            train,
            train_loop_config={"directory": str(directory), "epochs": EPOCHS, "alone": False},
            scaling_config=ScalingConfig(num_workers=(1, 2)),
            run_config=RunConfig(name=name, storage_path=str(directory / "results"), **run),
        )
        self._pool = ThreadPoolExecutor(1)
        self.future = self._pool.submit(self.trainer.fit)

    def wait_for(self, workers: int) -> None:
        """Return when so many workers train."""
        until(lambda: self._size() == workers, f"{workers} workers")

    def _size(self) -> int:
        if self.future.done():
            self.future.result()
        with contextlib.suppress(UsageError):
            return current_workers(self.name)
        return 0

    def go(self) -> Any:
        """Return the result."""
        (self.directory / "go").touch()
        return self.future.result(TIMEOUT_S)

    def pid(self, rank: int) -> int:
        """The running process that was this rank last; 0: it has ended, and the next one has made no step yet."""
        file = self.directory / f"pid-{rank}"
        pid = int(file.read_text() or 0) if file.exists() else 0
        return pid if Path(f"/proc/{pid}").exists() else 0

    def steps(self) -> list[int]:
        """The steps that a rank 0 has applied."""
        return [int(line) for line in (self.directory / "steps").read_text().split()]

    def close(self) -> None:
        """End it, whatever it does: other tests need its CPUs."""
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(self.name, NAMESPACE))
        self._pool.shutdown()


@functools.cache
def trained_alone() -> dict[str, Any]:
    """The model of the same loop without Ray."""
    return train({"directory": "", "epochs": EPOCHS, "alone": True})


@pytest.mark.slow
def test_a_training_changes_size_and_loses_a_worker_and_nodes_and_ends_with_the_model_of_one_worker(
    raylets: Any, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    with contextlib.closing(
        Training(tmp_path, "changed", checkpoint_config=CheckpointConfig(num_to_keep=2), callbacks=[Seen(seen)])
    ) as training:
        training.wait_for(2)
        shrinks_and_grows_in_place(training)
        killed = until(lambda: training.pid(1), "rank 1")
        os.kill(killed, signal.SIGKILL)
        until(lambda: training.pid(1) not in {0, killed}, "another rank 1")
        leaves_a_node_that_drains(training, raylets)
        raylets.remove_node(raylets.list_all_nodes()[-1], allow_graceful=False)  # and a node is lost
        training.wait_for(1)
        raylets.add_node(**NODE)
        training.wait_for(2)
        result = training.go()

    assert training.steps() == list(range(EPOCHS * STEPS_PER_EPOCH))
    assert result.return_value == trained_alone()
    assert result.error is None
    assert result.metrics["epoch"] == EPOCHS - 1
    assert result.metrics["name"] == "changed"
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [EPOCHS - 2, EPOCHS - 1]
    with result.checkpoint.as_directory() as directory:
        model = torch.load(os.path.join(directory, "model.pt"))  # noqa: PTH118
    assert {name: value.tolist() for name, value in model.items()} == result.return_value
    rows = seen.read_text().splitlines()
    assert [int(row.split()[0]) for row in rows] == list(range(EPOCHS))
    assert all(row.endswith("True") for row in rows)
    assert {row.partition(" ")[2].rpartition(" ")[0] for row in rows} <= {"[0]", "[0, 1]"}
    with pytest.raises(UsageError, match=r"no training named 'changed' runs"):
        limit_workers("changed", 1)


def shrinks_and_grows_in_place(training: Training) -> None:
    stays = until(lambda: training.pid(0), "rank 0")
    limit_workers(training.name, 1)
    training.wait_for(1)
    with pytest.raises(UsageError, match=r"workers=3 is not between 1 and 2"):
        limit_workers(training.name, 3)
    limit_workers(training.name, None)
    training.wait_for(2)
    other = RunConfig(name=training.name, storage_path=str(training.directory))
    with pytest.raises(UsageError, match=rf"a training named {training.name!r} runs on this Ray cluster"):
        ElasticTorchTrainer(train, run_config=other).fit()
    assert training.pid(0) == stays


def leaves_a_node_that_drains(training: Training, raylets: Any) -> None:
    leaves = raylets.list_all_nodes()[-1]
    drain(raylets.address, leaves.node_id, TIMEOUT_S)
    training.wait_for(1)
    until(lambda: is_empty(leaves.node_id), "the drained node is empty")
    raylets.remove_node(leaves)
    raylets.add_node(**NODE)
    training.wait_for(2)


def fit_alone(function: Any, directory: Path, **options: Any) -> Any:
    """Train with one worker."""
    run = RunConfig(name="alone", storage_path=str(directory), **options.pop("run", {}))
    return ElasticTorchTrainer(function, run_config=run, **options).fit()


def test_an_error_of_the_loop_is_that_of_fit_and_the_next_attempt_resumes_and_reports_no_epoch_again(
    raylets: Any, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    once_more = {"failure_config": FailureConfig(max_failures=1), "callbacks": [Seen(seen)]}
    dataset = ray.data.from_items([{"x": number} for number in range(20)])
    with pytest.raises(WorkerGroupError, match=r"is broken; began at checkpoint_") as failed:
        fit_alone(fail, tmp_path, train_loop_config={}, run=once_more, datasets={"train": dataset})
    assert isinstance(failed.value.worker_failures[0], ValueError)
    report, *failures = seen.read_text().splitlines()
    assert report == "0 [0] True"
    began = [line.partition("began at ")[2].partition("'")[0].partition("_")[0] for line in failures]
    assert began == ["None", "checkpoint"]
    assert f"row {list(range(20))} is broken" in failures[0]


@pytest.mark.slow
def test_after_one_workers_error_the_others_do_not_train_on_without_it(raylets: Any, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
    with pytest.raises(WorkerGroupError) as failed:
        fit_alone(one_fails, tmp_path, scaling_config=scaling, run={"callbacks": [Seen(seen)]})
    assert list(failed.value.worker_failures) == [1]
    *reports, failure = seen.read_text().splitlines()
    assert {line.partition(" ")[2] for line in reports} == {"[0, 1] False"}
    assert failure.startswith("failed {1: ValueError")


@pytest.mark.slow
def test_reports_checkpoints_and_results_are_those_of_torch_trainer(raylets: Any, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        wanted, found = pool.map(outcome_of, (TorchTrainer, ElasticTorchTrainer), (tmp_path / "ray", tmp_path / "own"))
    assert found == wanted
    assert wanted["value"]["start"] == OUTSIDE


def outcome_of(trainer: type[TorchTrainer], directory: Path) -> dict[str, Any]:
    """All that a user gets of a training that reports in all ways, with names that do not depend on the time."""
    seen = directory / "seen"
    directory.mkdir()
    run = RunConfig(
        name=f"reported-{trainer.__name__}",
        storage_path=str(directory),
        callbacks=[Seen(seen)],
        checkpoint_config=CheckpointConfig(num_to_keep=3, checkpoint_score_attribute="score"),
        failure_config=FailureConfig(max_failures=1),
    )
    scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
    result = trainer(
        in_all_ways, train_loop_config={"directory": str(directory)}, scaling_config=scaling, run_config=run
    ).fit()
    root = Path(result.path)
    return {
        "value": result.return_value,
        "error": result.error,
        "metrics": repr(result.metrics),
        "checkpoint": plain(Path(result.checkpoint.path).name),
        "kept": [(plain(Path(each.path).name), each.get_metadata(), repr(at)) for each, at in result.best_checkpoints],
        "best": plain(Path(result.get_best_checkpoint("score", "min").path).name),
        "table": result.metrics_dataframe.to_string(),
        "files": sorted(plain(str(file.relative_to(root))) for file in root.rglob("*")),
        "seen": [line.partition("(")[0] for line in seen.read_text().splitlines()],
        "states": [(Path(each.path) / "state").read_text() for each, _ in result.best_checkpoints],
    }


def plain(name: str) -> str:
    """The name of a file without the time that is in it."""
    return re.sub(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.\d+", "TIME", name)


def test_a_node_without_an_actor_is_empty_when_it_drains(raylets: Any) -> None:
    node = raylets.add_node(**NODE)
    drain(raylets.address, node.node_id, 60.0)
    assert is_empty(node.node_id)
    raylets.remove_node(node)


def test_a_ray_dataset_is_computed_once_and_its_rows_are_read_by_number(raylets: Any) -> None:
    shards = shards_of({"train": lambda: ray.data.from_items([{"x": number} for number in range(20)])})
    rows = shards.get_dataset_shard(SimpleNamespace(dataset_name="train"))
    assert sorted(rows[number]["x"].item() for number in range(len(rows))) == list(range(20))
    with pytest.raises(UsageError, match=r"get_dataset_shard\('test'\): datasets=.* of the trainer has \['train'\]"):
        shards.get_dataset_shard(SimpleNamespace(dataset_name="test"))


@pytest.mark.slow
def test_each_row_of_a_streamed_dataset_is_trained_once_an_epoch_through_two_one_and_two_workers(
    raylets: Any, tmp_path: Path
) -> None:
    rows = ray.data.from_items([{"x": number} for number in range(ROWS)], override_num_blocks=7)
    trainer = ElasticTorchTrainer(
        over_stream,
        train_loop_config={"directory": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(name="stream", storage_path=str(tmp_path / "results")),
        datasets={"train": rows.map_batches(drawn, num_cpus=0.5)},
    )
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(trainer.fit)
        for size in (2, 1, 2):
            until(lambda: limited("stream", size), "the training")  # noqa: B023
            until(lambda: future.done() or current_workers("stream") == size, f"{size} workers")  # noqa: B023
        (tmp_path / "go").touch()
        future.result(TIMEOUT_S)
    files = [file.read_text().splitlines() for file in tmp_path.glob("seen-*")]
    seen = [line.split() for lines in files for line in without_an_ended_workers_last_step(lines, files)]
    wanted = [(epoch, number) for epoch in range(STREAM_EPOCHS) for number in range(ROWS)]
    assert sorted((int(epoch), int(number)) for epoch, number, _ in seen) == wanted
    assert len({drawn for _, _, drawn in seen}) == len(wanted)  # computed again in each epoch
    assert "data-usage-metrics-poller" not in {thread.name for thread in threading.enumerate()}


def without_an_ended_workers_last_step(lines: list[str], files: list[list[str]]) -> list[str]:
    """Leave out the rows of a worker that was killed, since it could not leave in time, if the others did its step."""
    rows = [[line.split()[:2] for line in other] for other in files if other is not lines]
    last = [line.split()[:2] for line in lines[-4:]]
    return lines[:-4] if any(all(row in other for row in last) for other in rows) else lines


def limited(name: str, size: int) -> bool:
    """Limit the size; False: the training does not run yet."""
    try:
        limit_workers(name, size)
    except UsageError:
        return False
    return True
