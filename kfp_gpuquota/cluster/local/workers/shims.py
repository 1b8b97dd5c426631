"""Starting, watching, adopting and ending the shims above the workers.

A process is named by a pidfd, never by a number that may be given away. What a shim leaves in its directory is the
truth about its worker, so a daemon that starts again learns the same as one that watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from kfp_gpuquota.api.control_characters import last_line
from kfp_gpuquota.cluster.local.home import make_private
from kfp_gpuquota.cluster.local.workers import shim
from kfp_gpuquota.engine.records import KILLED_ABOVE, Owner

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

EXIT_SHIM_LOST: Final = KILLED_ABOVE + signal.SIGKILL
ERROR_FILE: Final = "error.txt"
WORKER_ID_VARIABLE: Final = "ELASTIC_WORKER_ID"
_SHIM = Path(shim.__file__)
_MOST_READ: Final = 2048
_OTHER_SHIM_DELAY_S: Final = 0.05


class WorkerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The program that a shim runs: spec.json."""

    command: tuple[str, ...]
    environment: dict[str, str]
    working_directory: str
    grace_period_s: float
    open_files: int = 0
    """The soft limit on open files; 0: as inherited."""
    log_limit: int = 0
    """The bytes of the log to keep; 0: all."""
    lease_s: float = 0.0
    """For how long the worker outlives the last renewal of its lease; 0: it needs none."""
    cgroup: str = ""
    """The cgroup to make for it; "": it has none of its own."""
    cgroup_files: dict[str, str] = {}
    """The content of files of that cgroup."""
    owner: Owner | None = None
    """The user that the worker becomes; None: the daemon's own."""


class Found(StrEnum):
    """The state of a worker, from its directory."""

    NEVER_STARTED = "never-started"
    RUNNING = "running"
    ENDED = "ended"
    REBOOTED = "rebooted"
    ASKED = "asked"
    """Its node is asked, and what it answers is reported like any other event of the worker."""


class ShimEvents(Protocol):
    """The events of shims, from the event loop."""

    def worker_started(self, worker: str) -> None:
        """The worker's process runs; may be reported again."""

    def worker_ended(self, worker: str, code: int) -> None:
        """The worker's process has ended, and nothing that it started is left."""

    def worker_not_started(self, worker: str, why: str) -> None:
        """The machine could not start it for now; it may be tried again."""


class Shims:
    """The shims of one daemon. Each shim, and not its worker, has the `inherited` descriptors."""

    def __init__(self, events: ShimEvents, inherited: Sequence[int] = ()) -> None:
        self._events, self._inherited = events, inherited
        self._pidfds: dict[str, int] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._directories: dict[str, Path] = {}
        self._loop = asyncio.get_running_loop()

    def start(self, worker: str, directory: Path, command: WorkerCommand) -> None:
        """Start the worker under a new shim. Raises OSError when the machine cannot; then nothing was started."""
        make_private(directory)
        shim.write_atomically(str(directory / "spec.json"), msgspec.to_builtins(command))
        spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)  # becomes the pidfd: a shim is never left unwatched
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SHIM), str(directory)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=self._inherited,
                cwd=directory,
            )
        finally:
            os.close(spare)
        self._children[worker] = child
        self._await_announcement(worker, child)
        self._watch(worker, directory, os.pidfd_open(child.pid))

    def adopt(self, worker: str, directory: Path) -> Found:
        """Learn what became of a worker that another daemon started, and watch it where it still runs."""
        if (directory / "exit.json").exists():
            return Found.ENDED
        identity = _read_json(directory / "process.json")
        if identity is None:
            return Found.NEVER_STARTED
        if _is_of_earlier_boot(identity):
            return Found.REBOOTED
        pidfd = _open_process(int(identity["shim_pid"]), int(identity["shim_start"]))
        if pidfd is None:
            end_leftovers(worker)
            return Found.ENDED
        self._watch(worker, directory, pidfd)
        return Found.RUNNING

    def terminate(self, worker: str) -> None:
        """SIGTERM now, SIGKILL after the worker's grace period."""
        self._signal(worker, signal.SIGTERM)

    def kill(self, worker: str) -> None:
        """Send SIGKILL to the worker immediately."""
        self._signal(worker, signal.SIGUSR1)

    def watches(self, worker: str) -> bool:
        """Return whether the worker's shim was alive at the last check."""
        return worker in self._pidfds

    def close(self) -> None:
        """Stop watching; the shims and their workers go on."""
        for pidfd in self._pidfds.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()
        for child in self._children.values():
            if child.stdout and not child.stdout.closed:
                self._loop.remove_reader(child.stdout)
                child.stdout.close()
            child.returncode = 0  # it continues independently: no wait and no warning
        self._children.clear()

    def _await_announcement(self, worker: str, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        pipe = child.stdout
        os.set_blocking(pipe.fileno(), False)

        def readable() -> None:
            message = pipe.read()
            self._loop.remove_reader(pipe)
            pipe.close()
            if message:
                self._events.worker_started(worker)

        self._loop.add_reader(pipe, readable)

    def _watch(self, worker: str, directory: Path, pidfd: int) -> None:
        self._pidfds[worker] = pidfd
        self._directories[worker] = directory
        self._loop.add_reader(pidfd, self._ended, worker)

    def _ended(self, worker: str) -> None:
        pidfd = self._pidfds.pop(worker)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        directory = self._directories.pop(worker)
        child = self._children.pop(worker, None)
        code = child.wait() if child else 0
        if code == shim.EXIT_LOCKED:
            self._follow_other(worker, directory)
            return
        if child and not any((directory / name).exists() for name in ("process.json", "exit.json")):
            self._events.worker_not_started(
                worker, f"the process above it ended with {code}; is the disk or the machine full?"
            )
            return
        if not (directory / "exit.json").exists():
            end_leftovers(worker)
        self._events.worker_ended(worker, exit_code(directory))

    def _follow_other(self, worker: str, directory: Path) -> None:
        """Another shim was there first: a daemon started it and died. Its papers appear within moments."""
        found = self.adopt(worker, directory)
        if found is Found.ENDED:
            self._events.worker_ended(worker, exit_code(directory))
        elif found is Found.NEVER_STARTED:
            self._loop.call_later(_OTHER_SHIM_DELAY_S, self._follow_other, worker, directory)
        else:
            self._events.worker_started(worker)

    def _signal(self, worker: str, number: signal.Signals) -> None:
        if (pidfd := self._pidfds.get(worker)) is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)


