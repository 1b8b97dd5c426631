"""Finds a worker that does not come to the reduction of a step in which others wait for it, and ends it.

Each worker has a thread that looks at its own loop. From the end of an iteration to the reduction of the next one it
computes, apart from its waits for peers. A worker that has waited longer than a bound reports it to the others, through
the coordinator. One that has computed longer than that, and finds its step reported, writes the stacks of its threads
and kills itself: for its cluster and its peers it is a lost worker.

A thread that holds the interpreter's lock stops this one, too. Then its heartbeats end as well, and the coordinator has
it killed.

Rejected: a bound alone, without the report of a peer. Where a file system is away, all workers would end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

LEAST_S: Final = 600.0
STEPS: Final = 20
"""The learned bound: this number of the longest step so far, and at least LEAST_S, the time limit of NCCL in torch."""
WARM_UP: Final = 3
"""Steps after a change of members that may take any time: kernels are compiled for new shapes."""
STDERR: Final = 2
_LONGEST_PAUSE_S: Final = 5.0

_log = logging.getLogger("elastic_runtime")


class Peers(Protocol):
    """The members of the generation in force."""

    def report_wait(self, step: int) -> None:
        """Report that this worker waits for others in the step."""

    def others_wait(self, step: int) -> bool:
        """Return whether a worker has reported that it waits in the step."""


class Waits(Protocol):
    """This worker's waits for peers."""

    waiting_since: float | None
    waited_until: float


class _Step(NamedTuple):
    """What the loop does since `since`, by the monotonic clock."""

    number: int
    since: float
    peers: Peers


def kill_this_process() -> None:
    """Write the stacks of all threads to stderr, and end by SIGKILL."""
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback(STDERR, all_threads=True)
    os.kill(os.getpid(), signal.SIGKILL)


class StallWatch:
    """Watches the loop of the thread that makes it. `bound_s`: the user's; None: learned; 0: nothing is watched."""

    def __init__(self, bound_s: float | None, waits: Waits, end: Callable[[], None] = kill_this_process) -> None:
        self._given_s, self._waits, self._end = bound_s, waits, end
        self._step: _Step | None = None
        self._steps = 0  # since the last change of members
        self._longest_s = 0.0
        self._reported: _Step | None = None
        self._loop = threading.get_ident()
        self._thread: threading.Thread | None = None

    @property
    def bound_s(self) -> float:
        """Return the seconds after which a worker is regarded as stalled."""
        return max(LEAST_S, STEPS * self._longest_s) if self._given_s is None else self._given_s

    def begin(self, number: int, peers: Peers) -> None:
        """Note that the loop fetches samples for, or computes, a step whose reduction comes next."""
        if self._given_s == 0.0 or self._steps < WARM_UP:
            return
        self._step = _Step(number, time.monotonic(), peers)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="elastic-stalls", daemon=True)
            self._thread.start()

    def reduced(self) -> None:
        """Note that a step's reduction is complete; what follows may take any time."""
        step, self._step = self._step, None
        self._steps += 1
        if step is not None:
            self._longest_s = max(self._longest_s, time.monotonic() - step.since)

    def pause(self) -> None:
        """Watch nothing until the next `begin`."""
        self._step = None

    def restart(self) -> None:
        """Begin again after a change of members."""
        self._step, self._steps = None, 0

    def look(self, now: float) -> None:
        """Report a wait, or end the process, if it is time to."""
        step, waits = self._step, self._waits
        if step is None:
            return
        waiting_since, bound_s = waits.waiting_since, self.bound_s
        if waiting_since is not None:
            if now - waiting_since > bound_s and self._reported is not step:
                self._reported = step
                self._log("waits for other workers", step, now - waiting_since)
                step.peers.report_wait(step.number)
            return
        began = max(step.since, waits.waited_until)
        if now - began > bound_s and step.peers.others_wait(step.number) and self._step is step:
            self._log("does not come to the reduction, for which others wait; it ends", step, now - began)
            self._end()

    def _log(self, what: str, step: _Step, for_s: float) -> None:
        frame = sys._current_frames().get(self._loop)  # noqa: SLF001
        places = traceback.extract_stack(frame)[::-1] if frame is not None else []
        stack = " <- ".join(f"{place.filename}:{place.lineno} {place.name}" for place in places[:8])
        _log.warning("step %d: this worker %s, since %.1f s, at %s", step.number, what, for_s, stack)

    def _run(self) -> None:
        while True:
            time.sleep(min(_LONGEST_PAUSE_S, self.bound_s / 10))
            try:
                self.look(time.monotonic())
            except Exception as error:  # noqa: BLE001  (the coordinator is away: it is asked again)
                _log.debug("stalls could not be looked for: %s", error)
