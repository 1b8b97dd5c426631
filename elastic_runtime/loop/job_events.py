"""A job's figures, and a script's callbacks for what happens to the job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_runtime.loop.job_view import JobView
from elastic_runtime.process.reporting import MetricRows

if TYPE_CHECKING:
    from collections.abc import Callable


class JobEvents(JobView):
    """Reports figures, and calls a script's functions in its loop."""

    def __init__(self) -> None:
        self._on_leader: list[Callable[[], None]] = []

    def report(self, **metrics: float) -> None:
        """Write the script's own figures (loss, accuracy) to the report file; send them with the next progress."""
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
