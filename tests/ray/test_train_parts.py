"""The parts of ElasticTorchTrainer that need no cluster, and those of Ray that are not public."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

import torch
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from elastic_runtime.errors import UsageError
from elastic_runtime.integrations.ray import ElasticTorchTrainer, ray_internals
from elastic_runtime.integrations.ray.controller import PROGRAM
from elastic_runtime.integrations.ray.datasets import Shards
from elastic_runtime.integrations.ray.first_checkpoint import FirstCheckpoint
from elastic_runtime.integrations.ray.in_process import StoredReports
from elastic_runtime.integrations.ray.loop_api import training_job
from elastic_runtime.integrations.ray.ray_internals import TrainingReport
from elastic_runtime.integrations.ray.reports import Point, Reports
from elastic_runtime.integrations.ray.unmodified.loaders import LoaderSource
from elastic_runtime.integrations.ray.worker import FAILED, FINISHED, outcome_of, used_job
from tests.forked import run
from tests.ray import fixed_loops
from tests.ray.train_loops import train

FIRST, SECOND = Point(0, 16, 0), Point(1, 32, 0)


def test_a_report_is_complete_when_all_who_trained_there_have_reported_and_is_ordered_by_rank() -> None:
    reports: Reports[str] = Reports()
    assert reports.add(FIRST, "w1", ("w0", "w1"), "b") == []
    assert reports.add(FIRST, "w0", ("w0", "w1"), "a") == [["a", "b"]]


def test_a_report_does_not_wait_for_a_worker_that_was_lost() -> None:
    reports: Reports[str] = Reports()
    assert reports.add(FIRST, "w1", ("w0", "w1"), "b") == []
    assert reports.end("w0") == [["b"]]
    assert reports.add(SECOND, "w1", ("w1",), "c") == [["c"]]


def test_a_fast_worker_is_one_report_ahead() -> None:
    reports: Reports[str] = Reports()
    members = ("w0", "w1")
    assert reports.add(FIRST, "w0", members, "a") == reports.add(SECOND, "w0", members, "c") == []
    assert reports.add(FIRST, "w1", members, "b") == [["a", "b"]]
    assert reports.add(SECOND, "w1", members, "d") == [["c", "d"]]


def test_a_worker_that_joined_after_a_report_is_not_waited_for() -> None:
    reports: Reports[str] = Reports()
    assert reports.add(FIRST, "w0", ("w0",), "a") == [["a"]]
    assert reports.add(SECOND, "w0", ("w0", "w1"), "b") == []


def test_what_an_earlier_attempt_has_recorded_is_not_recorded_again() -> None:
    reports: Reports[str] = Reports()
    reports.add(FIRST, "w0", ("w0",), "a")
    assert reports.recorded(FIRST)
    assert reports.add(FIRST, "w0", ("w0",), "again") == []
    resumed: Reports[str] = Reports(reports.last)
    assert resumed.recorded(Point(0, 12, 0))  # the same epoch, with more workers
    assert not resumed.recorded(SECOND)
    assert resumed.last == FIRST


def record(directory: Path) -> list[str | None]:
    """Report two epochs as rank 0 of a job that has begun now; return the names of the checkpoints' directories."""
    config = RunConfig(name="run", storage_path=str(directory), checkpoint_config=CheckpointConfig(num_to_keep=3))
    channel = StoredReports(SimpleNamespace(run_config=config))
    names = [channel.directory_of(point, None) for point in (FIRST, SECOND)]
    for name, point in zip(names, (FIRST, SECOND), strict=True):
        if name is not None:
            (directory / "run" / name).mkdir(parents=True, exist_ok=True)
            saved = Checkpoint(str(directory / "run" / name))
            channel.report("w0", point, ("w0",), TrainingReport(saved, {"epoch": point.epoch}, validation=False))
    assert [result.metrics["epoch"] for result in channel.checkpoints().best_checkpoint_results] == [0, 1]
    return names


def test_a_job_that_begins_again_lists_no_checkpoint_twice_and_one_that_resumes_reports_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the first, Ray's list names a directory that `num_to_keep` has deleted, and no later process reads it."""
    monkeypatch.setenv("ELASTIC_CHECKPOINT_DIR", str(tmp_path))
    names = ["checkpoint_000000016_0", "checkpoint_000000032_0"]
    assert record(tmp_path) == names
    assert record(tmp_path) == names
    (tmp_path / "checkpoint-000000000040.elastic").touch()
    assert record(tmp_path) == [None, None]


