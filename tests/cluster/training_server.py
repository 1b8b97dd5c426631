"""Starts trainings that have imported torch already: SOCKET. `training_client` is the command of their workers.

Each connection is one worker: a watching process forks the training, forwards signals to it, kills it when the client
was killed, and reports how it has ended. A new interpreter would spend seconds of CPU on torch for each worker.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path

from tests.cluster.counting_training import train

REQUEST_BYTES = 1 << 18


def serve(path: str) -> None:
    """Accept workers until the process is killed. Prints a line when it listens."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                os._exit(watch(connection))
            connection.close()


def watch(connection: socket.socket) -> int:
    """Run one worker; its end is sent to the client as text, negative for a signal."""
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


def begin(request: dict[str, dict[str, str]], files: list[int]) -> None:
    """Be the training; never returns."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    code = 0
    atexit._clear()  # what the server itself has registered
    try:
        train(Path(request["arguments"]["results"]))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:  # noqa: BLE001  (what a script does not catch ends it)
        traceback.print_exc()
        code = getattr(error, "exit_code", 1)
    atexit._run_exitfuncs()  # the last reports are sent there
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
