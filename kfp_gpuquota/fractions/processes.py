"""Processes of this machine: identifies them despite reused pids, finds their workloads, and ends them safely."""

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
    """Return the process with its start time; None when it has exited."""
    fields = _stat(pid)
    return None if fields is None else Process(pid, int(fields[19]))


def worker_of(pid: int) -> str:
    """Return the embedded cluster's worker that the process belongs to, by the environment it was started with.

    A child with another environment belongs to the worker of its nearest ancestor.
    """
    for _ in range(MAX_ANCESTORS):
        for entry in read(f"/proc/{pid}/environ").split(b"\0"):
            if entry.startswith(WORKER_VARIABLE):
                return entry.removeprefix(WORKER_VARIABLE).decode()
        if (fields := _stat(pid)) is None or (pid := int(fields[1])) <= 1:
            break
    return UNKNOWN


class ContainerIdentity(NamedTuple):
    """The pod's UID and the container's id of a process, from its cgroup; UNKNOWN where it has none."""

    pod: str
    container: str


def container_of(pid: int) -> ContainerIdentity:
    """Return the pod and the container in whose cgroup the process is."""
    return container_in(read(f"/proc/{pid}/cgroup").decode(errors="replace"))


def container_in(cgroups: str) -> ContainerIdentity:
    """Return the same from the content of /proc/PID/cgroup, of version 1 (a line per controller) or 2 (one line).

    The leftmost match in a path is used: a container can choose the names below its own cgroup.
    """
    pod, container = _POD_IN_CGROUP.search(cgroups), _CONTAINER_IN_CGROUP.search(cgroups)
    return ContainerIdentity(
        pod.group(1).replace("_", "-") if pod else UNKNOWN,
        container.group() if container else UNKNOWN,
    )


class Processes:
    """The tracked processes, each held by a pidfd, so that a reused pid is never mistaken for the old process.

    Rejected: reading the start time of 200 processes, which takes 5 ms in each round. One call to the kernel returns
    which of 200 pidfds have exited.
    """

    def __init__(self, look_up: Callable[[int], str]) -> None:
        self._look_up = look_up
        self._known: dict[int, Process] = {}
        self._owners: dict[int, str] = {}
        self._handles: dict[int, int] = {}
        self._ended = select.epoll()

    def refresh(self) -> None:
        """Remove the processes that have exited; call it before each round."""
        for handle, _ in self._ended.poll(0):
            self._forget(self._handles[handle])

    def get(self, pid: int) -> Process | None:
        """Return the process that has the pid now; None when it has exited."""
        return self._known.get(pid) or self._hold(pid)

    def owner_of(self, process: Process) -> str:
        """Return the process's workload, or UNKNOWN, which is looked up again the next time."""
        if not (owner := self._owners.get(process.pid, UNKNOWN)):
            owner = self._owners[process.pid] = self._look_up(process.pid)
        return owner

    def end(self, process: Process, *, force: bool) -> bool:
        """Send SIGTERM, or SIGKILL with `force`; return False if the process has exited. Raises PermissionError."""
        handle = next((handle for handle, pid in self._handles.items() if pid == process.pid), None)
        if handle is None or self._known[process.pid] != process:
            return False
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL if force else signal.SIGTERM)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Close the handles of all processes."""
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
    """Return the fields of /proc/PID/stat from the third on (state, parent, ...); None if the process has exited."""
    content = read(f"/proc/{pid}/stat").decode(errors="replace")
    fields = content.rpartition(")")[2].split()
    return None if not fields or fields[0] in {"Z", "X"} else fields


def read(path: str) -> bytes:
    """Return a small file's content; empty where it cannot be read. Uses os.read, which is faster than file objects."""
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
