"""The membership service for workers in pods: over TLS, while this process leads.

The key from which the jobs' tokens are derived lies in one Secret beside the controller, so that workers that trained
under an earlier controller are known to this one.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from kfp_gpuquota.cluster.kubernetes.client.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.client.sockets import listen
from kfp_gpuquota.errors import RunError
from kfp_gpuquota.server.connections import LimitedRunner, Limits, raise_descriptor_limit

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from kfp_gpuquota.cluster.kubernetes.client.async_client import Connection
    from kfp_gpuquota.server.membership import MembershipService

SECRET: Final = "gpuquota-membership"  # noqa: S105 - its name
SHUTDOWN_S: Final = 1.0
LIMITS: Final = Limits(per_source=4096, total=32_768)
"""Of workers' connections. Workers of one node may share one address, so a source may have many; a client without a
token that sends half a request loses the connection after 10 s.
"""
KEEP_EVERY_S: Final = 60.0

log = logging.getLogger(__name__)


class _Secret(msgspec.Struct):
    data: dict[str, str] = {}


async def read_or_make_key(connection: Connection, namespace: str, known: bytes | None = None) -> bytes:
    """Return the key that the Secret holds; where there is none it is created, with the key `known` or a new one."""
    path = f"/api/v1/namespaces/{namespace}/secrets"
    while True:
        try:
            found = await connection.read(f"{path}/{SECRET}", _Secret)
            return base64.b64decode(found.data["key"])
        except ApiError as error:
            if not error.gone:
                raise
        key = secrets.token_hex(32) if known is None else known.decode()
        body = {"metadata": {"name": SECRET}, "stringData": {"key": key}}
        try:
            await connection.call("POST", path, body)
        except ApiError as error:
            if error.status != 409:
                raise


async def keep_key(connection: Connection, namespace: str, key: bytes) -> None:
    """Create the key's Secret again where it was deleted, until cancelled: another key would turn all workers away."""
    while True:
        await asyncio.sleep(KEEP_EVERY_S)
        try:
            stored = await read_or_make_key(connection, namespace, key)
        except (RunError, KeyError, ValueError) as error:
            log.warning("the Secret %s/%s could not be looked after: %s", namespace, SECRET, error)
            continue
        if stored != key:
            log.warning("the Secret %s/%s holds another key: it counts from the next start on", namespace, SECRET)


@asynccontextmanager
async def serving(service: MembershipService, port: int, tls: ssl.SSLContext | None) -> AsyncIterator[int]:
    """Serve workers; gives the port. Not before every job is open: a worker that is refused gives up."""
    app = web.Application()
    app.add_routes(service.routes())
    app.cleanup_ctx.append(service.lifespan)
    raise_descriptor_limit()
    runner = LimitedRunner(app, LIMITS, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listen(port), ssl_context=tls).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
