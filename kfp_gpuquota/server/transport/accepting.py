"""Accepts the connections of a TLS port, and bounds what those cost that have proven nothing yet.

A connection is counted when it is accepted. It costs a socket until its first bytes arrive; only then is its TLS state
made (some 100 KiB in asyncio), of at most `UNPROVEN` connections at a time and half as many from one source, sources in
turn. It gives its slot free when it is proven (`Entry.prove`) or ends; the time limits of `Limits` see to that. If all
slots are taken while another source waits, the source with the most slots loses its oldest one.

Rejected: asyncio's own `create_server(ssl=...)`, which accepts up to a backlog of connections in one turn of the loop,
allocates TLS state for each of them, and tells the application of a connection after its handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from kfp_gpuquota.server.transport.connections import Connection, LimitedRunner, address

if TYPE_CHECKING:
    import socket
    import ssl

    from kfp_gpuquota.server.transport.connections import Entry

UNPROVEN: Final = 128
"""Connections with TLS state that are not proven; each may need 100 KiB."""
AT_ONCE: Final = 8
"""Handshakes that begin in one turn of the event loop: each costs about a millisecond."""
ACCEPTED_AT_ONCE: Final = 64
SWEEP_S: Final = 0.5
SHUTDOWN_S: Final = 5.0
"""For the other end's part in the end of a TLS connection."""
OLD_S: Final = 2.0
NO_DESCRIPTORS_S: Final = 1.0
_NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = logging.getLogger(__name__)


class LimitedSite(web.SockSite):
    """A TLS port, as one of a runner's sites: `await LimitedSite(runner, listener, tls).start()`."""

    def __init__(self, runner: LimitedRunner, listener: socket.socket, tls: ssl.SSLContext) -> None:
        super().__init__(runner, listener, ssl_context=tls)
        self._acceptor = Acceptor(runner, listener, tls)

    async def start(self) -> None:
        """Accept connections from now on."""
        await web.BaseSite.start(self)
        self._acceptor.start()
        self._server = self._acceptor  # type: ignore[assignment]  # the runner reads `sockets` and calls `close`


class _Waiting:
    """An accepted connection without TLS state."""

    def __init__(self, connected: socket.socket, entry: Entry, at: float) -> None:
        self.socket, self.entry, self.at = connected, entry, at
        self.task: asyncio.Task[None] | None = None
        self.connection: Connection | None = None


class Acceptor:
    """Accepts connections of one socket and starts their handshakes, a few at a time."""

    def __init__(self, runner: LimitedRunner, listener: socket.socket, tls: ssl.SSLContext) -> None:
        assert runner.server is not None
        self._factory: Any = runner.server
        self._admission, self._listener, self._tls = runner.admission, listener, tls
        self._limits = runner.admission.limits
        self._silent: dict[_Waiting, None] = {}  # in the order in which they were accepted
        self._ready: dict[str, deque[_Waiting]] = {}  # by source, in turn
        self._unproven: dict[str, dict[_Waiting, None]] = {}  # by source; with TLS state, or soon
        self._unproven_count = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._starting = self._closed = False

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """Return the listening socket."""
        return (self._listener,)

    @property
    def unproven(self) -> int:
        """Return the number of connections with TLS state that are not proven."""
        return self._unproven_count

    def start(self) -> None:
        """Listen."""
        self._listener.settimeout(0)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._sweep()

    def close(self) -> None:
        """Stop listening, and close what has no request yet."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        if self._timer is not None:
            self._timer.cancel()
        for one in [*self._silent, *(one for queue in self._ready.values() for one in queue)]:
            self._drop(one)
        for one in [one for group in self._unproven.values() for one in group]:
            if one.task is not None:
                one.task.cancel()

    async def wait_closed(self) -> None:
        """Return at once: `close` has closed the socket."""

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connected, peername = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    raise
                log.warning("no connection can be accepted for %g s: %s", NO_DESCRIPTORS_S, error)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(NO_DESCRIPTORS_S, self._accept_again)
                return
            entry = self._admission.enter(address(peername))
            if entry is None:
                connected.close()
                continue
            connected.settimeout(0)
            one = _Waiting(connected, entry, self._loop.time())
            self._silent[one] = None
            self._loop.add_reader(connected.fileno(), self._has_bytes, one)

    def _accept_again(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _has_bytes(self, one: _Waiting) -> None:
        self._loop.remove_reader(one.socket.fileno())
        del self._silent[one]
        self._ready.setdefault(one.entry.source, deque()).append(one)
        self._start_soon()

    def _start_soon(self) -> None:
        if not self._starting and not self._closed and self._ready:
            self._starting = True
            self._loop.call_soon(self._start_some)

    def _start_some(self) -> None:
        self._starting = False
        for _ in range(AT_ONCE):
            source = self._next_source()
            if source is None:
                return
            queue = self._ready.pop(source)
            one = queue.popleft()
            if queue:
                self._ready[source] = queue  # behind the other sources
            self._unproven.setdefault(source, {})[one] = None
            self._unproven_count += 1
            one.entry.on_proven = lambda one=one: self._free(one)  # type: ignore[misc]
            one.task = self._loop.create_task(self._handshake(one))
        self._start_soon()

    def _next_source(self) -> str | None:
        if self.unproven >= UNPROVEN:
            return None
        return next((s for s in self._ready if len(self._unproven.get(s, ())) < UNPROVEN // 2), None)

    async def _handshake(self, one: _Waiting) -> None:
        def connection() -> Connection:
            one.connection = self._factory(one.entry)
            return one.connection

        try:
            await self._loop.connect_accepted_socket(
                connection,
                one.socket,
                ssl=self._tls,
                ssl_handshake_timeout=self._limits.handshake_s,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError) as error:
            log.debug("a connection from %s has ended in its handshake: %s", one.entry.source, error)
            one.entry.leave()
            one.socket.close()
        except Exception:
            log.exception("a connection from %s could not be served", one.entry.source)
            one.entry.leave()
            one.socket.close()
        finally:
            one.task = None

    def _free(self, one: _Waiting) -> None:
        """Give the slot of a connection free, which is proven or has ended."""
        group = self._unproven[one.entry.source]
        del group[one]
        self._unproven_count -= 1
        if not group:
            del self._unproven[one.entry.source]
        self._start_soon()

    def _sweep(self) -> None:
        """Close connections that are silent for too long, and make way for a source that waits."""
        now = self._loop.time()
        for waiting in (self._silent, *self._ready.values()):
            for one in list(waiting):
                if now - one.at < self._limits.handshake_s:
                    break
                self._drop(one)
        if self._ready and self._next_source() is None:
            self._make_way(now)
        self._timer = self._loop.call_later(SWEEP_S, self._sweep)

    def _make_way(self, now: float) -> None:
        most = max(self._unproven.values(), key=len, default={})
        waiting = sum(len(self._unproven.get(source, ())) < len(most) for source in self._ready)
        for one in [one for one in most if now - one.at >= OLD_S][: AT_ONCE * waiting]:
            if one.connection is not None and one.task is None:
                one.connection.end()
            elif one.task is not None:
                one.task.cancel()

    def _drop(self, one: _Waiting) -> None:
        with contextlib.suppress(ValueError):  # closed already
            self._loop.remove_reader(one.socket.fileno())
        self._silent.pop(one, None)
        queue = self._ready.get(one.entry.source)
        if queue is not None:
            with contextlib.suppress(ValueError):
                queue.remove(one)
            if not queue:
                del self._ready[one.entry.source]
        one.entry.leave()
        one.socket.close()
