"""Connections to the coordinator: in the clear, over TLS, or over a Unix socket.

The connection that carries events and orders is read by one thread and written by another. OpenSSL allows one call at a
time for each connection, and CPython before 3.13 does not ensure that, so here a lock does: a reader waits outside it.

The server of a Unix socket runs as this process's user, or as root where several users share a cluster: the kernel
reports the user of the process that listens (SO_PEERCRED). It is verified before the first byte is sent: a process
that took over the path receives no token, and its orders are not read. A path longer than the 108 bytes of a socket's
address is reached through a descriptor of its directory.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import threading
from http.client import HTTPConnection, HTTPSConnection
from typing import Any

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


class TwoThreadSocket(ssl.SSLSocket):
    """A TLS socket that one thread may read while another writes. Made by a context of `context_for`."""

    _lock: threading.RLock

    @classmethod
    def _create(cls, *arguments: Any, **more: Any) -> TwoThreadSocket:
        made: TwoThreadSocket = super()._create(*arguments, **more)  # type: ignore[misc]
        made._lock = threading.RLock()
        return made

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Read what is there, after waiting for it; TimeoutError as any socket."""
        while True:
            timeout = self.gettimeout()
            if not self.pending() and not _readable(self, timeout):
                raise TimeoutError("the read operation timed out")
            with self._lock:
                self.settimeout(0.0)  # a part of a record, or one without data, must not keep the writer out
                try:
                    return super().recv_into(buffer, nbytes, flags)
                except ssl.SSLWantReadError:
                    continue
                finally:
                    self.settimeout(timeout)

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Send all of it."""
        with self._lock:
            super().sendall(data, flags)

    def shutdown(self, how: int) -> None:
        """Wake the thread that reads; TLS is not taken off, which would let it read what is encrypted."""
        socket.socket.shutdown(self, how)


def _readable(connection: socket.socket, timeout_s: float | None) -> bool:
    """Return whether there is something to read; by poll, because select accepts no descriptors above 1,023."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1e3))


def open_connection(host: str, port: int, ca_file: str | None, timeout_s: float) -> HTTPConnection:
    """A connection in the clear where `ca_file` is None, else over TLS to a server that this authority vouches for."""
    if ca_file is None:
        return HTTPConnection(host, port, timeout=timeout_s)
    return HTTPSConnection(host, port, timeout=timeout_s, context=context_for(ca_file))


def context_for(ca_file: str) -> ssl.SSLContext:
    """Trust in one authority (a file, read again as it rotates), or in the system's where the name is empty."""
    context = ssl.create_default_context(cafile=ca_file or None)
    context.sslsocket_class = TwoThreadSocket
    return context
