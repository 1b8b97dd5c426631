"""Ending the process soon after the loop was left, for until then it holds its GPU.

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
    """End the process with `code`, as SystemExit does, but right after its `atexit` handlers.

    Not by an `atexit` handler of our own: that would leave out the handlers registered before it. Where an error of the
    script's ends the process, that is told as ever, with its traceback and its exit code.
    """
    gc.disable()
    sys.last_traceback = _Last(code)  # type: ignore[assignment]  # what the interpreter lets go of first, after atexit
    raise SystemExit(code)


class _Last:
    def __init__(self, code: int) -> None:
        self._code = code

    def __del__(self, end: Callable[[int], object] = os._exit, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():
            end(self._code)
