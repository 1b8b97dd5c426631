"""What `ray.train.report`, `get_context` and the others do in the loop of an elastic worker.

Ray's own context does the work: it checks what is reported, uploads checkpoints, keeps the order. Replaced is what
needs a fixed group: ranks are those of the job, which change; a checkpoint's directory is named by the controller; and
a report goes there with its point in the training.
"""

from __future__ import annotations

import queue
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import ray

from elastic_runtime.errors import UsageError
from elastic_runtime.integrations.ray.ray_internals import (
    DistributedContext,
    DistributedTrainFnUtils,
    ExecutionContext,
    PreemptionContext,
    TrainContext,
    TrainRunContext,
    set_train_context,
    set_train_fn_utils,
)
from elastic_runtime.integrations.ray.reports import Point
from elastic_runtime.integrations.ray.unmodified.driver import LoopDriver, LoopOptions, Others
from elastic_runtime.integrations.ray.unmodified.names import replace_names
from elastic_runtime.loop.trainings_of_process import current_job

if TYPE_CHECKING:
    from typing import NoReturn

    from elastic_runtime.loop.job import Job


class BackgroundErrors:
    """Stands for Ray's runner of the training thread: collects what fails in the thread that uploads checkpoints."""

    def __init__(self) -> None:
        self._errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def get_exception_queue(self) -> queue.SimpleQueue[BaseException]:
        """Return where that thread puts its errors."""
        return self._errors

    def check(self) -> None:
        """Raise what has failed."""
        if not self._errors.empty():
            error = self._errors.get()
            raise getattr(error, "_base_exc", error)


class Channel(Others, Protocol):
    """Where a worker's context asks what concerns all workers. `actor` is what Ray's own functions ask, if anything."""

    actor: Any

    def directory_of(self, point: Point, wanted: str | None) -> str | None:
        """Return the name of the checkpoint directory of this point, the same for all workers.

        None where the point was recorded before, in an attempt that this one continues.
        """

    def report(self, worker: str, point: Point, members: tuple[str, ...], report: Any) -> None:
        """Record a worker's report."""

    def nodes_of(self, workers: tuple[str, ...]) -> list[str]:
        """Return the nodes of these workers."""


class ActorChannel:
    """The controller of the training, an actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def directory_of(self, point: Point, wanted: str | None) -> str | None:
        """Ask the controller."""
        name: str | None = ray.get(self.actor.directory_of.remote(point, wanted))
        return name

    def report(self, worker: str, point: Point, members: tuple[str, ...], report: Any) -> None:
        """Return once the controller has recorded it."""
        ray.get(self.actor.report.remote(worker, point, members, report))

    def nodes_of(self, workers: tuple[str, ...]) -> list[str]:
        """Ask the controller."""
        return list(ray.get(self.actor.nodes_of.remote(workers)))

    def epoch(self) -> int:
        """Ask the controller."""
        return int(ray.get(self.actor.epoch.remote()))

    def note_epoch(self, epoch: int) -> None:
        """Send it to the controller."""
        self.actor.note_epoch.remote(epoch)

    def agreed_batch(self, size: int) -> int:
        """Ask the controller."""
        return int(ray.get(self.actor.agreed_batch.remote(size)))


class _RecordedBefore(Exception):  # noqa: N818  (ends a call of Ray's own function early, and reaches nobody)
    """The report's point was recorded before."""


class ReportQueue:
    """Stands for the queue that Ray's controller polls: sends each report to ours, with its point and the workers."""

    def __init__(self, channel: Channel, worker: str) -> None:
        self._channel, self._worker = channel, worker
        self.calls: deque[tuple[Point, tuple[str, ...]]] = deque()

    def put(self, report: Any) -> None:
        """Send it, and return once the controller has recorded it."""
        point, members = self.calls.popleft()
        self._channel.report(self._worker, point, members, report)


