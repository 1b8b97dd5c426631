"""HTTP server of /metrics, /healthz and /readyz for any of the project's processes in a cluster."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from aiohttp import web
from prometheus_client import generate_latest

from kfp_gpuquota.cluster.kubernetes.client.http.sockets import listen
from kfp_gpuquota.server.transport.connections import LimitedRunner, Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from prometheus_client import CollectorRegistry


class HasRegistry(Protocol):
    """Metrics of any process."""

    @property
    def registry(self) -> CollectorRegistry:
        """Return the registry of the metrics."""


@asynccontextmanager
async def serving(
    metrics: HasRegistry,
    port: int,
    *,
    ready: Callable[[], bool],
    refresh: Callable[[], None],
    healthy: Callable[[], str] = lambda: "",
    further: Iterable[web.RouteDef] = (),
) -> AsyncIterator[int]:
    """Serve /metrics, /healthz, /readyz and the `further` routes, which check their requests; yield the port.

    `refresh()` updates the metrics before they are read; `healthy()` returns a problem, "" if there is none.
    """

    async def show(_: web.Request) -> web.Response:
        refresh()
        return web.Response(body=generate_latest(metrics.registry), content_type="text/plain")

    async def health(_: web.Request) -> web.Response:
        problem = healthy()
        return web.Response(status=503, text=problem) if problem else web.Response(text="ok")

    async def readiness(_: web.Request) -> web.Response:
        return web.Response(text="ok") if ready() else web.Response(status=503, text="not ready")

    app = web.Application()
    app.add_routes([web.get("/metrics", show), web.get("/healthz", health), web.get("/readyz", readiness), *further])
    runner = LimitedRunner(app, Limits(), access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, listen(port)).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
