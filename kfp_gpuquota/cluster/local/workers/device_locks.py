"""A lock for each GPU of the machine, so that two clusters do not hand out the same one.

A lock is an abstract Unix socket that listens, with the GPU's UUID in its name. It exists while a process has it open:
the daemon opens it, and every shim inherits it, so the GPUs stay taken while jobs run that the daemon has left behind.
A daemon that comes back to such jobs opens another one beside theirs. It distinguishes its own sockets by their inodes,
which the kernel lists, and which it has written to its private directory.

Nothing of it can be forged: no file of others is read or waited for, a lock ends with its processes, and who holds one
is what the kernel says (SO_PEERCRED). Any user can take a free GPU's lock, with or without a cluster; the message names
the process, which an administrator can end. Rejected: files in /tmp, locked by flock(2). A file that another user
made first, with a mode of their choice or as a link or FIFO, blocks the GPU until root removes it, and what it says of
its holder is anybody's word.

Only real GPUs are locked. Containers see each other's locks where they share the network namespace. A lock of version
0.2 and earlier, a file in /tmp, is respected while a process holds it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import pwd
import secrets
import socket
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.local.home import write_private
from kfp_gpuquota.cluster.local.workers.shim import boot_id
from kfp_gpuquota.errors import ConflictError, DeviceError
from kfp_gpuquota.server.transport.unix_sockets import peer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kfp_gpuquota.api import Device, Node

PREFIX: Final = "gpuquota-gpu"
EARLIER: Final = Path("/tmp")  # noqa: S108 (where versions until 0.2 have their lock files)
SOCKETS: Final = Path("/proc/net/unix")
_LISTENS: Final = 1 << 16  # the kernel's __SO_ACCEPTCON; connections to a socket are listed by its name as well

log = logging.getLogger(__name__)


@contextmanager
def hold(
    nodes: Iterable[Node], record: Path, *, prefix: str = PREFIX, earlier: Path = EARLIER
) -> Iterator[tuple[int, ...]]:
    """Hold the nodes' GPUs; gives the locks' descriptors, for children to inherit. `record`: a private file.

    Raises ConflictError where another cluster has one of them, DeviceError where a lock cannot be opened.
    """
    devices = [device for node in nodes for device in node.devices if device.uuid]
    own = _read(record)
    with ExitStack() as stack:
        descriptors = []
        for device in devices:
            _check_earlier(device, earlier)
            lock, inode = _taken(device, f"{prefix}/{device.uuid}/", frozenset(own))
            stack.callback(lock.close)
            own.append(inode)
            descriptors.append(lock.fileno())
        if devices:
            existing = {inode for _name, inode in _listeners()}
            _write(record, [inode for inode in own if inode in existing])
        yield tuple(descriptors)


def _taken(device: Device, prefix: str, own: frozenset[int]) -> tuple[socket.socket, int]:
    """Return a socket that locks the GPU, and its inode. Raises ConflictError, DeviceError."""
    _check_others(device, prefix, own)
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        lock.bind(f"\0{prefix}{secrets.token_hex(8)}")
        lock.listen(1)
        inode = os.fstat(lock.fileno()).st_ino
        _check_others(device, prefix, own | {inode})  # each announces first, then looks: at most one of two holds it
    except OSError as error:
        lock.close()
        raise DeviceError(f"the lock of GPU {device.uuid} cannot be opened: {error.strerror or error}") from error
    except BaseException:
        lock.close()
        raise
    return lock, inode


def _check_others(device: Device, prefix: str, own: frozenset[int]) -> None:
    """Raise ConflictError where the GPU has a lock that is not this cluster's."""
    for name, inode in _listeners():
        if name.startswith(prefix) and inode not in own:
            raise ConflictError(_refusal(device, _holder(name)))


def _listeners() -> Iterator[tuple[str, int]]:
    """Yield name and inode of the abstract sockets of this network namespace that listen."""
    try:
        lines = SOCKETS.read_bytes().splitlines()
    except OSError as error:
        raise DeviceError(f"the locks of GPUs cannot be read: {SOCKETS}: {error.strerror}") from error
    for line in lines:
        fields = line.split(None, 7)
        if len(fields) == 8 and fields[7].startswith(b"@") and int(fields[3], 16) & _LISTENS:
            yield fields[7][1:].decode(errors="replace"), int(fields[6])


def _holder(name: str) -> tuple[int, int] | None:
    """Return process and user of the one that bound the socket, by the kernel; None where it cannot be asked."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as asking:
        asking.settimeout(0)
        try:
            asking.connect(f"\0{name}")
            return peer(asking)
        except OSError:  # its queue is full, or it has ended meanwhile
            return None


def _check_earlier(device: Device, directory: Path) -> None:
    """Raise ConflictError while a process holds the lock file of an earlier version, unless it says that it is ours.

    That may be a lie: then the GPU is only locked by what this version locks it with, which is no lie.
    """
    path = directory / f"gpuquota-{device.uuid}.lock"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        if _says_ours(descriptor):
            return
        raise ConflictError(_refusal(device, None)) from None
    finally:
        os.close(descriptor)


def _says_ours(descriptor: int) -> bool:
    try:
        return msgspec.json.decode(os.pread(descriptor, 4096, 0), type=_Earlier).uid == os.geteuid()
    except (OSError, msgspec.DecodeError):
        return False


class _Earlier(msgspec.Struct):
    uid: int


def _refusal(device: Device, found: tuple[int, int] | None) -> str:
    name = f"GPU {device.index} ({device.model}, {device.uuid})"
    hint = "or simulate GPUs: gpuquota cluster start --gpus 2 --gpu-memory 16G"
    if found is None:
        return f"{name} is in use by another cluster; two clusters cannot share a GPU: stop the other one first, {hint}"
    pid, uid = found
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return (
        f"{name} is in use by a cluster of user {user} (started as process {pid}), and two clusters cannot share a "
        f"GPU; end its jobs and stop it, {hint}"
    )


class _Record(msgspec.Struct):
    """The inodes of this cluster's locks, which are those of other sockets after the next boot."""

    boot: str
    inodes: list[int]


def _read(record: Path) -> list[int]:
    try:
        found = msgspec.json.decode(record.read_bytes(), type=_Record)
    except (OSError, msgspec.DecodeError):
        return []
    return found.inodes if found.boot == boot_id() else []


def _write(record: Path, own: list[int]) -> None:
    try:
        write_private(record, msgspec.json.encode(_Record(boot_id(), own)).decode())
    except OSError as error:
        log.warning("%s cannot be written: the next daemon will not find its own GPUs' locks: %s", record, error)
