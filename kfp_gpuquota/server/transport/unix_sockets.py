"""HTTP over Unix sockets. Each end verifies that the other one runs as the same user; a client trusts root, too.

A socket's address holds 108 bytes at most; both ends reach a longer path through a descriptor of its directory
(`/proc/self/fd/N/NAME`). The kernel reports the user of the other end (SO_PEERCRED): the process that listened, or the
one that connected. A client verifies it before the first byte is sent, so a process that took over the path receives
neither a token nor a request. Rejected: TCP on loopback, where any user may take a port that is free for a moment.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.errors import UnauthorizedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEME: Final = "unix://"
BACKLOG: Final = 1024
_CREDENTIALS: Final = struct.Struct("iII")
_GROUP: Final = struct.Struct("I")
_SO_PEERGROUPS: Final = 59
_MOST_GROUPS: Final = 256
ROOT: Final = 0
"""The server of a cluster that several users share; it can read a client's memory as well as its token."""


def socket_path(url: str) -> Path:
    """Return the socket that `unix:///PATH` names. Raises UsageError for any other address."""
    if not url.startswith(f"{SCHEME}/"):
        raise UsageError(
            f"the cluster's address is {url!r}, but it must be unix:///PATH/OF/SOCKET; forward the socket of another "
            "machine with: ssh -N -L /PATH/OF/SOCKET:/ITS/HOME/socket HOST"
        )
    return Path(url.removeprefix(SCHEME))


def listen(path: Path, mode: int = 0o600, group: int = -1) -> socket.socket:
    """Return a socket that listens at `path` and takes the place of an earlier one in one step.

    It is that of a `group`, -1 being the process's own. On a file system without free inodes it uses that of the
    earlier one.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        partial.unlink(missing_ok=True)
        try:
            _bind(listener, partial)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            path.unlink(missing_ok=True)
            _bind(listener, partial)
        os.chown(partial, -1, group)
        partial.chmod(mode)
        listener.listen(BACKLOG)
        partial.replace(path)
    except BaseException:
        listener.close()
        raise
    return listener


def _bind(listener: socket.socket, path: Path) -> None:
    with _address(path) as address:
        listener.bind(address)


def peer(connected: socket.socket) -> tuple[int, int]:
    """Return (process id, user id) of the other end of a Unix socket."""
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return pid, uid


def peer_groups(connected: socket.socket) -> frozenset[int]:
    """Return the groups of the process at the other end of a Unix socket; none if it has more than 256."""
    _, _, primary = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    try:
        packed = connected.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_GROUPS * _GROUP.size)
    except OSError:
        return frozenset()
    return frozenset({primary, *(group for (group,) in _GROUP.iter_unpack(packed))})


class UnixConnection(http.client.HTTPConnection):
    """HTTP to the server at a socket. `connect` raises UnauthorizedError where another user's process serves it."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Open the connection, and verify the server."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connected.settimeout(self.timeout)
            with _address(self._path) as address:
                connected.connect(address)
            self._verify(peer(connected)[1])
        except BaseException:
            connected.close()
            raise
        self.sock = connected

    def _verify(self, uid: int) -> None:
        if uid not in {os.geteuid(), ROOT}:
            raise UnauthorizedError(
                f"{self._path} is served by user {uid}, not by user {os.geteuid()}, so nothing was sent to it; choose "
                "a directory of your own with GPUQUOTA_HOME"
            )


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """Return an address for bind and connect, for a path of any length."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
