"""A proxy that connects its clients to servers by the method CONNECT, as the one of a company's network."""

from __future__ import annotations

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class ConnectProxy(ThreadingHTTPServer):
    """`connected` are the addresses that clients asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        self.connected: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ConnectProxy

    def do_CONNECT(self) -> None:
        self.server.connected.append(self.path)
        host, _, port = self.path.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as there:
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=_copy, args=(there, self.connection), daemon=True)
            back.start()
            _copy(self.connection, there)
            back.join()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def connect_proxy() -> Iterator[ConnectProxy]:
    """A proxy in a thread of its own, until the end of the block."""
    proxy = ConnectProxy()
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