@pytest.mark.parametrize(
    ("scaling", "sentence"),
    [
        ({"num_workers": 0}, r"num_workers=0\) must be 1 at least"),
        ({"num_workers": (0, 2)}, r"num_workers=\(0, 2\)\) must be 1 at least"),
        ({"num_workers": (1, 2), "placement_strategy": "STRICT_PACK"}, r"'STRICT_PACK'\) holds for a fixed group only"),
        ({"num_workers": (1, 2), "label_selector": [{}, {}]}, r"must be one dict: workers come and go"),
        ({"num_workers": 1, "use_tpu": True}, r"use_tpu=True\) is not supported"),
    ],
)
def test_what_cannot_be_elastic_is_refused_in_one_sentence(scaling: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as refused:
        ElasticTorchTrainer(train, scaling_config=ScalingConfig(**scaling), run_config=RunConfig(name="refused"))
    assert "\n" not in str(refused.value)


def test_the_private_parts_of_ray_train_are_as_they_were() -> None:
    context = {"train_run_context", "distributed_context", "execution_context", "storage_context", "checkpoint",
               "preemption_context", "controller_actor", "dataset_shard_provider", "current_report_index"}  # fmt: skip
    assert context <= set(inspect.signature(ray_internals.TrainContext).parameters)
    for method in ("report", "_sync_checkpoint_dir_name_across_ranks", "get_result_queue", "get_synchronization_actor"):
        assert callable(getattr(ray_internals.TrainContext, method)), method
    for method in ("after_report", "get_all_reported_checkpoints"):
        assert callable(getattr(ray_internals.CheckpointManager, method)), method
    assert list(inspect.signature(ray_internals.ExecutionContext).parameters) == [
        "synchronization_actor", "result_queue", "training_thread_runner", "train_context_callbacks"
    ]  # fmt: skip
    assert ray_internals.resources_of(ScalingConfig(num_workers=1, use_gpu=True))["GPU"] == 1


def test_a_report_before_the_training_says_where_it_belongs() -> None:
    with pytest.raises(UsageError, match=r"before the training has begun; call it inside `for epoch in job.epochs"):
        training_job()


def test_a_loop_that_prepares_nothing_is_refused_at_its_end() -> None:
    with pytest.raises(UsageError, match=r"has ended, and its workers never trained together.*prepare_model"):
        used_job()


@pytest.mark.parametrize(("checkpoint", "kind"), [("checkpoint", FINISHED), (None, FAILED)])
def test_a_loop_that_continues_at_a_checkpoint_of_its_end_has_nothing_left_to_train(
    checkpoint: str | None, kind: str
) -> None:
    driver = SimpleNamespace(models=[torch.nn.Linear(1, 1)], finish=lambda: None)
    context: Any = SimpleNamespace(
        driver=driver, finish=lambda: None, get_world_rank=lambda: 0, get_checkpoint=lambda: checkpoint
    )
    assert outcome_of(context, lambda: 7).kind == kind


SLOW = {"with_transformers", "with_lightning"}  # seconds for imports


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in fixed_loops.LOOPS]
)
def test_a_loop_that_cannot_be_elastic_is_told_the_line_to_change_before_its_first_step(
    name: str, tmp_path: Path
) -> None:
    ended = run(fixed_loops.main, name, str(tmp_path), cwd=tmp_path)
    named = r"(write: |leave it out|use RayDDPStrategy).*docs/guides/ray_train.md"
    assert re.search(named, ended.stdout), ended.stdout + ended.stderr


def test_an_unknown_dataset_is_named() -> None:
    info = SimpleNamespace(dataset_name="valid")
    with pytest.raises(
        UsageError, match=r"get_dataset_shard\('valid'\): datasets=\{...\} of the trainer has \['train'\]"
    ):
        Shards(None, ["train"]).get_dataset_shard(info)


def test_the_checkpoint_with_which_an_attempt_began_outlives_the_original(tmp_path: Path) -> None:
    original = tmp_path / "run" / "checkpoint_1"
    original.mkdir(parents=True)
    (original / "model.pt").write_text("weights")
    storage = RunConfig(name="run", storage_path=str(tmp_path)).storage_context
    first = FirstCheckpoint(storage, "attempt")
    assert not first.kept
    first.keep(Checkpoint(str(original)))
    shutil.rmtree(original)
    kept = FirstCheckpoint(storage, "attempt").read()
    assert kept is not None
    assert Path(kept.path).name == "checkpoint_1"
    assert (Path(kept.path) / "model.pt").read_text() == "weights"
    first.drop()
    assert not first.kept
    assert first.keep(None) is None
    assert first.read() is None


def test_a_coordinator_that_cannot_listen_says_why_in_one_sentence() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", PROGRAM, "--address", "203.0.113.1"], input=b"", capture_output=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.decode().startswith("workers cannot be served at 203.0.113.1:0")


@pytest.mark.parametrize("own", [False, True], ids=["prepared", "sampler of the loop"])
def test_a_loop_that_continues_at_a_checkpoint_has_the_orders_of_its_epochs(*, own: bool) -> None:
    """The job of each attempt begins with its epoch 0."""
    driver: Any = SimpleNamespace(make_job=lambda size, loader_of: (None, loader_of(size)))
    data = TensorDataset(torch.arange(32.0))
    sampler: DistributedSampler[Any] = DistributedSampler(data, 1, 0)
    loader = DataLoader(data, batch_size=4, sampler=sampler) if own else DataLoader(data, batch_size=4, shuffle=True)
    source = LoaderSource(loader, driver)
    (sampler if own else source.order).set_epoch(3)
    order = source.make_job()[1].sampler
    for epoch in range(2):
        order.set_epoch(epoch)
        sampler.set_epoch(3 + epoch)
        assert list(order) == list(sampler)
