"""HTTP over a Unix socket whose server runs as this process's user, or as root where several users share a cluster.

The kernel reports the user of the process that listens (SO_PEERCRED). It is verified before the first byte is sent: a
process that took over the path receives no token, and its orders are not read. A path longer than the 108 bytes of a
socket's address is reached through a descriptor of its directory.
"""

from __future__ import annotations

import os
import socket
import struct
from http.client import HTTPConnection

SCHEME = "unix://"
ROOT = 0
_CREDENTIALS = struct.Struct("3i")


class UnixConnection(HTTPConnection):
    """HTTP to the server at a socket. `connect` raises OSError where another user's process serves it."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Open the connection, and verify the server."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(self.timeout)
            _connect(connected, self._path)
            self._verify(server_user(connected))
        except BaseException:
            connected.close()
            raise
        self.sock = connected

    def _verify(self, uid: int) -> None:
        if uid not in {os.geteuid(), ROOT}:
            raise PermissionError(f"{self._path} is served by user {uid}, not by user {os.geteuid()}")


def server_user(connected: socket.socket) -> int:
    """Return the user id of the process that listened."""
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(packed)[1]
    return uid


def split_address(url: str) -> tuple[str, str] | None:
    """Return (socket, path of the request) of `unix:///SOCKET:/PATH`; None for anything else."""
    file, _, path = url.removeprefix(SCHEME).rpartition(":/")
    return (file, f"/{path}") if url.startswith(f"{SCHEME}/") and file else None


def _connect(connected: socket.socket, path: str) -> None:
    parent, name = os.path.split(path)
    directory = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connected.connect(f"/proc/self/fd/{directory}/{name}")
    finally:
        os.close(directory)