def exit_code(directory: Path) -> int:
    """Return the exit code; 137 (killed) if the shim was killed with the worker and could not record it."""
    ended = _read_json(directory / "exit.json")
    return int(ended["code"]) if ended else EXIT_SHIM_LOST


def ended_at(directory: Path) -> float | None:
    """Return when the worker has ended, in seconds since 1970; None if its shim could not record it.

    Of one that a restart of the machine ended: when it last wrote to its log, not when the machine was up again.
    """
    at = (_read_json(directory / "exit.json") or {}).get("at")
    if isinstance(at, int | float):
        return float(at)
    if _is_of_earlier_boot(_read_json(directory / "process.json") or {}):
        with contextlib.suppress(OSError):
            return (directory / "log").stat().st_mtime
    return None


def last_error(directory: Path) -> str:
    """Return the error that ended the worker's script, in one line: as it reported it, else the last line of its log.

    That is Kubernetes' termination message with `FallbackToLogsOnError`. A signal's cause is not in the log.
    """
    reported = last_line(_end_of(directory / ERROR_FILE))
    by_itself = 0 < exit_code(directory) <= KILLED_ABOVE
    return reported or (last_line(_end_of(directory / "log")) if by_itself else "")


def _end_of(path: Path) -> str:
    """Return the end of a file that the worker wrote, and "" instead of what a link or a pipe leads to."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(file, "rb") as opened, contextlib.suppress(OSError):
        opened.seek(max(0, os.fstat(file).st_size - _MOST_READ))
        return opened.read(_MOST_READ).decode(errors="replace")
    return ""


def lease_ended(directory: Path) -> bool:
    """Return whether the worker was ended because its lease expired."""
    return bool((_read_json(directory / "exit.json") or {}).get("lease_ended", False))


def ran_out_of_memory(directory: Path) -> bool:
    """Return whether the kernel killed processes of the worker for its memory limit."""
    return bool((_read_json(directory / "exit.json") or {}).get("out_of_memory", False))


def remove_cgroup(directory: Path) -> None:
    """Remove the cgroup of a worker that has ended, where its shim was killed and could not."""
    with contextlib.suppress(OSError):
        if cgroup := (_read_json(directory / "spec.json") or {}).get("cgroup"):
            Path(cgroup).rmdir()


def process_id(directory: Path) -> int | None:
    """Return the worker's pid for display; the process may have exited."""
    identity = _read_json(directory / "process.json")
    return int(identity["pid"]) if identity else None


def prevent(directory: Path) -> bool:
    """Make sure that a worker which never started never will; False when it just has.

    A daemon may have died right after it started the shim, which then comes late.
    """
    make_private(directory)
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        if (directory / "process.json").exists():
            return False
        shim.write_atomically(str(directory / "exit.json"), {"code": EXIT_SHIM_LOST, "at": time.time()})
        return True
    finally:
        os.close(lock)


def without_record(jobs: Path, recorded: Container[str]) -> Iterator[str]:
    """Workers that run and that the state does not have: it was restored from a copy, or a record was set aside."""
    for directory in jobs.glob("*/workers/*"):
        if directory.name in recorded or (directory / "exit.json").exists():
            continue
        identity = _read_json(directory / "process.json")
        if identity is None or _is_of_earlier_boot(identity):
            continue
        pidfd = _open_process(int(identity["shim_pid"]), int(identity["shim_start"]))
        if pidfd is not None:
            os.close(pidfd)
            yield directory.name


def end_leftovers(worker: str) -> None:
    """Kill what a worker left when its shim was killed; found by the worker id in the environment, never by number."""
    marker = f"{WORKER_ID_VARIABLE}={worker}".encode()
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(int(process.name))
            try:
                if marker in (process / "environ").read_bytes().split(b"\0"):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)


def _is_of_earlier_boot(identity: dict[str, Any]) -> bool:
    """Return whether the process started before the last boot, so that its pid may belong to another process."""
    return bool(identity.get("boot_id", shim.boot_id()) != shim.boot_id())


def _open_process(pid: int, start: int) -> int | None:
    """Return a pidfd for the process that was started then; None if it has ended, or the number is another's.

    OSError if this machine cannot open it: then nothing is known of it.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    with contextlib.suppress(OSError):
        if shim.start_time(pid) == start and not _is_zombie(pid):
            return pidfd
    os.close(pidfd)
    return None


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in {"Z", "X"}


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return content
