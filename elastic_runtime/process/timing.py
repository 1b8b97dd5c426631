"""Durations: of steps, compared with the other workers', and of the phases of a resize."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class StepTimes:
    """Means over some steps at one size. `wait_ms`, a part of `step_ms`, is the wait for other workers' gradients.

    `slowness`: this worker's own time of a step over the mean of all workers'; above 1 the others wait for it.
    """

    steps: int
    step_ms: float
    wait_ms: float
    slowness: float


class StepClock:
    """Measures steps: a worker's own work from one gradient reduction to the next, and its wait for the reduction.

    Slow workers are found without a collective of their own: each worker's time travels at the end of the gradients
    (`reduction.step_metadata`), so each can compare itself with the mean. On a GPU the host's time is measured.
    """

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self.restart()

    def restart(self) -> None:
        """Start again after a resize: the next step is not compared with those before."""
        self._summed_at: float | None = None
        self.step_s: float | None = None  # of the last step
        self._ready_at = 0.0
        self._busy_s = 0.0
        self._forget()

    def _forget(self) -> None:
        self._steps, self._all_busy_s, self._wait_s, self._mean_busy_s = 0, 0.0, 0.0, 0.0

    def ready(self) -> float:
        """Note that this worker's gradients are ready; return the seconds they took, 0 in the first step."""
        self._ready_at = self._now_s()
        self._busy_s = 0.0 if self._summed_at is None else self._ready_at - self._summed_at
        return self._busy_s

    def summed(self, mean_busy_s: float) -> None:
        """Note that the reduction is complete; `mean_busy_s`: the mean of all workers' own times."""
        now = self._now_s()
        if self._summed_at is not None:
            self._steps += 1
            self.step_s = now - self._summed_at
            self._all_busy_s += self._busy_s
            self._wait_s += now - self._ready_at
            self._mean_busy_s += mean_busy_s
        self._summed_at = now

    def take(self) -> StepTimes | None:
        """Return the means since the last call; None if no step was measured."""
        if not self._steps:
            return None
        steps, busy_s, wait_s = self._steps, self._all_busy_s, self._wait_s
        slowness = busy_s / self._mean_busy_s if self._mean_busy_s else 1.0
        self._forget()
        return StepTimes(steps, 1e3 * (busy_s + wait_s) / steps, 1e3 * wait_s / steps, slowness)


class Phases:
    """Milliseconds spent in each phase of a resize, by name."""

    def __init__(self) -> None:
        self._ms: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of the `with` block to the phase `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, (time.perf_counter() - began) * 1e3)

    def add(self, name: str, ms: float) -> None:
        """Add `ms` milliseconds to the phase `name`."""
        self._ms[name] = self._ms.get(name, 0.0) + ms

    def take(self) -> dict[str, float]:
        """Return the phases measured since the last call, and start again."""
        taken, self._ms = self._ms, {}
        return {name: round(ms, 2) for name, ms in taken.items()}
