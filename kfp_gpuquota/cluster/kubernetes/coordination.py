"""The membership service for workers in pods: over TLS, while this process leads.

The key from which the jobs' tokens are derived lies in one Secret beside the controller, so that workers that trained
under an earlier controller are known to this one.
"""

from __future__ import annotations

import base64
import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from kfp_gpuquota.cluster.kubernetes.connection import ApiError
from kfp_gpuquota.cluster.kubernetes.listening import listen

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from kfp_gpuquota.cluster.kubernetes.connection import Connection
    from kfp_gpuquota.server.membership import MembershipService

SECRET: Final = "gpuquota-membership"  # noqa: S105 - its name
SHUTDOWN_S: Final = 1.0


class _Secret(msgspec.Struct):
    data: dict[str, str] = {}


async def read_or_make_key(connection: Connection, namespace: str) -> bytes:
    """The key; whoever comes first makes it."""
    path = f"/api/v1/namespaces/{namespace}/secrets"
    while True:
        try:
            found = await connection.read(f"{path}/{SECRET}", _Secret)
            return base64.b64decode(found.data["key"])
        except ApiError as error:
            if not error.gone:
                raise
        body = {"metadata": {"name": SECRET}, "stringData": {"key": secrets.token_hex(32)}}
        try:
            await connection.call("POST", path, body)
        except ApiError as error:
            if error.status != 409:
                raise


@asynccontextmanager
async def serving(service: MembershipService, port: int, tls: ssl.SSLContext | None) -> AsyncIterator[int]:
    """Serve workers; gives the port. Not before every job is open: a worker that is refused gives up."""
    app = web.Application()
    app.add_routes(service.routes())
    app.cleanup_ctx.append(service.lifespan)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listen(port), ssl_context=tls).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
