"""Ending the process soon after the loop was left, for until then it holds its GPU.

Tearing down an interpreter that has loaded torch takes 1 to 1.5 s on a busy machine: a last garbage collection over
half a million objects, every module's end, the destructors of the libraries. Everything a script may rely on comes
before that (`finally`, `atexit`, flushed files), so only the rest is left out.
"""

from __future__ import annotations

import gc
import os
import sys


def hasten_exit() -> None:
    """From now on the process ends, with 0, right after its `atexit` handlers.

    Not by an `atexit` handler of our own: that would leave out the handlers registered before it.
    """
    gc.disable()
    sys.last_traceback = _Last()  # type: ignore[assignment]  # what the interpreter lets go of first, after atexit


class _Last:
    def __del__(self, end: object = os._exit) -> None:
        end(0)  # type: ignore[operator]
