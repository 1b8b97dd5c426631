"""The second process of a rehearsal: the same command, started again."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from elastic_runtime.errors import ElasticError, UsageError
from elastic_runtime.rehearsal.verdict import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from elastic_runtime.rehearsal.records import Records

JOIN = "join:"
"""ELASTIC_REHEARSE of the second worker: this, and the rehearsal's directory."""
_SHOWN_LINES = 15
_KEY = "key"
_PACKAGE = str(Path(__file__).parents[1])


class Process(Protocol):
    """The part of subprocess.Popen that the rehearsal uses."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; subprocess.TimeoutExpired."""

    def kill(self) -> None:
        """End it at once."""


def start_again(environment: Mapping[str, str], output: Path) -> Process:
    """Start this process's own command once more. Its standard input is a pipe that ends with this process.

    UsageError in a notebook or an interactive interpreter, which have no such command, for a script that was read from
    standard input, and in pdb: the second process would read the script or pdb's commands from that pipe.
    """
    if unrepeatable := _unrepeatable():
        raise UsageError(
            f"ELASTIC_REHEARSE starts the script a second time, and {unrepeatable}; save it to a "
            "file and run: ELASTIC_REHEARSE=1 python FILE"
        )
    with output.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def _unrepeatable() -> str:
    """Return why this process's command cannot be started again; "" if it can."""
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return "an interactive session is no script"
    if getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
        return "this one was read from standard input"
    if sys.orig_argv[1:3] == ["-m", "pdb"]:
        return "pdb would wait for commands there, too"
    return ""


starter: Callable[[Mapping[str, str], Path], Process] = start_again
"""Replaced where a program is no command of its own: by tests that fork."""


def prepare_directory(rehearse: str) -> Path:
    """The rehearsal's directory: a new one for the first worker; the second one is given it."""
    if rehearse.startswith(JOIN):
        threading.Thread(target=_end_with_the_first, name="elastic-rehearsal", daemon=True).start()
        return Path(rehearse[len(JOIN) :])
    directory = Path(tempfile.mkdtemp(prefix="elastic-rehearsal-"))  # which only this user can read
    (directory / _KEY).write_bytes(secrets.token_bytes(32))
    return directory


def key_of(directory: Path) -> bytes:
    """Return the key, which only the processes of this rehearsal can read."""
    return (directory / _KEY).read_bytes()


def _end_with_the_first() -> None:
    """The first worker holds the other end of the standard input, and never writes to it."""
    with suppress(OSError):
        os.read(0, 1)
    os._exit(1)


class SecondWorker:
    """The process, and its output in `directory`. `code`: its exit code once it has ended."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._output = directory, directory / "second.log"
        self.code: int | None = None
        self._killed = False
        self._process = starter({**os.environ, "ELASTIC_REHEARSE": f"{JOIN}{directory}"}, self._output)

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.poll()

    def end(self, timeout_s: float) -> None:
        """Wait for its end; kill it where it takes longer."""
        try:
            self.code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._killed = True
            self._process.kill()
            self.code = self._process.wait()

    def finding(self) -> Finding:
        """Return the meaning of an exit without a recorded error."""
        lines = self._output.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        what = "did not end in time" if self._killed else f"ended with exit code {self.code}"
        return Finding(
            f"the second worker {what}",
            "its last lines:\n" + "\n".join(f"    {line}" for line in lines),
            "run the script alone with these lines in mind",
        )


def _where(trace: TracebackType | None) -> str:
    """File and line of the script that an exception passed through last."""
    frames = [frame for frame in traceback.extract_tb(trace) if _PACKAGE not in frame.filename]
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""


def note_errors(records: Records) -> None:
    """Record the exception that ends this process, and print it as before."""
    before, process = sys.excepthook, os.getpid()

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt) and os.getpid() == process:
            ours = issubclass(kind, ElasticError)
            records.write("error", kind=kind.__name__, message=str(error), ours=ours, where=_where(trace))
        before(kind, error, trace)

    sys.excepthook = note
