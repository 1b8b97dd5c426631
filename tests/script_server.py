"""Runs scripts in processes forked from one that has imported torch already: SOCKET. `script_client` is their command.

Each connection is one script: a watching process forks it, forwards signals to it, kills it when the client was killed,
and reports how it has ended. A new interpreter would spend three seconds of CPU on torch for each worker of a training.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tests import forked, interpreter, script_client

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

    path = interpreter.search_path()
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
                os._exit(watch(connection, path))
            connection.close()


def watch(connection: socket.socket, path: list[str]) -> int:
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
        begin(json.loads(raw), files, path)
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


def begin(request: dict[str, Any], files: list[int], path: list[str]) -> NoReturn:
    """Be the interpreter that runs the script."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    interpreter.become(request["environment"], request["directory"], path)
    interpreter.run(request["arguments"])


if __name__ == "__main__":
    main(sys.argv[1:])
