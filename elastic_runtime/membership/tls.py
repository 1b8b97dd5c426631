"""Connections to the coordinator, in the clear or over TLS.

The connection that carries events and orders is read by one thread and written by another. OpenSSL allows one call at a
time for each connection, and CPython before 3.13 does not see to that, so here a lock does: a reader waits outside it.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
from http.client import HTTPConnection, HTTPSConnection
from typing import Any


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
