"""Handles SIGTERM: saves the training within the grace period, then lets the worker exit.

The loop itself saves and leaves at the end of its step, or where a collective fails. A step may take longer than the
grace period, so a thread saves if the loop does not come that far: from the beginning of a step until its gradients are
summed, the training's state is that of the step's beginning, whatever the loop's thread is busy with.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Handler = Callable[[int, FrameType | None], Any] | int | None

SAVE_AFTER_S = 1.0
"""Within this time a loop with short steps reaches the end of its step by itself."""
_POLL_S = 0.02

TERMINATED = 128 + signal.SIGTERM

_log = logging.getLogger("elastic_runtime")


class StableState:
    """Whether the state is that of the step's beginning. Written by the loop, read by the thread that saves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stable = False

    def begin(self) -> None:
        """Mark the state as stable: from here on the step computes gradients and changes nothing else."""
        self._stable = True

    def end(self) -> None:
        """Mark the state as changing; returns once no thread copies it."""
        with self._lock:
            self._stable = False

    def use(self, copy: Callable[[], None]) -> bool:
        """Call `copy` while the state is stable; return False if it is not."""
        with self._lock:
            if self._stable:
                copy()
            return self._stable


class Preemption:
    """Handles SIGTERM in the main thread, from `begin` to `end`. `on_preempted` is called in the signal handler.

    Before the training there is nothing to save, and after it the signal is the script's own: the previous handler is
    the process's then, because one of Python's does not run while the main thread is in native code. A worker that
    waited there for a peer that was lost had to be killed, by torchrun after 30 seconds.
    """

    def __init__(self, on_preempted: Callable[[], None]) -> None:
        self._on_preempted = on_preempted
        self._process = 0
        self._save: Callable[[], bool] | None = None
        self._active = self._warned = False
        self.requested = threading.Event()
        self.leaving = threading.Event()
        self._before: Handler = None
        self._handler: Handler = None

    def begin(self) -> None:
        """Handle SIGTERM from now on; a thread cannot, and warns."""
        if threading.current_thread() is not threading.main_thread():
            if not self._active and not self._warned:
                self._warned = True
                _log.warning(
                    "the training runs in a thread, where SIGTERM is not handled: it ends the process, and what was "
                    "trained since the newest checkpoint is lost; call it in the main thread"
                )
            return
        if self._active:
            return
        self._process, self._active = os.getpid(), True
        # A handler of its own each time: one that the script has set since the last may call that one.
        self._before = signal.getsignal(signal.SIGTERM)
        self._handler = partial(self._on_sigterm, self._before)
        signal.signal(signal.SIGTERM, self._handler)

    def is_the_scripts(self, *, finished: bool) -> bool:
        """Return whether SIGTERM is the script's again once a worker has left its loop.

        Of a daemonic process, which its pool ends by it, at once; else after a finished training, if the script handled
        it before or is a child process.
        """
        child = multiprocessing.parent_process() is not None
        return multiprocessing.current_process().daemon or (finished and (callable(self._before) or child))

    def save_by(self, save: Callable[[], bool]) -> None:
        """Set the function that saves from another thread; it returns False if it cannot save now."""
        self._save = save

    def end(self) -> None:
        """Leave SIGTERM to the script; a handler that the script has set since `begin` stays."""
        self._active, self._save = False, None
        main = threading.current_thread() is threading.main_thread()
        if main and self._before is not None and signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, self._before)

    def _on_sigterm(self, before: Handler, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process or not self._active:  # in a child, or called by the script's own handler
            self._act_as(before, number, frame)
            return
        if self._save and not self.requested.is_set():
            threading.Thread(target=self._save_in_time, name="elastic-preempted", daemon=True).start()
        self.requested.set()
        self._on_preempted()

    def _act_as(self, before: Handler, number: int, frame: FrameType | None) -> None:
        """Do what the handler before ours does. A script's handler that calls the one before calls no default one."""
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN and getattr(signal.getsignal(signal.SIGTERM), "func", None) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _save_in_time(self) -> None:
        wait_s = SAVE_AFTER_S
        while not self.leaving.wait(wait_s):
            if self._save and self._save():
                return
            wait_s = _POLL_S
