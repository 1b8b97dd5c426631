"""One row of metrics for each step, from rank 0, whatever happens to the step and to rank 0.

A step may be computed twice, and its first result dropped; and the worker that is rank 0 may be lost before its report
of a step has left. So every worker keeps the row of its newest step, and rank 0 emits it once there is one of a later
step. A worker that becomes rank 0 in between emits the row that the lost one has not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class MetricRows:
    """`leads()`: whether this worker is rank 0. `emit(metrics, step=...)` is called with each row."""

    def __init__(self, leads: Callable[[], bool], emit: Callable[..., object]) -> None:
        self._leads, self._emit = leads, emit
        self._step, self._row = -1, dict[str, float]()

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Add figures of a step: those of a name replace earlier ones of the same step."""
        if step != self._step:
            self.flush()
            self._step = step
        self._row.update(metrics)

    def flush(self, _line: dict[str, Any] | None = None) -> None:
        """Emit the newest row, on rank 0: no other one of its step follows."""
        row, self._row = self._row, {}
        if row and self._leads():
            self._emit(row, step=self._step)
