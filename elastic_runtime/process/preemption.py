"""SIGTERM: the worker is to go, and what it has done is to be saved in the time that is left.

The loop itself saves and leaves at the end of its step, or where a collective fails. A step may take longer than the
grace period, so a thread saves if the loop does not come that far: from the beginning of a step until its gradients are
summed, the training's state is that of the step's beginning, whatever the loop's thread is busy with.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

SAVE_AFTER_S = 1.0
"""What a loop with short steps needs to come to a step's end by itself."""
_POLL_S = 0.02

TERMINATED = 128 + signal.SIGTERM


class AtRest:
    """Whether the state is that of the step's beginning. Written by the loop, asked by the thread that saves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at_rest = False

    def begin(self) -> None:
        """A step begins: its gradients are computed from here on, and nothing else changes."""
        self._at_rest = True

    def end(self) -> None:
        """The state is about to change; returns when nobody copies it."""
        with self._lock:
            self._at_rest = False

    def use(self, copy: Callable[[], None]) -> bool:
        """Call `copy` while the state stands still; False where it does not."""
        with self._lock:
            if self._at_rest:
                copy()
            return self._at_rest


class Preemption:
    """Listens to SIGTERM in the main thread. `on_told` is called in the signal's handler.

    While `soft` is False the signal does what it did before: before the training nothing can be saved, and after it the
    signal is not this package's.
    """

    def __init__(self, on_told: Callable[[], None]) -> None:
        self._on_told = on_told
        self._process = os.getpid()
        self._save: Callable[[], bool] | None = None
        self.soft = False
        self.told = threading.Event()
        self.leaving = threading.Event()
        self._before: Callable[[int, FrameType | None], Any] | int | None = signal.SIG_DFL
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_sigterm)

    def save_by(self, save: Callable[[], bool]) -> None:
        """What saves from another thread; False where it cannot do so now."""
        self._save = save

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process or not self.soft:  # a child that the script forked has the handler, too
            if callable(self._before):
                self._before(number, frame)
                return
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if self._save and not self.told.is_set():
            threading.Thread(target=self._save_in_time, name="elastic-preempted", daemon=True).start()
        self.told.set()
        self._on_told()

    def _save_in_time(self) -> None:
        wait_s = SAVE_AFTER_S
        while not self.leaving.wait(wait_s):
            if self._save and self._save():
                return
            wait_s = _POLL_S
