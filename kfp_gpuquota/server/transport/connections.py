"""Which connections a server accepts: how many in all and from one source, from which user, and for how long idle.

A source is a process on a Unix socket, an address on TCP. A connection that has not sent a whole request head within
`Limits.head_s` is closed, and so is one beyond a limit: half requests must not keep others out. aiohttp itself limits
neither; its handler is extended where it learns of connections and of bytes. TLS ports count connections when they are
accepted, before the handshake: see `accepting`.

    runner = LimitedRunner(app, Limits(), access_log=None)
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from kfp_gpuquota.server.transport.unix_sockets import peer

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

BODY_TIMEOUT_S: Final = 30.0
"""A body is at most `app.MAX_BODY_BYTES` long, so one that takes longer is not on its way."""
MAX_HEAD_BYTES: Final = 64 << 10
"""Of all lines of a request's head together; aiohttp limits each of them."""
WARN_EVERY_S: Final = 10.0
_RESERVED_DESCRIPTORS: Final = 256
"""Descriptors for other purposes of a daemon: SQLite, pidfds, files."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """`per_source` connections of one source, `total` of all; seconds for a request's head, and between requests.

    `handshake_s`: from the accepted connection to the end of its TLS handshake. `by_token`: a connection counts as
    unproven until `Connection.prove` is called for it, and not only until the end of its first request's head. With
    `all_users` a Unix socket serves every user, and each of them is a source.
    """

    per_source: int = 128
    total: int = 4096
    head_s: float = 10.0
    idle_s: float = 75.0
    handshake_s: float = 10.0
    by_token: bool = False
    all_users: bool = False


SHARED_LIMITS: Final = Limits(per_source=1024, total=32_768, all_users=True)
"""Limits for the users of a shared cluster, each with all its commands and workers."""

WORKER_LIMITS: Final = Limits(per_source=4096, total=32_768, by_token=True)
"""Limits for workers' connections: workers of one node may share an address, so a source may have many connections."""


def raise_descriptor_limit() -> int:
    """Raise this process's limit on open files to the hard one; returns the one before, for programs it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


class Entry:
    """A connection that is counted. `proven`: nothing limits it any more but the number of connections."""

    def __init__(self, admission: Admission, source: str) -> None:
        self.source = source
        self.on_proven: Callable[[], None] = lambda: None
        self._admission: Admission | None = admission

    def prove(self) -> None:
        """Note that the other end is one that the server serves."""
        done, self.on_proven = self.on_proven, lambda: None
        done()

    def leave(self) -> None:
        """Note, once, that the connection has ended."""
        self.prove()
        if self._admission is not None:
            self._admission.leave(self.source)
            self._admission = None


class Admission:
    """Counts the connections that are open."""

    def __init__(self, limits: Limits) -> None:
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.limits = limits
        self._total = max(1, min(limits.total, descriptors - _RESERVED_DESCRIPTORS))
        self._open: Counter[str] = Counter()
        self._count = 0
        self._warned_at, self._refused = -WARN_EVERY_S, 0

    def enter(self, source: str) -> Entry | None:
        """Count a connection; None where it is one too many."""
        if self._open[source] >= self.limits.per_source or self._count >= self._total:
            self._warn(source)
            return None
        self._open[source] += 1
        self._count += 1
        return Entry(self, source)

    def leave(self, source: str) -> None:
        """A counted connection has ended."""
        self._open[source] -= 1
        self._count -= 1
        if not self._open[source]:
            del self._open[source]

    def _warn(self, source: str) -> None:
        count = self._open[source] or self._open.pop(source)
        self._refused += 1
        if time.monotonic() - self._warned_at < WARN_EVERY_S:
            return
        log.warning(
            "%d connections are refused, the last one from %s: it has %d of at most %d, and %d of at most %d are open",
            self._refused, source, count, self.limits.per_source, self._count, self._total,
        )  # fmt: skip
        self._warned_at, self._refused = time.monotonic(), 0


class LimitedRunner(web.AppRunner):
    """aiohttp's runner of an application, with limits on connections. Compressed bodies are not decompressed."""

    def __init__(self, app: web.Application, limits: Limits, **more: Any) -> None:
        super().__init__(app, keepalive_timeout=limits.idle_s, auto_decompress=False, **more)
        self.admission = Admission(limits)

    async def _make_server(self) -> Any:
        return _LimitedServer(await super()._make_server(), self.admission)


