"""A proxy in front of a real API server that answers some calls with errors, breaks others off, and loses answers.

Which ones is drawn from a seed, so a failing run can be repeated as far as the calls come in the same order.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import ssl
import threading
from collections import Counter
from typing import TYPE_CHECKING, Self

import aiohttp
from aiohttp import web

from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from pathlib import Path

    from tools.devcluster import DevCluster

WRITES = {"POST", "PUT", "PATCH", "DELETE"}
REASONS = {
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
}
FAULTS = ("429", "500", "503", "reset", "lost answer", "409", "410")


class FaultyProxy:
    """`with FaultyProxy(cluster, folder, rate=0.2, seed=1) as proxy:` and use `proxy.kubeconfig`.

    `rate` is the share of calls that fail; set it at any time. `injected` counts them by (verb, fault). The next
    `conflicts[verb, end]` calls to paths that end so are answered with 409, and the answers to the next
    `lost[verb, end]` are lost. While `stall` is on, watches of pods report nothing. `restart` does what a server does
    that starts again: every connection breaks, and then all are refused until it has its roles. `first` are the answers
    to the first requests of each verb and path.
    """

    def __init__(self, cluster: DevCluster, folder: Path, rate: float, seed: int) -> None:
        self._cluster, self._folder = cluster, folder
        self.rate = rate
        self._random = random.Random(seed)
        self._faults = itertools.cycle(self._random.sample(FAULTS, len(FAULTS)))
        self.injected: Counter[tuple[str, str]] = Counter()
        self.conflicts: Counter[tuple[str, str]] = Counter()
        self.lost: Counter[tuple[str, str]] = Counter()
        self.looks: Counter[str] = Counter()  # GETs by path
        self.first: tuple[str, ...] = ()
        self.begun: Counter[tuple[str, str]] = Counter()  # requests that were answered so, by verb and path
        self._live: set[asyncio.Transport] = set()
        self._refusals = 0
        self.partitioned = False  # nothing comes through
        self.load_balancer = 0  # the status of the page that one in front of the server shows instead
        self.writes: list[tuple[str, str]] = []  # that came, by verb and path
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def cut(self, *, off: bool) -> None:
        """Break all connections and let none through, or let them through again."""

        async def now() -> None:
            self.partitioned = off
            for transport in self._live:
                transport.abort()
            self._live.clear()

        asyncio.run_coroutine_threadsafe(now(), self._loop).result(TIMEOUT_S)

    def stall(self, *, on: bool) -> None:
        """Hold back what watches of pods report, or let it through again."""
        self._loop.call_soon_threadsafe(self._flowing.clear if on else self._flowing.set)

    def restart(self, refusals: int) -> None:
        """Break all connections off, and answer the next calls, this many, with 403."""

        async def now() -> None:
            self._refusals = refusals
            for transport in self._live:
                if isinstance(transport, asyncio.Transport):
                    transport.abort()

        asyncio.run_coroutine_threadsafe(now(), self._loop).result(TIMEOUT_S)

    @property
    def kubeconfig(self) -> Path:
        """Leads to the proxy, as the administrator."""
        return self._folder / "proxied"

    def __enter__(self) -> Self:
        self._thread.start()
        port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(TIMEOUT_S)
        config = json.loads(self._cluster.kubeconfig.read_bytes())
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{port}"}
        self.kubeconfig.write_text(json.dumps(config))
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()

    async def _start(self) -> int:
        config = json.loads(self._cluster.kubeconfig.read_bytes())["clusters"][0]["cluster"]
        tls = ssl.create_default_context(cafile=config["certificate-authority"])
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls), timeout=aiohttp.ClientTimeout(total=None)
        )
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return int(self._runner.addresses[0][1])

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        assert isinstance(request.transport, asyncio.Transport)
        self._live.add(request.transport)
        if request.method not in {"GET", "HEAD"}:
            self.writes.append((request.method, request.path))
        else:
            self.looks[request.path] += 1
        if self.partitioned:
            return _break_off(request)
        if self.load_balancer:
            self.injected[request.method, str(self.load_balancer)] += 1
            return web.Response(status=self.load_balancer, text="<html>no backend</html>", content_type="text/html")
        if self._refusals:
            self._refusals -= 1
            self.injected[request.method, "403"] += 1
            return _refusal(403)
        fault = self._draw_first(request) or self._draw(request)
        if fault.isdigit():
            return _refusal(int(fault))
        if fault == "reset":
            return _break_off(request)
        url = f"{self._cluster.server}{request.rel_url}"
        headers = {n: v for n, v in request.headers.items() if n.lower() not in {"host", "content-length"}}
        body = await request.read()
        async with self._session.request(request.method, url, data=body or None, headers=headers) as answer:
            if fault == "lost answer":
                await answer.read()
                return _break_off(request)
            return await self._pass_on(request, answer, fault)

    async def _pass_on(self, request: web.Request, answer: aiohttp.ClientResponse, fault: str) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            if "watch" in request.query and request.path.endswith("/pods"):
                await self._flowing.wait()
            await response.write(chunk)
            if self.rate and "watch" in request.query and self._random.random() < 0.02:
                self.injected["WATCH", "410"] += 1
                status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
                break
        await response.write_eof()
        return response

    def _draw_first(self, request: web.Request) -> str:
        key = ("WATCH" if "watch" in request.query else request.method, request.path)
        if self.begun[key] >= len(self.first):
            return ""
        self.begun[key] += 1
        return self.first[self.begun[key] - 1]

    def _draw(self, request: web.Request) -> str:
        for (wanted, end), left in self.conflicts.items():
            if left and request.method == wanted and request.path.endswith(end):
                self.conflicts[wanted, end] -= 1
                return "409"
        for (wanted, end), left in self.lost.items():
            if left and request.method == wanted and request.path.endswith(end):
                self.lost[wanted, end] -= 1
                return "lost answer"
        if self._random.random() >= self.rate:
            return ""
        verb = "WATCH" if "watch" in request.query else request.method
        fault = next(self._faults)  # in turn, so that a short test meets all of them
        if fault == "409" and verb not in WRITES:
            fault = "500"
        if fault == "410" and not {"watch", "limit", "continue"} & set(request.query):
            fault = "503"  # only lists and watches have a version that can be too old
        if fault == "lost answer" and verb == "WATCH":
            fault = "reset"
        self.injected[verb, fault] += 1
        return fault


def _refusal(status: int) -> web.Response:
    body = {"kind": "Status", "code": status, "reason": REASONS.get(status, ""), "message": f"injected {status}"}
    headers = {"Retry-After": "1"} if status == 429 else {}
    return web.json_response(body, status=status, headers=headers)


def _break_off(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()
