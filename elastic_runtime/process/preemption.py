"""Handles SIGTERM: saves the training within the grace period, then lets the worker exit.

The loop itself saves and leaves at the end of its step, or where a collective fails. A step may take longer than the
grace period, so a thread saves if the loop does not come that far: from the beginning of a step until its gradients are
summed, the training's state is that of the step's beginning, whatever the loop's thread is busy with.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

SAVE_AFTER_S = 1.0
"""Within this time a loop with short steps reaches the end of its step by itself."""
_POLL_S = 0.02

TERMINATED = 128 + signal.SIGTERM


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
    """Handles SIGTERM in the main thread. `on_preempted` is called in the signal handler.

    While `soft` is False the previous handler is used: before the training there is nothing to save, and after it
    the signal is the script's own.
    """

    def __init__(self, on_preempted: Callable[[], None]) -> None:
        self._on_preempted = on_preempted
        self._process = os.getpid()
        self._save: Callable[[], bool] | None = None
        self.soft = False
        self.requested = threading.Event()
        self.leaving = threading.Event()
        self._before: Callable[[int, FrameType | None], Any] | int | None = signal.SIG_DFL
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_sigterm)

    def save_by(self, save: Callable[[], bool]) -> None:
        """Set the function that saves from another thread; it returns False if it cannot save now."""
        self._save = save

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let the previous handler act on SIGTERM at once, also while the main thread waits in native code.

        A handler of Python's runs when that wait is over. A worker that waited there for a peer that was lost had to be
        killed, by torchrun after 30 seconds, and its restart made the next worker wait in the same way.
        """
        ours = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) == self._on_sigterm
            and self._before is not None
        )
        if ours:
            signal.signal(signal.SIGTERM, self._before)
        try:
            yield
        finally:
            if ours:
                signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process or not self.soft:  # a child that the script forked has the handler, too
            if callable(self._before):
                self._before(number, frame)
                return
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if self._save and not self.requested.is_set():
            threading.Thread(target=self._save_in_time, name="elastic-preempted", daemon=True).start()
        self.requested.set()
        self._on_preempted()

    def _save_in_time(self) -> None:
        wait_s = SAVE_AFTER_S
        while not self.leaving.wait(wait_s):
            if self._save and self._save():
                return
            wait_s = _POLL_S
