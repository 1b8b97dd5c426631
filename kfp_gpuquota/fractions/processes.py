"""Processes of this machine: told apart for ever, known by whose they are, ended without mistake."""

from __future__ import annotations

import os
import re
import select
import signal
from typing import TYPE_CHECKING, Final, NamedTuple

from kfp_gpuquota.fractions.claims import UNKNOWN, Process

if TYPE_CHECKING:
    from collections.abc import Callable

WORKER_VARIABLE: Final = b"ELASTIC_WORKER_ID="
MAX_ANCESTORS: Final = 32
PAGE: Final = 4096
# kubepods-burstable-podUID.slice (systemd, "_" for "-"), kubepods/burstable/podUID (cgroupfs); of a static pod no "-"
_POD_IN_CGROUP = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?![0-9a-f])")
# cri-containerd-ID.scope, crio-ID.scope, docker-ID.scope, ...:cri-containerd:ID, or the number alone
_CONTAINER_IN_CGROUP = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


def identify(pid: int) -> Process | None:
    """The process with its start time; None when it has ended."""
    fields = _stat(pid)
    return None if fields is None else Process(pid, int(fields[19]))


def worker_of(pid: int) -> str:
    """The embedded cluster's worker that the process belongs to, by the environment it was started with.

    A child that was given another environment is its nearest ancestor's.
    """
    for _ in range(MAX_ANCESTORS):
        for entry in read(f"/proc/{pid}/environ").split(b"\0"):
            if entry.startswith(WORKER_VARIABLE):
                return entry.removeprefix(WORKER_VARIABLE).decode()
        if (fields := _stat(pid)) is None or (pid := int(fields[1])) <= 1:
            break
    return UNKNOWN


class Place(NamedTuple):
    """Where a process runs, as its cgroup tells: the pod's UID, the container's number; UNKNOWN where it does not."""

    pod: str
    container: str


def place_of(pid: int) -> Place:
    """The pod and the container in whose cgroup the process is."""
    return place_in(read(f"/proc/{pid}/cgroup").decode(errors="replace"))


def place_in(cgroups: str) -> Place:
    """The same from the content of /proc/PID/cgroup, of version 1 (a line a controller) or 2 (one line).

    Of a path the leftmost is taken: what is below its own cgroup a container may name as it likes.
    """
    pod, container = _POD_IN_CGROUP.search(cgroups), _CONTAINER_IN_CGROUP.search(cgroups)
    return Place(
        pod.group(1).replace("_", "-") if pod else UNKNOWN,
        container.group() if container else UNKNOWN,
    )


class Processes:
    """The processes that were seen, each held by a pidfd, so that a number given away is never taken for another's.

    Reading the start time of 200 processes costs 5 ms in each round; asking the kernel which of 200 pidfds have ended
    is one call.
    """

    def __init__(self, look_up: Callable[[int], str]) -> None:
        self._look_up = look_up
        self._known: dict[int, Process] = {}
        self._owners: dict[int, str] = {}
        self._handles: dict[int, int] = {}
        self._ended = select.epoll()

    def refresh(self) -> None:
        """Forget those that have ended; to be called before each round."""
        for handle, _ in self._ended.poll(0):
            self._forget(self._handles[handle])

    def get(self, pid: int) -> Process | None:
        """The process that has the number now; None when it has ended."""
        return self._known.get(pid) or self._hold(pid)

    def owner_of(self, process: Process) -> str:
        """The workload, or UNKNOWN. What is not known yet is looked up again the next time."""
        if not (owner := self._owners.get(process.pid, UNKNOWN)):
            owner = self._owners[process.pid] = self._look_up(process.pid)
        return owner

    def end(self, process: Process, *, force: bool) -> bool:
        """SIGTERM, or SIGKILL. False when that process has ended; PermissionError where it is not ours to end."""
        handle = next((handle for handle, pid in self._handles.items() if pid == process.pid), None)
        if handle is None or self._known[process.pid] != process:
            return False
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL if force else signal.SIGTERM)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Let go of all."""
        for pid in list(self._known):
            self._forget(pid)
        self._ended.close()

    def _hold(self, pid: int) -> Process | None:
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            return None
        if (process := identify(pid)) is None:
            os.close(handle)
            return None
        self._known[pid], self._handles[handle] = process, pid
        self._ended.register(handle, select.EPOLLIN)
        return process

    def _forget(self, pid: int) -> None:
        handle = next(handle for handle, held in self._handles.items() if held == pid)
        del self._known[pid], self._handles[handle]
        self._owners.pop(pid, None)
        self._ended.unregister(handle)
        os.close(handle)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on (state, parent, ...); None for one that has ended."""
    content = read(f"/proc/{pid}/stat").decode(errors="replace")
    fields = content.rpartition(")")[2].split()
    return None if not fields or fields[0] in {"Z", "X"} else fields


def read(path: str) -> bytes:
    """A small file, whole; empty where it cannot be read. Without the layers that cost more than the system calls."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return _whole(descriptor)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _whole(descriptor: int) -> bytes:
    content = os.read(descriptor, PAGE)
    while len(content) % PAGE == 0 and (more := os.read(descriptor, PAGE)):
        content += more
    return content
