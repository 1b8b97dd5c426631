"""Which connections a server accepts: how many in all and from one source, from which user, and for how long idle.

A source is a process on a Unix socket, an address on TCP. A connection that has not sent a whole request head within
`Limits.head_s` is closed, and so is one beyond a limit: half requests must not keep others out. aiohttp itself limits
neither; its handler is extended where it learns of connections and of bytes.

    runner = LimitedRunner(app, Limits(), access_log=None)
"""

from __future__ import annotations

import logging
import os
import resource
import socket
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from kfp_gpuquota.server.transport.unix_sockets import peer

if TYPE_CHECKING:
    import asyncio

BODY_TIMEOUT_S: Final = 30.0
"""A body is at most `app.MAX_BODY_BYTES` long, so one that takes longer is not on its way."""
_RESERVED_DESCRIPTORS: Final = 256
"""Descriptors for other purposes of a daemon: SQLite, pidfds, files."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """`per_source` connections of one source, `total` of all; seconds for a request's head, and between requests."""

    per_source: int = 128
    total: int = 4096
    head_s: float = 10.0
    idle_s: float = 75.0


WORKER_LIMITS: Final = Limits(per_source=4096, total=32_768)
"""Limits for workers' connections: workers of one node may share an address, so a source may have many connections."""


def raise_descriptor_limit() -> int:
    """Raise this process's limit on open files to the hard one; returns the one before, for programs it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


class LimitedRunner(web.AppRunner):
    """aiohttp's runner of an application, with limits on connections."""

    def __init__(self, app: web.Application, limits: Limits, **more: Any) -> None:
        super().__init__(app, keepalive_timeout=limits.idle_s, **more)
        self._admission = Admission(limits)

    async def _make_server(self) -> Any:
        return _LimitedServer(await super()._make_server(), self._admission)


class Admission:
    """Counts the connections that are open."""

    def __init__(self, limits: Limits) -> None:
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.limits = limits
        self._total = max(1, min(limits.total, descriptors - _RESERVED_DESCRIPTORS))
        self._open: Counter[str] = Counter()

    def enter(self, source: str) -> bool:
        """Count a connection; False where it is one too many."""
        if self._open[source] >= self.limits.per_source or self._open.total() >= self._total:
            log.warning(
                "a connection from %s is refused: it has %d of at most %d, and %d of at most %d are open",
                source, self._open[source], self.limits.per_source, self._open.total(), self._total,
            )  # fmt: skip
            return False
        self._open[source] += 1
        return True

    def leave(self, source: str) -> None:
        """A counted connection has ended."""
        self._open[source] -= 1
        if not self._open[source]:
            del self._open[source]


class _LimitedServer:
    """The interface of a server for aiohttp's runner and asyncio."""

    def __init__(self, server: web.Server, admission: Admission) -> None:
        self._server, self._admission = server, admission

    def __call__(self) -> RequestHandler:
        arguments = self._server._kwargs  # noqa: SLF001  (what Server.__call__ passes on)
        return _LimitedHandler(self._server, self._admission, loop=self._server._loop, **arguments)  # noqa: SLF001

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


class _LimitedHandler(RequestHandler):
    """One connection."""

    __slots__ = ("_admission", "_head_timer", "_source")

    def __init__(self, manager: web.Server, admission: Admission, **more: Any) -> None:
        super().__init__(manager, **more)
        self._admission = admission
        self._source = ""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        source = _source(transport)
        if source is None or not self._admission.enter(source):
            cast("asyncio.Transport", transport).abort()
            return
        self._source = source
        self._await_head()

    def data_received(self, data: bytes) -> None:
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:
            self._stop_timer()
        elif self._head_timer is None and self._reads_head:
            self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        if self._source:
            self._admission.leave(self._source)
            self._source = ""
        super().connection_lost(exc)

    @property
    def _reads_head(self) -> bool:
        return self._current_request is None and not self._messages

    def _await_head(self) -> None:
        self._head_timer = self._loop.call_later(self._admission.limits.head_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._reads_head and self.transport is not None:
            self.transport.abort()


def _source(transport: asyncio.BaseTransport) -> str | None:
    """The other end; None for another user's process."""
    connected = transport.get_extra_info("socket")
    if connected.family != socket.AF_UNIX:
        peername = transport.get_extra_info("peername")  # None if the other end has already closed
        return f"address {peername[0] if peername else 'unknown'}"
    pid, uid = peer(connected)
    if uid != os.geteuid():
        log.warning("a connection of user %d (process %d) is refused", uid, pid)
        return None
    return f"process {pid}"
