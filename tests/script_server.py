"""Runs scripts in processes forked from one that has imported torch already: SOCKET. `script_client` is their command.

Each connection is one script: a watching process forks it, forwards signals to it, kills it when the client was killed,
and reports how it has ended. A new interpreter would spend three seconds of CPU on torch for each worker of a training.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tests import forked, script_client

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUEST_BYTES = 1 << 18
READY = "ready\n"


def command(path: Path) -> tuple[str, ...]:
    """Return what begins the command of a script, in place of the interpreter."""
    return (sys.executable, "-IS", script_client.__file__, str(path))


@contextlib.contextmanager
def running(path: Path) -> Iterator[tuple[str, ...]]:
    """A server at this socket, forked itself; yields `command`."""
    read, write = os.pipe()
    with os.fdopen(read) as answer, Path(os.devnull).open("wb") as nothing:
        try:
            server = forked.Program(main, str(path), stdout=write, stderr=nothing.fileno())
        finally:
            os.close(write)
        assert answer.readline() == READY
        try:
            yield command(path)
        finally:
            server.kill()
            server.wait()


@contextlib.contextmanager
def running_with(path: Path, environment: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """A server in an interpreter of its own, whose environment affects the loader; yields `command`."""
    with subprocess.Popen(
        [sys.executable, "-m", __name__, str(path)],
        cwd=Path(__file__).parents[1],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == READY
        try:
            yield command(path)
        finally:
            server.kill()


def main(arguments: list[str]) -> None:
    """Accept scripts until the process is killed. Prints a line when it listens."""
    # What the scripts import. A worker process of the tests has no use for it: it is two seconds of CPU.
    import torch._dynamo  # noqa: F401, PLC0415

    import elastic_runtime.loop.job  # noqa: F401, PLC0415

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(arguments[0])
        server.listen(64)
        sys.stdout.write(READY)
        sys.stdout.flush()
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                os._exit(watch(connection))
            connection.close()


def watch(connection: socket.socket) -> int:
    """Run one script; its end is sent to the client as text, negative for a signal."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    raw, files, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
    if not raw:
        return 0
    while not raw.endswith(b"\n"):
        raw += connection.recv(REQUEST_BYTES)
    child = os.fork()
    if child == 0:
        connection.close()
        begin(json.loads(raw), files)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(child)
    while True:
        readable, _, _ = select.select([ended, connection.fileno()], [], [])
        if ended in readable:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            with contextlib.suppress(OSError):
                connection.sendall(str(code).encode())
            return 0
        numbers = received(connection)
        for number in numbers or [signal.SIGKILL]:
            os.kill(child, number)
        if not numbers:
            os.waitpid(child, 0)
            return 0


def received(connection: socket.socket) -> bytes:
    """Return the signals that the client passes on; nothing when it was killed."""
    try:
        return connection.recv(16)
    except OSError:
        return b""


def begin(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Be the script, as an interpreter would run it."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    code = 0
    atexit._clear()  # what the server itself has registered
    try:
        run(request["arguments"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException as error:  # noqa: BLE001  (what a script does not catch ends it)
        traceback.print_exc()
        code = getattr(error, "exit_code", 1)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()  # the last reports are sent there
        with contextlib.suppress(OSError):
            sys.stdout.flush()
    finally:
        os._exit(getattr(getattr(sys, "last_traceback", None), "code", code))  # set by `process_exit.end_with`


def run(arguments: list[str]) -> None:
    """Run SCRIPT, -m MODULE or -c CODE."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), module.__dict__)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