class ElasticTrainContext(TrainContext):  # type: ignore[misc]
    """The context of one worker. `provisional`: the workers by rank until the loop begins, this one included."""

    _worker: str
    _channel: Channel
    _provisional: tuple[str, ...]
    _nodes: tuple[tuple[str, ...], list[str]]
    _point: Point
    driver: LoopDriver

    @classmethod
    def make(
        cls,
        run: TrainRunContext,
        channel: Channel,
        worker: str,
        provisional: tuple[str, ...],
        checkpoint: Any,
        report_index: int,
        shards: Any,
        options: LoopOptions,
    ) -> ElasticTrainContext:
        """Return the context that the training function of this process gets."""
        errors = BackgroundErrors()
        self = cls(
            train_run_context=run,
            distributed_context=DistributedContext(0, 1, 0, 1, 0),  # asked for nowhere: all that read it are replaced
            execution_context=ExecutionContext(None, ReportQueue(channel, worker), errors, []),
            storage_context=run.run_config.storage_context,
            preemption_context=PreemptionContext(),
            controller_actor=channel.actor,
            dataset_shard_provider=shards,
            has_validation_fn=False,
            checkpoint=checkpoint,
            current_report_index=report_index,
        )
        self._channel, self._worker, self._provisional = channel, worker, provisional
        self._nodes, self._point = ((), []), Point(0, -1, 0)
        self.driver = LoopDriver(options, channel)
        return self

    def install(self) -> None:
        """Let the functions of `ray.train` in this process use this context, and what a loop prepares be the job's."""
        set_train_context(self)
        set_train_fn_utils(ElasticTrainFnUtils())
        self.driver.begin_alone()
        replace_names(self.driver)

    def finish(self) -> None:
        """Wait for the checkpoints that are being uploaded. Raises what failed."""
        self.checkpoint_upload_threadpool.shutdown()
        self.execution_context.training_thread_runner.check()

    def report(self, *args: Any, **options: Any) -> None:
        """Report as Ray does, after an upload in the background that failed has been raised.

        What the other workers, or an attempt that this one continues, have reported is not reported again.
        """
        if self.driver.replaying:
            return
        self.execution_context.training_thread_runner.check()
        try:
            super().report(*args, **options)
        except _RecordedBefore:
            self.report_call_index -= 1  # as Ray does for a report that it skips

    def get_all_reported_checkpoints(self, *args: Any, **options: Any) -> Any:
        """Return what Ray's controller would. UsageError where there is no controller."""
        if self._channel.actor is None:
            raise UsageError(
                "ray.train.get_all_reported_checkpoints() needs ElasticTorchTrainer's own workers; in a job of the "
                "cluster use ray.train.get_checkpoint(), or the Result of fit()"
            )
        return super().get_all_reported_checkpoints(*args, **options)

    def get_world_size(self) -> int:
        """Return how many workers train now."""
        return len(self._members())

    def get_world_rank(self) -> int:
        """Return this worker's rank now."""
        return self._members().index(self._worker)

    def get_local_rank(self) -> int:
        """Return this worker's rank among those of its node."""
        nodes, rank = self._nodes_by_rank(), self.get_world_rank()
        return nodes[:rank].count(nodes[rank])

    def get_local_world_size(self) -> int:
        """Return how many workers train on this worker's node."""
        nodes = self._nodes_by_rank()
        return nodes.count(nodes[self.get_world_rank()])

    def get_node_rank(self) -> int:
        """Return the position of this worker's node among the nodes, in the order of ranks."""
        nodes = self._nodes_by_rank()
        return list(dict.fromkeys(nodes)).index(nodes[self.get_world_rank()])

    def get_synchronization_actor(self) -> NoReturn:
        """Refuse what Ray's barrier is needed for."""
        raise UsageError(
            "ray.train.collective needs a fixed group, and this one changes: use job.repeat, job.all_reduce or "
            "job.all_gather of elastic_runtime"
        )

    def _members(self) -> tuple[str, ...]:
        job = current_job()
        return (job.members if job else ()) or self._provisional

    def _nodes_by_rank(self) -> list[str]:
        members = self._members()
        if self._nodes[0] != members:
            self._nodes = (members, self._channel.nodes_of(members))
        return self._nodes[1]

    def _sync_checkpoint_dir_name_across_ranks(self, checkpoint_dir_name: str | None = None) -> str:
        """Note the point of this call of `report`; return the name that all workers get for it."""
        job = training_job()
        epoch, step = job.position.epoch, job.position.step
        same = (self._point.epoch, self._point.step) == (epoch, step)
        self._point = Point(epoch, step, self._point.call + 1 if same else 0)
        name = self._channel.directory_of(self._point, checkpoint_dir_name)
        if name is None:
            raise _RecordedBefore
        self.execution_context.result_queue.calls.append((self._point, job.members))
        return name


class ElasticTrainFnUtils(DistributedTrainFnUtils):  # type: ignore[misc]
    """The functions of `ray.train` in an elastic worker."""

    def is_distributed(self) -> bool:
        """Whether Ray has assigned the devices: in a job of a cluster of this project the process sees its own only.

        `ray.train.torch.get_device` asks; it would start Ray there.
        """
        return bool(ray.is_initialized())

    def get_preemption_info(self) -> None:
        """Return nothing: a worker leaves at the end of a step by itself, and the others train on."""


def training_job() -> Job:
    """Return the job whose loop this process runs. UsageError where there is none yet."""
    job = current_job()
    if job is None or not job.members:
        raise UsageError(
            "ray.train.report is called before the training has begun; call it inside `for epoch in job.epochs(...)`, "
            "of a job of elastic_runtime.init()"
        )
    return job
