"""What a job says of this worker and of where the training stands, and whom it calls when that changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_runtime.errors import LoopError
from elastic_runtime.process.reporting import MetricRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_runtime.loop.member import Member
    from elastic_runtime.loop.session import Session
    from elastic_runtime.plan.position import Position


class JobView:
    """The properties of a job, which change as the training goes on, its figures, and a script's callbacks."""

    _member: Member
    _session: Session | None = None

    def __init__(self) -> None:
        self._on_leader: list[Callable[[], None]] = []

    @property
    def rank(self) -> int:
        """This worker's rank now; it may change at each step. LoopError before the loop begins."""
        return self._member.rank_and_size[0]

    @property
    def world_size(self) -> int:
        """The number of workers that train now. LoopError before the loop begins."""
        return self._member.rank_and_size[1]

    @property
    def is_leader(self) -> bool:
        """Whether this worker is rank 0, which prints and saves. False before the loop, when ranks are undetermined."""
        return self._member.placed and self.rank == 0

    @property
    def placed(self) -> bool:
        """Whether this worker has a rank: from the loop's beginning on."""
        return self._member.placed

    @property
    def members(self) -> tuple[str, ...]:
        """The ids of the workers that train now, by rank; empty before the loop, and without a coordinator."""
        return self._member.members

    @property
    def leaving(self) -> bool:
        """Whether this worker is leaving the job."""
        return self._member.leaving

    @property
    def step(self) -> int:
        """Global steps applied so far, over all epochs and all sizes; within an iteration: before it."""
        return self._prepared.steps_before

    @property
    def noise_scale(self) -> float | None:
        """The gradient noise scale in samples (McCandlish et al., 2018), the same on all workers; None while it is
        unknown, and without `noise_scale=True`. It is measured in steps of at least two micro-batches.
        """
        noise = self._prepared.noise
        return noise.averages.noise_scale if noise else None

    @property
    def gain(self) -> float:
        """How many steps of `global_batch_size` the newest step is worth (AdaScale); 1 if that is not measured."""
        noise = self._prepared.noise
        return noise.gain if noise else 1.0

    @property
    def scaled_steps(self) -> float:
        """The sum of the gains of the steps applied so far: what `job.step` counts, if that is not measured."""
        noise = self._prepared.noise
        return noise.scaled_steps if noise else float(self.step)

    @property
    def applied(self) -> bool:
        """Whether this iteration completes a global step, so that the optimizer acts in it."""
        return self._prepared.applied

    @property
    def dropped(self) -> bool:
        """Whether what this iteration computes is dropped, since a worker was lost in it: its step is repeated."""
        return self._prepared.dropped

    @property
    def samples(self) -> int:
        """The number of samples of this iteration; 0 where they are copies, of a worker without one in a small step."""
        micro = self._prepared.micro_batch
        return micro.size if micro else 0

    @property
    def begins_step(self) -> bool:
        """Whether this iteration is the first one of a global step, or of its repetition; before job.backward."""
        return self._prepared.begins_step

    @property
    def position(self) -> Position:
        """The training's position after this iteration: epoch, steps of it, total steps."""
        return self._prepared.reached

    @property
    def _prepared(self) -> Session:
        if self._session is None:
            raise LoopError("job.prepare(model, optimizer, loader) comes before this")
        return self._session

    # Reports and callbacks

    def report(self, **metrics: float) -> None:
        """Write the script's own figures (loss, accuracy) to the report file; send them with the next progress."""
        if self._session is not None and self._session.reruns:
            return  # of a step that was reported before
        self._member.reporter.metrics(self.step, {name: float(value) for name, value in metrics.items()})

    def on_report(self, callback: Callable[..., object]) -> Callable[..., object]:
        """Call `callback(metrics, step=step)` on rank 0 with the figures of each step that `report` got, once.

        So `job.on_report(run.log)` of Weights & Biases, or `job.on_report(mlflow.log_metrics)`, log one row for each
        step through changes of size: of a step that was repeated the last figures, and the rows of a lost rank 0 by
        the worker that becomes rank 0. An exception is logged, and training continues.
        """
        rows = MetricRows(lambda: self.is_leader, callback)
        reporter = self._member.reporter
        reporter.listen("metrics", lambda line: rows.add(line["step"], _figures(line)))
        for event in ("left", "finished"):
            reporter.listen(event, rows.flush)
        return callback

    def on_resize(self, callback: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        """Call it in the loop after each change of the membership; the report file's line for it is its argument."""
        return self._member.reporter.listen("resize", callback)

    def on_leader(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call it once, in the loop, where this worker is rank 0: when the loop begins, or when it becomes rank 0."""
        self._on_leader.append(callback)
        self._member.reporter.listen("resize", lambda _line: self._call_leader())
        if self._session is not None and self._session.started:
            self._call_leader()
        return callback

    def _call_leader(self) -> None:
        if not self.is_leader:
            return
        callbacks, self._on_leader = self._on_leader, []
        for callback in callbacks:
            callback()

    def on_preempt(self, callback: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        """Call `callback` in the loop when this worker must leave, before it exits."""
        return self._member.reporter.listen("left", callback)

    def on_checkpoint(self, callback: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        """Call it, in the thread that wrote it, when a checkpoint of this worker's is durable."""
        return self._member.reporter.listen("checkpoint", callback)


def _figures(line: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line of the report file."""
    return {name: value for name, value in line.items() if isinstance(value, float)}
