"""A shard's server, for connections of workers and of the leader on one port.

It reduces the memory of TLS connections in asyncio.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import hmac
import logging
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from kfp_gpuquota.cluster.kubernetes.client.http.sockets import listen
from kfp_gpuquota.cluster.kubernetes.elasticjob.workers.pod_builder import token_of
from kfp_gpuquota.cluster.kubernetes.shards.messages import (
    CONTROL_PATH,
    FromLeader,
    Hello,
    Outbox,
    control_token,
    lines,
)
from kfp_gpuquota.errors import RunError
from kfp_gpuquota.server.transport.accepting import LimitedSite
from kfp_gpuquota.server.transport.connections import WORKER_LIMITS, Connection, LimitedRunner, raise_descriptor_limit

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable

    from kfp_gpuquota.cluster.kubernetes.shards.shard_jobs import ShardJobs


BUFFER_BYTES: Final = 16 << 10
"""Bytes of a TLS record, the most that OpenSSL decrypts at once."""


def bound_tls_memory() -> None:
    """Make each TLS connection that is accepted from now on read into a buffer of one record instead of 256 KiB.

    A worker sends some hundred bytes a second. The buffer's size is `SSLProtocol.max_size`, a class attribute that
    asyncio has no parameter for (CPython 3.11 to 3.14). Without it connections work, and need more memory.
    """
    protocol = asyncio.sslproto.SSLProtocol
    if not isinstance(getattr(protocol, "max_size", None), int):
        log.warning("asyncio's TLS buffers cannot be bounded: this Python has no SSLProtocol.max_size")
        return
    protocol.max_size = BUFFER_BYTES


SHUTDOWN_S: Final = 1.0
BACKLOG: Final = 8192
"""Connections that may wait to be accepted: all workers of a shard may connect at once."""

log = logging.getLogger(__name__)


class ControlEndpoint:
    """The leader's connection. A new connection replaces the previous one, unless its epoch is lower."""

    def __init__(self, jobs: ShardJobs) -> None:
        self._jobs, self._token = jobs, control_token(jobs.key)
        self._process = uuid.uuid4().hex[:12]
        self._epoch = -1
        self._connections: dict[Connection, None] = {}
        self._current: asyncio.Task[Any] | None = None

    @property
    def connected(self) -> bool:
        """Return whether a leader is connected."""
        return self._current is not None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Process a leader's messages until its connection ends, and send it the shard's notices."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return web.Response(
                status=401, text="the token is not the controller's; check that both processes read the same key"
            )
        epoch = int(request.query.get("epoch", "0"))
        if epoch < self._epoch:
            return web.Response(
                status=409, text=f"a leader of epoch {self._epoch} was connected, the new one has {epoch}"
            )
        self._epoch = epoch
        if self._current is not None:
            self._current.cancel()
        if isinstance(request.protocol, Connection):
            request.protocol.prove(self._connections)
        self._current = task = asyncio.current_task()
        try:
            return await self._converse(request)
        finally:
            if self._current is task:
                self._current = None

    async def _converse(self, request: web.Request) -> web.StreamResponse:
        outbox = Outbox()
        outbox.put(Hello(self._process))
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        sending = asyncio.create_task(_send(response, outbox))
        self._jobs.connect(outbox)
        try:
            async for line in lines(request.content):
                if line:
                    self._jobs.take(msgspec.json.decode(line, type=FromLeader))
        except (TimeoutError, ConnectionError, RunError, msgspec.DecodeError) as error:
            log.warning("the leader's connection has ended: %s", error or "it was silent")
        finally:
            self._jobs.disconnect(outbox)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        return response


async def _send(response: web.StreamResponse, outbox: Outbox) -> None:
    async for line in outbox:
        await response.write(line)


def _not_yet(jobs: ShardJobs) -> Any:
    """Return the middleware that asks authenticated workers of jobs that are not open yet to retry later."""

    @web.middleware
    async def middleware(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        uid = request.match_info.get("job")
        if uid is None or uid in jobs.jobs:
            return await handler(request)
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), token_of(uid, jobs.key).encode()):
            return await handler(request)
        answer = web.Response(status=503, text="the job is not open here yet", headers={"Retry-After": "1"})
        answer.force_close()
        return answer

    return middleware


def build_app(jobs: ShardJobs, control: ControlEndpoint) -> web.Application:
    """Return the application."""
    app = web.Application(middlewares=[_not_yet(jobs)])
    app.router.add_post(CONTROL_PATH, control.handle)
    app.add_routes(jobs.service.routes())
    app.cleanup_ctx.append(jobs.service.lifespan)
    return app


@asynccontextmanager
async def serving(
    jobs: ShardJobs, control: ControlEndpoint, port: int, tls: ssl.SSLContext | None
) -> AsyncIterator[int]:
    """Serve workers and the leader; yield the port. `tls` None serves without TLS."""
    bound_tls_memory()
    if tls is not None:
        tls.num_tickets = 0  # workers resume no session; making tickets costs a fifth of a handshake
    raise_descriptor_limit()
    runner = LimitedRunner(
        build_app(jobs, control), WORKER_LIMITS, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
    )
    await runner.setup()
    try:
        listener = listen(port, BACKLOG)
        plain = web.SockSite(runner, listener, backlog=BACKLOG)
        await (LimitedSite(runner, listener, tls) if tls is not None else plain).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
