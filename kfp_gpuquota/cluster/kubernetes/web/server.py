"""The page's process: it watches the cluster, and serves the pages to the users that a proxy names.

Each change that was requested, also a refused one, is a line of the process's log: the audit log of the page.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from aiohttp import web
from prometheus_client import CollectorRegistry

from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
from kfp_gpuquota.cluster.kubernetes.client.http.credentials import load_credentials
from kfp_gpuquota.cluster.kubernetes.client.process import probes
from kfp_gpuquota.cluster.kubernetes.client.process.logging_setup import fields
from kfp_gpuquota.cluster.kubernetes.client.process.tasks import first_to_end
from kfp_gpuquota.cluster.kubernetes.web.gpu_meter import GpuMeter
from kfp_gpuquota.cluster.kubernetes.web.kube_events import KubeEvents
from kfp_gpuquota.cluster.kubernetes.web.objects import Objects
from kfp_gpuquota.cluster.kubernetes.web.planner import Planner
from kfp_gpuquota.cluster.kubernetes.web.pod_logs import PodLogs
from kfp_gpuquota.cluster.kubernetes.web.proxy_door import ProxyDoor
from kfp_gpuquota.cluster.kubernetes.web.rights import Identity, Rights
from kfp_gpuquota.cluster.kubernetes.web.user_source import UserSource
from kfp_gpuquota.server.audit import CLIENT_CLOSED, TARGET, is_only_shown
from kfp_gpuquota.server.transport.connections import LimitedRunner, Limits
from kfp_gpuquota.web.app import MAX_LINE_BYTES, build_pages
from kfp_gpuquota.web.site_config import SiteConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp.typedefs import Handler, Middleware

    from kfp_gpuquota.cluster.kubernetes.web.options import Options


_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def audited(door: ProxyDoor) -> Middleware:
    """Return a middleware around the one that renders errors. A user "" is one whom no trusted proxy named."""

    @web.middleware
    async def audit(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method in _READS:
            return await handler(request)
        try:
            answer = await handler(request)
        except asyncio.CancelledError:
            _write(door, request, CLIENT_CLOSED, "")
            raise
        _write(door, request, answer.status, str(answer.get("error", "")))
        return answer

    return audit


def _write(door: ProxyDoor, request: web.Request, status: int, error: str) -> None:
    if is_only_shown(request, status):
        return
    user, asked, target = door.user_of(request), f"{request.method} {request.path}", request.get(TARGET, "")
    line = {"user": user, "from": request.remote or "", "request": asked, "status": status, "error": error}
    line |= {"target": target} if target else {}
    shown, why = f"{asked} {target!r}" if target else asked, f", {error!r}" if error else ""
    log.info("audit: %r asked for %s: %d%s", user, shown, status, why, extra=fields(**line))


# All users' connections are the proxy's.
LIMITS: Final = Limits(per_source=4096)
SHUTDOWN_TIMEOUT_S: Final = 0.5

log = logging.getLogger(__name__)


class _NoMetrics:
    registry = CollectorRegistry()


async def serve(options: Options) -> None:
    """Serve until cancelled; the pages are there when everything was listed."""
    objects = Objects()
    ready = asyncio.Event()
    async with (
        Connection(load_credentials(options.kubeconfig, options.context)) as connection,
        probes.serving(_NoMetrics(), options.probe_port, ready=ready.is_set, refresh=lambda: None) as probe_port,
    ):
        log.info("serving /healthz and /readyz on port %d", probe_port)
        watches = objects.watches(connection)
        meter = GpuMeter(objects, connection)

        async def pages() -> None:
            for watch in watches:
                await watch.synced.wait()
            async with serving(options, objects, connection, meter):
                ready.set()
                await meter.run()

        await first_to_end(*(watch.run() for watch in watches), pages())


@contextlib.asynccontextmanager
async def serving(options: Options, objects: Objects, connection: Connection, meter: GpuMeter) -> AsyncIterator[None]:
    """Serve the pages."""
    site = SiteConfig(
        options.base,
        frozenset(options.origin),
        framed=options.dashboard,
        resizable=False,
        what_if=bool(options.what_if),
        submits=options.submit,
        images=True,
        quotas=options.quotas,
        uses_known=False,
        http_api=False,
        deletes="The job is stopped and deleted, with its logs; checkpoints in a volume stay.",
        run_page=options.run_page,
    )
    rights = Rights(connection, objects.bindings, objects.namespaces)
    logs, events = PodLogs(objects, connection), KubeEvents(connection)
    planner = Planner(options.what_if, options.what_if_files)

    def source_of(user: Identity) -> UserSource:
        return UserSource(user, objects, rights, logs, events, planner, connection, meter)

    door = ProxyDoor(site, source_of, options)
    application = build_pages(door, site, outer=[audited(door)])
    runner = LimitedRunner(
        application,
        LIMITS,
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        access_log=None,
        max_line_size=MAX_LINE_BYTES,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, options.host, options.port).start()
        log.info("serving the web page on %s port %d below %s/", options.host, options.port, site.base)
        yield
    finally:
        await runner.cleanup()