class _LimitedServer:
    """The interface of a server for aiohttp's runner and asyncio."""

    def __init__(self, server: web.Server, admission: Admission) -> None:
        self._server, self._admission = server, admission

    def __call__(self, entry: Entry | None = None) -> RequestHandler:
        arguments = self._server._kwargs  # noqa: SLF001  (what Server.__call__ passes on)
        loop = self._server._loop  # noqa: SLF001
        return Connection(self._server, self._admission, entry, loop=loop, **arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


class Connection(RequestHandler):
    """One connection. `entry`: it was counted when it was accepted."""

    __slots__ = ("_admission", "_entry", "_group", "_head_bytes", "_head_timer", "_payload")

    def __init__(self, manager: web.Server, admission: Admission, entry: Entry | None, **more: Any) -> None:
        super().__init__(manager, **more)
        self._admission = admission
        self._entry = entry
        self._group: dict[Connection, None] | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._payload: Any = None  # the body of the last request, of which the rest may be on its way

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, unless it was counted before its handshake."""
        super().connection_made(transport)
        if self._entry is None:
            source = _source(transport, all_users=self._admission.limits.all_users)
            self._entry = self._admission.enter(source) if source is not None else None
        if self._entry is None:
            cast("asyncio.Transport", transport).abort()
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Pass the bytes on, and limit the size of a request's head and the time for it."""
        before, in_body = self._request_count, self._payload is not None and not self._payload.is_eof()
        self._head_bytes = 0 if in_body or not self.idle else self._head_bytes + len(data)
        super().data_received(data)
        if self._request_count != before:
            self._stop_timer()
            self._head_bytes = 0
            if self._messages:
                self._payload = self._messages[-1][1]
            if self._entry is not None and not self._admission.limits.by_token:
                self._entry.prove()
        elif self._head_bytes > MAX_HEAD_BYTES and self.transport is not None:
            self.transport.abort()
        elif self._head_timer is None and self.idle:
            self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Count the connection no more."""
        self._stop_timer()
        if self._entry is not None:
            self._entry.leave()
            self._entry = None
        if self._group is not None:
            self._group.pop(self, None)
            self._group = None
        super().connection_lost(exc)

    def prove(self, group: dict[Connection, None]) -> None:
        """Note that a request on this connection has presented a valid token; `group` holds it until it ends."""
        if self._group is not group:
            if self._group is not None:
                self._group.pop(self, None)
            self._group = group
            group[self] = None
        if self._entry is not None:
            self._entry.prove()

    @property
    def idle(self) -> bool:
        """Return whether no request is being answered."""
        return self._current_request is None and not self._messages

    def end(self) -> None:
        """Close the connection without waiting for what is not sent yet."""
        if self.transport is not None:
            self.transport.abort()

    def _await_head(self) -> None:
        self._head_timer = self._loop.call_later(self._admission.limits.head_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.idle and self.transport is not None:
            self.transport.abort()


def _source(transport: asyncio.BaseTransport, *, all_users: bool) -> str | None:
    """The other end; None for another user's process, unless the server is for all users."""
    connected = transport.get_extra_info("socket")
    if connected.family != socket.AF_UNIX:
        peername = transport.get_extra_info("peername")  # None if the other end has already closed
        return address(peername)
    pid, uid = peer(connected)
    if all_users:
        return f"user {uid}"
    if uid != os.geteuid():
        log.warning("a connection of user %d (process %d) is refused", uid, pid)
        return None
    return f"process {pid}"


def address(peername: Any) -> str:
    """Return the source that a peer's address is; the addresses of an IPv6 network (/64) are one."""
    host = str(peername[0]) if peername else "unknown"
    if ":" not in host or host.startswith("::ffff:"):
        return f"address {host}"
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return f"network {socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8))}"
