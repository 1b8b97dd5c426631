"""Programs that end with their parent, and are found again by a pid file with the start time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

    from tools.devcluster.layout import Layout

PR_SET_PDEATHSIG: Final = 1
GO_ENVIRONMENT: Final = {"GOGC": "400"}
"""A heap of a few hundred megabytes may grow to five times its size: a fifth less CPU than at Go's default of twice."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """One program of a cluster and how it is started."""

    name: str
    argv: tuple[str, ...]


def start(program: Program, layout: Layout) -> subprocess.Popen[bytes]:
    """Start it, its output appended to its log. It is killed when the calling thread ends: call from the main one."""
    with layout.log(program.name).open("ab") as output:
        process = subprocess.Popen(
            program.argv,
            cwd=layout.root,
            env={**GO_ENVIRONMENT, **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  the supervisor has one thread
        )
    write_pid(layout.pid_file(program.name), process.pid)
    return process


def stop(process: subprocess.Popen[bytes], grace_s: float = 10.0) -> None:
    """Send SIGTERM, then SIGKILL; the process has exited when this returns."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
        process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def write_pid(path: Path, pid: int) -> None:
    """The identity of a process: a pid may be reused, so the start time is part of it."""
    path.write_text(f"{pid} {_started(pid)}\n")


def read_pid(path: Path) -> int | None:
    """The pid in the file if that very process still runs."""
    try:
        pid, started = path.read_text().split()
        return int(pid) if _started(int(pid)) == started else None
    except (OSError, ValueError):
        return None


def await_end(pid: int, timeout_s: float) -> bool:
    """Return whether the process, of any parent, ended in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


def _started(pid: int) -> str:
    # the 22nd field; the second, the name in brackets, may hold blanks and brackets itself
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
        return stat.read().rpartition(")")[2].split()[19]


def die_with_parent() -> None:
    """Have this process killed by SIGKILL when the thread that started it ends."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
