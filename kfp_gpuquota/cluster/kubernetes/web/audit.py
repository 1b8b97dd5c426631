"""The audit log of the page: a line of the process's log for each change that was asked for, also for refused ones."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from aiohttp import web

from kfp_gpuquota.cluster.kubernetes.client.process.logging_setup import fields
from kfp_gpuquota.server.audit import CLIENT_CLOSED

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler, Middleware

    from kfp_gpuquota.cluster.kubernetes.web.entrance import Entrance

_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})

log = logging.getLogger(__name__)


def audited(entrance: Entrance) -> Middleware:
    """Return a middleware around the one that renders errors. A user "" is one whom no trusted proxy named."""

    @web.middleware
    async def audit(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method in _READS:
            return await handler(request)
        try:
            answer = await handler(request)
        except asyncio.CancelledError:
            _write(entrance, request, CLIENT_CLOSED, "")
            raise
        _write(entrance, request, answer.status, str(answer.get("error", "")))
        return answer

    return audit


def _write(entrance: Entrance, request: web.Request, status: int, error: str) -> None:
    user, asked = entrance.user_of(request), f"{request.method} {request.path}"
    line = {"user": user, "from": request.remote or "", "request": asked, "status": status, "error": error}
    log.info("audit: %r asked for %s: %d%s", user, asked, status, f", {error!r}" if error else "", extra=fields(**line))
