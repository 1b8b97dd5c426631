"""A coordinator without a cluster: the real service on a loopback port, in a thread of this process.

For tests, benchmarks and experiments with `elastic_runtime` without a cluster. The caller starts the workers'
processes, names them with `set_target`, and reports their exits.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Self, TypeVar

from aiohttp import web

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.server.membership.service import MembershipService, Notices
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.membership import Limits

T = TypeVar("T")


class StandaloneCoordinator:
    """`with StandaloneCoordinator(notices) as coordinator: coordinator.call(lambda service: service.open(...))`."""

    def __init__(self, notices: Notices, *, limits: Limits | None = None, port: int = 0) -> None:
        self._notices, self._limits, self._port = notices, limits, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="coordinator", daemon=True)

    @property
    def port(self) -> int:
        """The port on 127.0.0.1."""
        return self._port

    def url(self, job_uid: str) -> str:
        """Return the value of ELASTIC_COORDINATOR for the workers of a job."""
        return join(f"http://127.0.0.1:{self._port}/v1/membership", job_uid)

    def call(self, action: Callable[[MembershipService], T]) -> T:
        """Run `action(service)` in the service's thread and return what it returns."""

        async def run() -> T:
            return action(self._service)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(TIMEOUT_S)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()

    async def _stop(self) -> None:
        """Stop serving; a connection that was being accepted meanwhile is closed as well."""
        await self._runner.cleanup()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the next turn of the loop

    async def _start(self) -> None:
        self._service = MembershipService(self._notices, limits=self._limits)
        app = web.Application()
        app.add_routes(self._service.routes())
        app.cleanup_ctx.append(self._service.lifespan)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
