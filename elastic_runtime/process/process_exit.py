"""Ends the process soon after the training loop was left, and reports the error that ended the script.

Until its end the process holds its GPU. Tearing down an interpreter that has loaded torch takes 1 to 1.5 s on a busy
machine: a last garbage collection over half a million objects, every module's end, the destructors of the libraries.
Everything a script may rely on comes before that (`finally`, `atexit`, flushed files), so only the rest is left out.

An error is reported by the exit code, and by one line of a file that the cluster reads: in a container Kubernetes'
termination message, elsewhere the file that ELASTIC_ERROR_FILE names. The cluster shows the line as the reason, and
does not repeat a job that ended with exit code 2.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from elastic_runtime.errors import ElasticError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

TERMINATION_LOG: Final = "/dev/termination-log"
LONGEST: Final = 1000  # characters


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


_asked: list[object] = []  # the codes that the script has asked for by sys.exit


def note_exit_codes() -> None:
    """Note from now on what the script passes to `sys.exit`: an `atexit` handler does not get the exit code."""
    if getattr(sys.exit, "notes", False):
        return
    original = sys.exit

    def noted(code: object = None, /) -> NoReturn:
        _asked.append(code)
        original(code)  # type: ignore[arg-type]

    noted.notes = True  # type: ignore[attr-defined]
    sys.exit = noted


def failed() -> bool:
    """Whether the script ends by an exception, or has asked for another exit code than 0."""
    return hasattr(sys, "last_type") or any(code not in {None, 0} for code in _asked)


class _Last:
    def __init__(self, code: int) -> None:
        self._code = code

    def __del__(self, end: Callable[[int], object] = os._exit, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():
            end(self._code)


def report_errors(file: str) -> None:
    """Report the error that ends this process, from now on, to `file`; "": to the container's termination message."""
    before, path = sys.excepthook, Path(file or TERMINATION_LOG)
    writes = bool(file) or path.exists()

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):  # the traceback is in the log
            if writes:
                path.write_text(_line(kind, error), encoding="utf-8", errors="replace")
        before(kind, error, trace)
        if isinstance(error, ElasticError):
            raise SystemExit(error.exit_code)

    sys.excepthook = report


def _line(kind: type[BaseException], error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{kind.__name__}: {text}".removesuffix(": ")[:LONGEST]
