"""`fit` in a worker of an elastic job: the loop runs in this process, and the cluster's quota decides the size.

Under our daemon (`gpuquota submit --elastic -- python train.py`), on Kubernetes, or wherever ELASTIC_COORDINATOR is
set, each worker's process runs the whole script, as under torchrun. No Ray process is needed. Rank 0 records the
reports, in the storage of the run: so the next rank 0 continues with what is there.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from elastic_runtime.errors import UsageError
from elastic_runtime.integrations.ray.datasets import Shards
from elastic_runtime.integrations.ray.first_checkpoint import FirstCheckpoint
from elastic_runtime.integrations.ray.loop_api import ElasticTrainContext
from elastic_runtime.integrations.ray.ray_internals import (
    CheckpointManager,
    CheckpointManagerInitializationError,
    TrainingReport,
    TrainRunContext,
    WorkerGroupError,
    forget,
    result_of,
)
from elastic_runtime.integrations.ray.reports import Point
from elastic_runtime.integrations.ray.worker import FAILED, Outcome, outcome_of, own_temporary_directory
from elastic_runtime.sharded.files import whole_ones

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.train import Checkpoint, Result

    from elastic_runtime.integrations.ray.unmodified.driver import LoopOptions

UNNAMED = "ray_train_run-"
WRITTEN_S = 10.0
"""Far longer than the list of checkpoints takes to be written."""


class StoredReports:
    """A `loop_api.Channel` without a controller: what all workers have in common is the storage of the run."""

    actor = None

    def __init__(self, run: TrainRunContext) -> None:
        self._run = run
        self._recorded: CheckpointManager | None = None  # while no other worker records
        storage = run.run_config.storage_context
        self._files = storage.storage_filesystem
        self._directory = f"{storage.experiment_fs_path}/.elastic_runtime"
        self._last_file = f"{self._directory}/reported-{os.environ.get('JOB_UUID', '')}"
        own = os.environ.get("ELASTIC_CHECKPOINT_DIR")
        self._before = self._last_point() if own and whole_ones(own) else None

    def checkpoints(self) -> CheckpointManager:
        """Return the checkpoints as they are in the storage now.

        Ray writes their list in place, so that it may be read while rank 0 is writing it.
        """
        config = self._run.run_config
        end = time.monotonic() + WRITTEN_S
        while True:
            try:
                return CheckpointManager(config.checkpoint_config, config.storage_context)
            except CheckpointManagerInitializationError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def first_checkpoint(self) -> Checkpoint | None:
        """Return the newest checkpoint of when the job's first worker began: an unmodified loop counts epochs from it.

        What was trained since is in the job's own checkpoints, if there are some.
        """
        first = FirstCheckpoint(self._run.run_config.storage_context, os.environ.get("JOB_UUID", ""))
        if first.kept:
            return first.read()
        newest = self.checkpoints().latest_checkpoint_result
        return first.keep(newest.checkpoint if newest else None)

    def directory_of(self, point: Point, wanted: str | None) -> str | None:
        """Return a name made of the point: no worker asks another one. None where it was recorded before.

        That is what was recorded before this process began, if its loop resumes at a checkpoint of the job.
        """
        if self._before is not None and point <= self._before:
            return None
        return wanted or f"checkpoint_{point.step:09d}_{point.call}"

    def report(self, worker: str, point: Point, members: tuple[str, ...], report: TrainingReport) -> None:
        """Record the report of rank 0. It does not wait for parts of the checkpoint that other workers upload."""
        if worker != members[0]:
            self._recorded = None
            return
        self._recorded = self._recorded or self.checkpoints()
        asyncio.run(self._record(self._recorded, report))
        self._files.create_dir(self._directory, recursive=True)
        with self._files.open_output_stream(self._last_file) as file:
            file.write(json.dumps(astuple(point)).encode())

    def nodes_of(self, workers: tuple[str, ...]) -> list[str]:
        """Return a node for each worker: it sees its own devices only, so its local rank is 0."""
        return list(workers)

    def epoch(self) -> int:
        """Return 0: a worker that joins runs through the epochs while the others wait for it."""
        return 0

    def note_epoch(self, epoch: int) -> None:
        """Do nothing: nobody asks."""

    def agreed_batch(self, size: int) -> int:
        """Return the size: workers that have different ones are refused as they join."""
        return size

    def _last_point(self) -> Point | None:
        """Return the last point that was recorded; None where none was, or its writer was killed."""
        try:
            with self._files.open_input_stream(self._last_file) as file:
                return Point(*json.loads(file.read()))
        except (OSError, ValueError):
            return None

    async def _record(self, checkpoints: CheckpointManager, report: TrainingReport) -> None:
        if report.checkpoint:  # of the same point, where the job began again and had no checkpoint of its own
            forget(checkpoints, report.checkpoint)
        checkpoints.after_report(report, [report.metrics])
        for callback in self._run.run_config.callbacks:
            callback.after_report(run_context=self._run, metrics=[report.metrics], checkpoint=report.checkpoint)


def in_elastic_job() -> bool:
    """Whether this process is a worker of an elastic job."""
    return bool(os.environ.get("ELASTIC_COORDINATOR"))


def fit(run: TrainRunContext, function: Callable[[], Any], options: LoopOptions, *, with_datasets: bool) -> Result:
    """Run the training function in this process, and return the run's result; WorkerGroupError as TorchTrainer."""
    if with_datasets:
        raise UsageError(
            "datasets={...} needs ElasticTorchTrainer's own workers; in a job of the cluster read the data in the loop"
        )
    if run.run_config.name.startswith(UNNAMED):  # a date, which differs between workers
        run.run_config.name = f"{os.environ.get('JOB_NAME', 'job')}-{os.environ.get('JOB_UUID', '')[:8]}".strip("-")
    channel = StoredReports(run)
    worker = os.environ.get("ELASTIC_WORKER_ID", "")
    expected = (worker, *(f"worker {number}" for number in range(2, options.least + 1)))  # no worker knows the others
    context = ElasticTrainContext.make(
        run, channel, worker, expected, channel.first_checkpoint(), 0, Shards(None, []), options
    )
    context.install()
    with own_temporary_directory():
        outcome: Outcome = outcome_of(context, function, leave=True)
    if outcome.kind == FAILED:
        assert outcome.error is not None
        raise WorkerGroupError(outcome.text, {outcome.rank: outcome.error})
    result = result_of(channel.checkpoints(), run.run_config.storage_context)
    result.return_value = outcome.value
    return result
