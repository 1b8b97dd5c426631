"""Serves the membership service to workers in pods over TLS while this process leads.

The key from which the jobs' tokens are derived is stored in a Secret, so that workers that were started under an
earlier controller can authenticate with this one.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import ApiError
from kfp_gpuquota.cluster.kubernetes.client.http.sockets import listen
from kfp_gpuquota.errors import RunError
from kfp_gpuquota.server.transport.accepting import LimitedSite
from kfp_gpuquota.server.transport.connections import WORKER_LIMITS, LimitedRunner, raise_descriptor_limit

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
    from kfp_gpuquota.server.membership.service import MembershipService

SECRET: Final = "gpuquota-membership"  # noqa: S105 - its name
SHUTDOWN_S: Final = 1.0
KEEP_EVERY_S: Final = 60.0

log = logging.getLogger(__name__)


class _Secret(msgspec.Struct):
    data: dict[str, str] | None = None


async def read_or_make_key(connection: Connection, namespace: str, current: bytes | None = None) -> bytes:
    """Return the key in the Secret; if there is no Secret, create it with the `current` or a new key.

    Raises RunError if the API server refuses that, or if the Secret has no key.
    """
    path = join("/api/v1/namespaces", namespace, "secrets")
    try:
        return await _read_key(connection, namespace)
    except ApiError as error:
        if not error.not_found:
            raise
    key = secrets.token_hex(32) if current is None else current.decode()
    try:
        await connection.call("POST", path, {"metadata": {"name": SECRET}, "stringData": {"key": key}})
    except ApiError as error:
        if error.status != HTTPStatus.CONFLICT:
            raise
    return await _read_key(connection, namespace)


async def _read_key(connection: Connection, namespace: str) -> bytes:
    found = await connection.read(join("/api/v1/namespaces", namespace, "secrets", SECRET), _Secret)
    try:
        key = base64.b64decode((found.data or {}).get("key", ""), validate=True)
    except ValueError:
        key = b""
    if not key:
        raise RunError(f"the Secret {namespace}/{SECRET} has no key; delete it, and it is made again")
    return key


async def keep_key(connection: Connection, namespace: str, key: bytes) -> None:
    """Recreate the key's Secret when it is deleted, until cancelled: another key would refuse all workers."""
    while True:
        await asyncio.sleep(KEEP_EVERY_S)
        try:
            stored = await read_or_make_key(connection, namespace, key)
        except RunError as error:
            log.warning("the Secret %s/%s could not be checked: %s", namespace, SECRET, error)
            continue
        if stored != key:
            log.warning("the Secret %s/%s has another key; it takes effect after a restart", namespace, SECRET)


@asynccontextmanager
async def serving(service: MembershipService, port: int, tls: ssl.SSLContext | None) -> AsyncIterator[int]:
    """Serve workers; yield the port. Call it after every job was opened: a worker that is refused exits."""
    app = web.Application()
    app.add_routes(service.routes())
    app.cleanup_ctx.append(service.lifespan)
    raise_descriptor_limit()
    runner = LimitedRunner(app, WORKER_LIMITS, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        listener = listen(port)
        site = LimitedSite(runner, listener, tls) if tls is not None else web.SockSite(runner, listener)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
