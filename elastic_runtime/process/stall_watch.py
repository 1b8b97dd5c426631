"""Finds a worker that does not come to the reduction of a step in which others wait for it, and ends it.

Each worker has a thread that looks at its own loop. From the end of an iteration to the reduction of the next one it
computes, apart from its waits for peers. A worker that has waited longer than a bound reports it to the others, through
the coordinator. One that has computed longer than that, and finds its step reported, writes the stacks of its threads
and kills itself: for its cluster and its peers it is a lost worker. Both log their place in the code long before.

The bound is not certain: a worker may save a model, or compile, for that long. It lies below the time limit of the
collectives, where the others would break off the step in any case, and with NCCL end themselves. Only time in which
this thread itself runs counts: a machine that was suspended, or a job that was stopped, would else look like a stall.

A thread that holds the interpreter's lock stops this one, too. Then its heartbeats end as well, and the coordinator has
it killed.

Rejected: a bound alone, without the report of a peer: where a file system is away, all workers would end. And a bound
learned from the steps: after one slow step it exceeds the time limit of the collectives.
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

BOUND_S: Final = 1500.0
"""By default: less than the time limit of the collectives, and far more than a model takes to be saved or compiled."""
LOGGED: Final = 0.4
"""The part of the bound after which the place in the code is logged: 10 minutes by default, NCCL's limit in torch."""
WARM_UP: Final = 3
"""Steps after a change of members that may take any time: kernels are compiled for new shapes."""
STDERR: Final = 2
LONGEST_PAUSE_S: Final = 5.0
LATE_S: Final = 5.0
"""A thread that wakes up later than that was stopped: with its machine, or its process."""
WAITS: Final = "waits for other workers"
COMPUTES: Final = "computes (where others wait for it, it ends after {:.0f} s; ELASTIC_STALL_S sets the time)"

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
    """Watches the loop of the thread that makes it. `bound_s`: the seconds after which a worker is regarded as stalled;
    None: the default; 0: nothing is watched.
    """

    def __init__(self, bound_s: float | None, waits: Waits, end: Callable[[], None] = kill_this_process) -> None:
        self.bound_s = BOUND_S if bound_s is None else bound_s
        self._waits, self._end = waits, end
        self._step: _Step | None = None
        self._steps = 0  # since the last change of members
        self._logged: _Step | None = None
        self._reported: _Step | None = None
        self._awake_since = 0.0  # this process has run since then
        self._loop = threading.get_ident()
        self._thread: threading.Thread | None = None

    def begin(self, number: int, peers: Peers) -> None:
        """Note that the loop fetches samples for, or computes, a step whose reduction comes next."""
        if self.bound_s == 0.0 or self._steps < WARM_UP:
            return
        self._step = _Step(number, time.monotonic(), peers)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="elastic-stalls", daemon=True)
            self._thread.start()

    def reduced(self) -> None:
        """Note that a step's reduction is complete; what follows may take any time."""
        self._step = None
        self._steps += 1

    def pause(self) -> None:
        """Watch nothing until the next `begin`."""
        self._step = None

    def restart(self) -> None:
        """Begin again after a change of members."""
        self._step, self._steps = None, 0

    def slept(self, for_s: float, now: float) -> None:
        """Note that the thread meant to sleep for a pause, and did for this time."""
        if for_s > self._pause_s + LATE_S:
            self._awake_since = now

    def look(self, now: float) -> None:
        """Log where a worker waits or computes for long; report a wait, or end the process, if it is time to."""
        step, waiting_since = self._step, self._waits.waiting_since
        if step is None:
            return
        waits = waiting_since is not None
        began = max(step.since, waiting_since or self._waits.waited_until, self._awake_since)
        for_s = now - began
        if for_s > LOGGED * self.bound_s and self._logged is not step:
            self._logged = step
            self._log(WAITS if waits else COMPUTES.format(self.bound_s), step, for_s)
        if for_s <= self.bound_s:
            return
        if waits and self._reported is not step:
            self._reported = step
            step.peers.report_wait(step.number)
        elif not waits and step.peers.others_wait(step.number) and self._still_computes(step):
            self._log("does not come to the reduction, for which others wait; it ends", step, for_s)
            self._end()

    def _still_computes(self, step: _Step) -> bool:
        """Return whether the loop has not come to a wait while the coordinator was asked."""
        return self._step is step and self._waits.waiting_since is None

    def _log(self, what: str, step: _Step, for_s: float) -> None:
        frame = sys._current_frames().get(self._loop)  # noqa: SLF001
        places = traceback.extract_stack(frame)[::-1] if frame is not None else []
        stack = " <- ".join(f"{place.filename}:{place.lineno} {place.name}" for place in places[:8])
        _log.warning("step %d: this worker %s, since %.1f s, at %s", step.number, what, for_s, stack)

    @property
    def _pause_s(self) -> float:
        return min(LONGEST_PAUSE_S, self.bound_s / 10)

    def _run(self) -> None:
        while True:
            before = time.monotonic()
            time.sleep(self._pause_s)
            now = time.monotonic()
            self.slept(now - before, now)
            try:
                self.look(now)
            except Exception as error:  # noqa: BLE001  (the coordinator is away: it is asked again)
                _log.debug("stalls could not be looked for: %s", error)
