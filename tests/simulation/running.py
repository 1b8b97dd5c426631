"""Plays a history against the engine, and checks the invariants."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.simulation.cluster import SimulatedCluster
from tests.simulation.invariants import Invariants
from tests.simulation.loop import simulate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulation.histories import History

REST_S = 150.0
"""How long after the last happening the cluster must rest; a job that works ends within 60 s, one that hangs in 30."""
QUIET_S = 65.0
"""Without a commit for longer than any delay of a process, nothing will happen any more."""
LOOK_S = 21.0


def play(history: History) -> SimulatedCluster:
    """Play a history. Raises ViolationError, or what the engine raised."""
    playing = Playing(history)
    with no_tracebacks():
        try:
            simulate(playing.begin)
        except Exception:
            playing.raise_violation()
            raise
        finally:
            if playing.cluster is not None:
                playing.cluster.close()
        playing.raise_violation()
    assert playing.cluster is not None
    return playing.cluster


@contextmanager
def no_tracebacks() -> Iterator[None]:
    """Raise AssertionError after the block if the engine has logged a traceback in it."""
    engine, logged = logging.getLogger("kfp_gpuquota"), _Errors()
    engine.addHandler(logged)
    try:
        yield
    finally:
        engine.removeHandler(logged)
    if logged.tracebacks:
        raise AssertionError(f"the engine logged a traceback: {logged.tracebacks[0]}")


class Playing:
    """One history in its loop."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.cluster: SimulatedCluster | None = None
        self._invariants: Invariants | None = None
        self._last = 0.0

    def begin(self) -> None:
        """Start the engine and schedule what happens."""
        cluster = self.cluster = SimulatedCluster(self._history, self._watch)
        self._last = cluster.play()
        cluster.loop.call_later(LOOK_S, self._look)
        cluster.loop.call_later(self._last + REST_S, self._rest)

    def raise_violation(self) -> None:
        """Raise the first violation, if there was any: the engine may have logged it as an error of its own."""
        if self._invariants is not None and self._invariants.violations:
            raise self._invariants.violations[0] from None

    def _watch(self, cluster: SimulatedCluster) -> None:
        self._invariants = self._invariants or Invariants(cluster)
        self._invariants.watch()

    def _look(self) -> None:
        assert self.cluster is not None
        assert self._invariants is not None
        now = self.cluster.loop.time()
        if now > max(self._last, self._invariants.committed_at) + QUIET_S and self.cluster.up:
            self._rest()
            return
        self.cluster.loop.call_later(LOOK_S, self._look)
        if self.cluster.up:
            self._invariants.check()

    def _rest(self) -> None:
        """Check the cluster at rest, once those workers are gone that are to leave: somebody may wait for them."""
        assert self.cluster is not None
        assert self._invariants is not None
        leaving = any(record.released for record in self.cluster.alive_workers())
        if leaving and self.cluster.loop.time() < self._last + REST_S + QUIET_S:
            self.cluster.loop.call_later(LOOK_S, self._rest)
            return
        self._invariants.check_rest()
        self.cluster.loop.rested.set()


class _Errors(logging.Handler):
    """Keeps tracebacks that are logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.tracebacks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.tracebacks.append(f"{record.getMessage()}: {record.exc_info[1]!r}")
