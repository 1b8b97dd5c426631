"""Threads that call torch's native part beside the training loop, and that have ended when the interpreter ends.

Python stops a daemon thread that returns from native code while the interpreter ends, and C++ then aborts the process
("terminate called without an active exception"): a training that has ended well would be killed by SIGABRT. Other
threads would be waited for without end where a peer hangs. So these are daemon threads, and waited for at exit for a
limited time: one that still hangs then does not return before the process has ended.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

WAITED_FOR_S: Final = 5.0

_lock: Final = threading.Lock()
_ending: Final = threading.Event()
_at_work: Final = dict[threading.Thread, "Callable[[], None] | None"]()


def start(work: Callable[[], object], name: str, *, after_s: float = 0.0) -> None:
    """Start `work` in a thread of its own after `after_s` seconds; not at all if the process ends before.

    Raises RuntimeError where no thread can be started any more.
    """
    threading.Thread(target=_run, args=(work, after_s), name=name, daemon=True).start()


def _run(work: Callable[[], object], after_s: float) -> None:
    _ending.wait(after_s)
    with _lock:
        ends = _ending.is_set()
        if not ends:
            _at_work[threading.current_thread()] = None
    if ends:
        threading.Event().wait()  # what the work would have closed stays as it is until the process has ended
    try:
        work()
    finally:
        with _lock:
            del _at_work[threading.current_thread()]


def interrupted_by(interrupt: Callable[[], None]) -> None:
    """Set what makes the present work return soon; it is called from another thread when the process ends."""
    with _lock:
        if (thread := threading.current_thread()) in _at_work:
            _at_work[thread] = interrupt


def check() -> None:
    """Raise OSError in a work whose process is about to end."""
    if _ending.is_set() and threading.current_thread() in _at_work:
        raise OSError("the process is about to end")


def _wait_for_threads() -> None:
    with _lock:
        _ending.set()
        running = dict(_at_work)
    for interrupt in running.values():
        if interrupt is not None:
            interrupt()
    deadline = time.monotonic() + WAITED_FOR_S
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))


def _forget_parents_threads() -> None:
    _at_work.clear()
    _lock.release()


# A process that the script forks has none of these threads, and what they use is its parent's.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forget_parents_threads)
atexit.register(_wait_for_threads)  # so early that it comes after the end of a training, which is registered later
