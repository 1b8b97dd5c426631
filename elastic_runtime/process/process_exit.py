"""Ends the process soon after the training loop was left: until then it holds its GPU.

Tearing down an interpreter that has loaded torch takes 1 to 1.5 s on a busy machine: a last garbage collection over
half a million objects, every module's end, the destructors of the libraries. Everything a script may rely on comes
before that (`finally`, `atexit`, flushed files), so only the rest is left out.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable


def leave(code: int) -> NoReturn:
    """Raise SystemExit(code), and end the process right after its `atexit` handlers.

    Rejected: an `atexit` handler of our own, which would skip the handlers registered before it. An error of the
    script still ends the process with its traceback and exit code.
    """
    gc.disable()
    end_with(code)
    raise SystemExit(code)


def end_with(code: int) -> None:
    """Make the process end with this exit code, whatever the script's is, right after its `atexit` handlers."""
    sys.last_traceback = _Last(code)  # type: ignore[assignment]  # the first object that the interpreter drops after atexit


class _Last:
    def __init__(self, code: int) -> None:
        self._code = code

    def __del__(self, end: Callable[[int], object] = os._exit, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():
            end(self._code)
