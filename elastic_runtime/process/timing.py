"""How long steps take on this worker, how it compares with the others, and what a change of size is made of."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class StepTimes:
    """Means over some steps at one size. `wait_ms` of `step_ms` this worker waited for the others' gradients.

    `slowness`: its own part of a step, over that of all workers on average; above 1 the others wait for it.
    """

    steps: int
    step_ms: float
    wait_ms: float
    slowness: float


class StepClock:
    """A step is what this worker does itself, from one sum of gradients to the next, and the wait for the sum.

    Who is slow is found without a collective: each worker's own time travels in the gradients' tail, so that everybody
    knows the mean, and compares itself with it. On a GPU it is the host's time that counts here.
    """

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self.restart()

    def restart(self) -> None:
        """The size changed: the next step is not compared with those before."""
        self._summed_at: float | None = None
        self._ready_at = 0.0
        self._busy_s = 0.0
        self._forget()

    def _forget(self) -> None:
        self._steps, self._all_busy_s, self._wait_s, self._mean_busy_s = 0, 0.0, 0.0, 0.0

    def ready(self) -> float:
        """This worker has done its part; the seconds it took, 0 in the first step after `restart`."""
        self._ready_at = self._now_s()
        self._busy_s = 0.0 if self._summed_at is None else self._ready_at - self._summed_at
        return self._busy_s

    def summed(self, mean_busy_s: float) -> None:
        """The gradients of all are there; what their parts took on average."""
        now = self._now_s()
        if self._summed_at is not None:
            self._steps += 1
            self._all_busy_s += self._busy_s
            self._wait_s += now - self._ready_at
            self._mean_busy_s += mean_busy_s
        self._summed_at = now

    def take(self) -> StepTimes | None:
        """The means since the last call; None where no step was timed."""
        if not self._steps:
            return None
        steps, busy_s, wait_s = self._steps, self._all_busy_s, self._wait_s
        slowness = busy_s / self._mean_busy_s if self._mean_busy_s else 1.0
        self._forget()
        return StepTimes(steps, 1e3 * (busy_s + wait_s) / steps, 1e3 * wait_s / steps, slowness)


class Phases:
    """Milliseconds in each part of a change of size, by name."""

    def __init__(self) -> None:
        self._ms: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Whatever happens within is part of `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, (time.perf_counter() - began) * 1e3)

    def add(self, name: str, ms: float) -> None:
        """So much more of it."""
        self._ms[name] = self._ms.get(name, 0.0) + ms

    def take(self) -> dict[str, float]:
        """What was measured since the last call."""
        taken, self._ms = self._ms, {}
        return {name: round(ms, 2) for name, ms in taken.items()}
