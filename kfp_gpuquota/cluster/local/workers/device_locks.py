"""A lock for each GPU that all users of the machine can see, so that two clusters do not hand out the same one.

It is a file in /tmp, named by the GPU's UUID and locked by flock(2); it holds the uid, the directory and the pid of the
cluster that has it. The daemon takes it, and every shim inherits it: the GPUs stay taken while jobs run that the daemon
has left behind. A daemon that comes back to such jobs finds its own directory in the file, and waits for the lock in a
thread: it gets it when the last of them ends. Between that end and the thread's turn the lock is free for a moment: so
a process that gets it reads the file as well, and leaves the GPU to a daemon named there that still runs.

Only real GPUs are locked. Containers see each other's locks where they share /tmp.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import stat
import threading
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.local.workers.shim import start_time
from kfp_gpuquota.errors import ConflictError, DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kfp_gpuquota.api import Device, Node

DIRECTORY: Final = Path("/tmp")  # noqa: S108 (shared on purpose: every user must find the same file)
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_FOR_ALL: Final = 0o666


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster that has a GPU."""

    uid: int
    home: str
    pid: int
    started: int = 0  # clock ticks since boot, to distinguish a later process with the same pid; 0: unknown

    @property
    def runs(self) -> bool:
        """Whether the daemon runs."""
        try:
            return self.started != 0 and start_time(self.pid) == self.started
        except OSError:
            return False


@contextmanager
def hold(nodes: Iterable[Node], holder: Holder, directory: Path = DIRECTORY) -> Iterator[tuple[int, ...]]:
    """Hold the nodes' GPUs; gives the locks' descriptors, for children to inherit.

    Raises ConflictError where another cluster has one of them, DeviceError where a lock cannot be opened.
    """
    with ExitStack() as stack:
        devices = [device for node in nodes for device in node.devices if device.uuid]
        yield tuple(stack.enter_context(_held(device, holder, directory)) for device in devices)


@contextmanager
def _held(device: Device, holder: Holder, directory: Path) -> Iterator[int]:
    descriptor = _opened(device, directory / f"gpuquota-{device.uuid}.lock")
    try:
        _take(device, descriptor, holder)
        yield descriptor
    finally:
        os.close(descriptor)


def _opened(device: Device, path: Path) -> int:
    try:
        with suppress(FileNotFoundError):  # without O_CREAT: the kernel may refuse that for others' files in /tmp
            return _checked(os.open(path, _FLAGS))
        descriptor = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, _FOR_ALL)
        os.fchmod(descriptor, _FOR_ALL)
    except FileExistsError:
        return _opened(device, path)
    except OSError as error:
        message = f"the lock of GPU {device.uuid}, {path}, cannot be opened: {error.strerror or error}"
        raise DeviceError(message) from error
    return descriptor


def _checked(descriptor: int) -> int:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError("it is no file")


def _take(device: Device, descriptor: int, holder: Holder) -> None:
    locked = _lock(descriptor)
    found = _read(descriptor)
    own = found is not None and (found.uid, found.home) == (holder.uid, holder.home)
    if not own and not (locked and (found is None or not found.runs)):
        raise ConflictError(_refusal(device, found))
    _write(descriptor, holder)
    if not locked:
        waiting = os.dup(descriptor)
        threading.Thread(target=_take_when_free, args=(waiting,), daemon=True).start()


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _take_when_free(descriptor: int) -> None:
    """Take the lock when the last job of an earlier daemon has ended. It is the same lock as the original's."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.close(descriptor)


def _refusal(device: Device, found: Holder | None) -> str:
    name = f"GPU {device.index} ({device.model}, {device.uuid})"
    if found is None:
        return f"{name} is in use by another cluster; two clusters cannot share a GPU: stop the other one first"
    try:
        user = pwd.getpwuid(found.uid).pw_name
    except KeyError:
        user = str(found.uid)
    return (
        f"{name} is in use by the cluster of user {user} in {found.home} (pid {found.pid}), and two clusters cannot "
        "share a GPU; end its jobs and stop it, or simulate GPUs: gpuquota cluster start --gpus 2 --gpu-memory 16G"
    )


def _read(descriptor: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Holder)
    except msgspec.DecodeError:
        return None


def _write(descriptor: int, holder: Holder) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, msgspec.json.encode(holder), 0)
