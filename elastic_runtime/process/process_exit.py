"""Ends the process soon after the training loop was left, and reports the error that ended the script.

Until its end the process holds its GPU. Tearing down an interpreter that has loaded torch takes 1 to 1.5 s on a busy
machine: a last garbage collection over half a million objects, every module's end, the destructors of the libraries.
Everything a script may rely on comes before that (`finally`, `atexit`, flushed files), so only the rest is left out.

An error is reported by the exit code, and by one line of a file that the cluster reads: in a container Kubernetes'
termination message, elsewhere the file that ELASTIC_ERROR_FILE names. The cluster shows the line as the reason, and
does not repeat a job that ended with exit code 2.

Nothing here is of effect in a process that the script forks: `atexit` handlers and hooks are copied with it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import os
import sys
import threading
from _sitebuiltins import Quitter
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from elastic_runtime.errors import ElasticError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    Code = str | int | None

TERMINATION_LOG: Final = "/dev/termination-log"
LONGEST: Final = 1000  # characters


def at_exit(work: Callable[[], object]) -> Callable[[], None]:
    """Call `work` at the exit of this process; return what `atexit.unregister` takes."""
    process = os.getpid()

    def work_here() -> None:
        if os.getpid() == process:
            work()

    return atexit.register(work_here)


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


@functools.cache
def note_exit_codes() -> None:
    """Note from now on what the script passes to `sys.exit` and `exit`: an `atexit` handler does not get the exit code.

    One that is raised as SystemExit is not noticed.
    """
    sys.exit = _noting(sys.exit)  # type: ignore[assignment]
    Quitter.__call__ = _noting_method(Quitter.__call__)  # type: ignore[method-assign, assignment]


def _noting(original: Callable[[Code], NoReturn]) -> Callable[[Code], NoReturn]:
    def exit(code: Code = None, /) -> NoReturn:  # noqa: A001  (its name in sys)
        _note(code)
        original(code)

    return exit


def _noting_method(original: Callable[[Quitter, Code], NoReturn]) -> Callable[[Quitter, Code], NoReturn]:
    def __call__(self: Quitter, code: Code = None) -> NoReturn:  # noqa: N807
        _note(code)
        original(self, code)

    return __call__


def _note(code: object) -> None:
    if threading.current_thread() is threading.main_thread():  # elsewhere it ends the thread
        _asked.append(code)


def failed() -> bool:
    """Whether the script ends by an exception, or has asked for another exit code than 0."""
    return hasattr(sys, "last_type") or any(code not in {None, 0} for code in _asked)


def _flush_files() -> None:
    """Write what the script left in files that it has not closed, as their destructors would."""
    for each in gc.get_objects():
        if issubclass(type(each), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with contextlib.suppress(Exception):  # closed, or its own subclass fails
                each.flush()


class _Last:
    def __init__(self, code: int) -> None:
        self.code, self._process = code, os.getpid()

    def __del__(
        self,
        end: Callable[[int], object] = os._exit,
        ending: Callable[[], bool] = sys.is_finalizing,
        own: Callable[[], int] = os.getpid,
        flush: Callable[[], object] = _flush_files,
    ) -> None:
        if ending() and own() == self._process:
            flush()
            end(self.code)


@functools.cache
def report_errors(file: str) -> None:
    """Report the error that ends this process, from now on, to `file`; "": to the container's termination message.

    At once by the interpreter's hook, or at the exit if the script has replaced that.
    """
    before, process, path = sys.excepthook, os.getpid(), Path(file or TERMINATION_LOG)
    writes, reported = bool(file) or path.exists(), list[BaseException]()

    def write(error: BaseException) -> None:
        reported.append(error)
        with contextlib.suppress(OSError):  # the traceback is in the log
            if writes:
                path.write_text(_line(type(error), error), encoding="utf-8", errors="replace")

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == process:
            write(error)
        before(kind, error, trace)
        if os.getpid() == process and isinstance(error, ElasticError):
            raise SystemExit(error.exit_code)

    def report_unreported() -> None:
        error = getattr(sys, "last_value", None)
        if error is None or any(error is each for each in reported):
            return
        write(error)
        if isinstance(error, ElasticError):
            end_with(error.exit_code)

    sys.excepthook = report
    at_exit(report_unreported)


def _line(kind: type[BaseException], error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{kind.__name__}: {text}".removesuffix(": ")[:LONGEST]
