"""The actor that is one worker: it runs the training function in its main thread, and reports how it ended."""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from elastic_runtime.errors import UsageError
from elastic_runtime.integrations.ray.loop_api import ActorChannel, ElasticTrainContext
from elastic_runtime.integrations.ray.unmodified.driver import PREPARE, LoopOptions
from elastic_runtime.loop.trainings_of_process import current_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic_runtime.loop.job import Job

FINISHED = "finished"
LEFT = "left"
FAILED = "failed"
LOOPBACK = "127."


@dataclass(frozen=True)
class Task:
    """What a worker needs. `functions` holds one reference: one that is a plain argument would be fetched by Ray."""

    worker: str
    job: str
    functions: tuple[Any, ...]
    run: Any
    provisional: tuple[str, ...]
    url: str
    authority: str = field(repr=False)
    token: str = field(repr=False)
    checkpoints: str
    checkpoint: Any
    report_index: int
    shards: Any
    options: LoopOptions


@dataclass(frozen=True)
class Outcome:
    """How the training function ended: with what it returned, by leaving the job, or with an error."""

    kind: str
    rank: int
    value: Any = None
    error: BaseException | None = None
    text: str = ""


class TrainWorker:
    """One worker of one training. Ray's methods run in the main thread, so the loop can handle signals.

    `name` is what Ray's lists and logs call it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def place(self) -> str:
        """Return the id of this worker's node."""
        return str(ray.get_runtime_context().get_node_id())

    def run(self, controller: Any, task: Task) -> Outcome:
        """Run the training function. Its error is returned, not raised: Ray would wrap it."""
        with own_temporary_directory() as directory:
            _set_environment(task, directory)
            channel, run = ActorChannel(controller), task.run
            context = ElasticTrainContext.make(
                run,
                channel,
                task.worker,
                task.provisional,
                task.checkpoint,
                task.report_index,
                task.shards,
                task.options,
            )
            context.driver.restarts = True
            context.install()
            if os.environ.get("RAY_CHDIR_TO_TRIAL_DIR", "1") == "1":  # as TorchTrainer does
                working = Path(context.storage_context.local_working_directory)
                working.mkdir(parents=True, exist_ok=True)
                os.chdir(working)
            return outcome_of(context, lambda: ray.get(task.functions[0])())  # noqa: PLW0108 - got where errors are caught


@contextlib.contextmanager
def own_temporary_directory() -> Iterator[Path]:
    """Let temporary files be in a directory of this worker: Ray's callback for Lightning names its own after the rank,
    which is that of another worker of the same machine after a change of size.
    """
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="elastic-", ignore_cleanup_errors=True) as directory:
        tempfile.tempdir = directory
        try:
            yield Path(directory)
        finally:
            tempfile.tempdir = before


def _set_environment(task: Task, directory: Path) -> None:
    (directory / "token").write_text(task.token)
    (directory / "ca.crt").write_text(task.authority)
    address = str(ray.util.get_node_ip_address())
    os.environ.update(
        {
            "JOB_NAME": task.run.run_config.name,
            "ELASTIC_COORDINATOR": f"{task.url}/v1/membership/{task.job}",
            "ELASTIC_WORKER_ID": task.worker,
            "ELASTIC_TOKEN_FILE": str(directory / "token"),
            "ELASTIC_CA_FILE": str(directory / "ca.crt"),
        }
    )
    if task.checkpoints:
        os.environ.setdefault("ELASTIC_CHECKPOINT_DIR", task.checkpoints)
    if address.startswith(LOOPBACK):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def outcome_of(context: ElasticTrainContext, function: Callable[[], Any], *, leave: bool = False) -> Outcome:
    """Run the training function, and return how it ended. `leave`: the process ends where the worker leaves the job."""
    try:
        value = function()
        context.driver.finish()
        context.finish()
        if not _nothing_was_left(context):
            used_job().close()
        return Outcome(FINISHED, context.get_world_rank(), value=value)
    except SystemExit as end:
        job = current_job()
        if job is not None and job.leaving and not end.code:
            if leave:
                raise
            return Outcome(LEFT, 0)
        return _failed(context, end)
    except BaseException as error:  # noqa: BLE001  (the user's, whatever it is)
        return _failed(context, error)


def _nothing_was_left(context: ElasticTrainContext) -> bool:
    """Whether the loop continued at a checkpoint of its end: workers were lost after its last report."""
    return current_job() is None and bool(context.driver.models) and context.get_checkpoint() is not None


def used_job() -> Job:
    """Return the job that the training function has made. UsageError where it has made none."""
    job = current_job()
    if job is None:
        raise UsageError(
            "train_loop_per_worker has ended, and its workers never trained together: it prepared no model, or no "
            f"loader; write: {PREPARE} (see docs/guides/ray_train.md)"
        )
    return job


def _failed(context: ElasticTrainContext, error: BaseException) -> Outcome:
    text = "".join(traceback.format_exception(error))
    rank = 0
    with contextlib.suppress(ValueError):
        rank = context.get_world_rank()
    try:
        ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001  (an exception may refuse to be pickled in any way)
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Outcome(FAILED, rank, error=error.with_traceback(None), text=text)
