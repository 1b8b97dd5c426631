"""Programs of this project as processes of their own, forked from a server that has imported their modules already.

A new interpreter spends a second of CPU on imports, with torch three, and the suite starts hundreds of programs. A
forked process has memory, signals and an exit code of its own; /proc/PID/cmdline and environ are those of the server.

All workers of pytest-xdist use one server (`share`): its imports take ten seconds of CPU and half a gigabyte.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing import forkserver, reduction, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Main = Callable[[list[str]], int | None]

context = multiprocessing.get_context("forkserver")
LAST = "tests.frozen"
_preloaded: list[str] = []


def preload(*modules: str) -> None:
    """Let the server import these modules; for modules of tests to call, before the first process starts the server."""
    _preloaded.extend(name for name in modules if name not in _preloaded)
    context.set_forkserver_preload([*_preloaded, LAST])


def share(folder: Path) -> None:
    """Use one server with all processes that call this with the same folder; the first program starts it.

    Each holds the write end of a pipe, as multiprocessing does for a server of its own: it exits with the last of them.
    """
    server: Any = forkserver._forkserver
    pipe, environment = folder / "running", dict(os.environ)
    with contextlib.suppress(FileExistsError):
        os.mkfifo(pipe)
    server._forkserver_alive_fd = os.open(pipe, os.O_RDWR)
    server._forkserver_address = str(folder / "server")

    def ensure_running() -> None:
        resource_tracker.ensure_running()
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "server").exists():
                _start_server(folder / "server", pipe, environment)

    server.ensure_running = ensure_running


def _start_server(address: Path, pipe: Path, environment: dict[str, str]) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        reading = os.open(pipe, os.O_RDONLY)
        given = (listener.fileno(), reading)
        code = "import gc; gc.disable(); from multiprocessing.forkserver import main; "
        code += f"main({given[0]}, {given[1]}, {[*_preloaded, LAST]!r}, sys_path={sys.path!r})"
        subprocess.Popen([sys.executable, "-c", code], env=environment, pass_fds=given)
        os.close(reading)


@dataclass(frozen=True)
class Completed:
    """The exit code and the output of a program that has ended."""

    returncode: int
    stdout: str
    stderr: str


class Program:
    """A running `main(arguments)` with the methods of subprocess.Popen that the tests need."""

    def __init__(
        self,
        main: Main,
        *arguments: str,
        stdout: int,
        stderr: int,
        environment: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        new_session: bool = False,
        inherited: int | None = None,
    ) -> None:
        """Start it. `inherited` is an open file whose number in the new process is added to the arguments."""
        given = _Given(
            environment=dict(os.environ if environment is None else environment),
            cwd=str(cwd or Path.cwd()),
            new_session=new_session,
            stdout=_Descriptor(stdout),
            stderr=_Descriptor(stderr),
            inherited=None if inherited is None else _Descriptor(inherited),
        )
        self._process = context.Process(target=_run, args=(main, list(arguments), given))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negative signal number; None while the program runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        self.send_signal(signal.SIGKILL)


def run(
    main: Main,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    timeout: float = TIMEOUT_S,
) -> Completed:
    """Run a program to its end, and return what it printed; one that takes longer is killed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        program = Program(main, *arguments, stdout=out.fileno(), stderr=err.fileno(), environment=environment, cwd=cwd)
        try:
            code = program.wait(timeout)
        finally:
            program.kill()
        out.seek(0)
        err.seek(0)
        return Completed(code, out.read().decode(), err.read().decode())


@dataclass(frozen=True)
class _Descriptor:
    """An open file on its way to another process, where it is the number of its duplicate."""

    number: int

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _received, (reduction.DupFd(self.number),)


def _received(duplicate: Any) -> int:
    number: int = duplicate.detach()
    return number


@dataclass(frozen=True)
class _Given:
    """What a program finds where it begins."""

    environment: dict[str, str]
    cwd: str
    new_session: bool
    stdout: Any
    stderr: Any
    inherited: Any


def _run(main: Main, arguments: list[str], given: _Given) -> None:
    """Be the program, in the forked process."""
    os.environ.clear()
    os.environ.update(given.environment)
    os.chdir(given.cwd)
    if given.new_session:
        os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((nothing, 0), (given.stdout, 1), (given.stderr, 2)):
        os.dup2(number, target)
        os.close(number)
    if given.inherited is not None:
        arguments.append(str(given.inherited))
    sys.argv = [main.__module__, *arguments]
    sys.exit(main(arguments))
