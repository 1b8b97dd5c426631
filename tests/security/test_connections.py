"""Floods: half requests, many connections, and what they write to the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Self

import pytest
from aiohttp import ClientSession, UnixConnector, web

from kfp_gpuquota.cluster.kubernetes.admission.server import MAX_BODIES_BYTES, MAX_BODY_BYTES, PATH, build_app
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules
from kfp_gpuquota.cluster.kubernetes.quota.workload_policies import CurrentPolicies
from kfp_gpuquota.cluster.local.daemon_log import BURST, PERIOD_S, RateLimit
from kfp_gpuquota.server.transport.connections import LimitedRunner, Limits
from kfp_gpuquota.server.transport.unix_sockets import UnixConnection, listen
from kfp_gpuquota.server.users_memory import MOST_BYTES
from tests.conftest import running_cluster
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

HALF = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


async def answer(request: web.Request) -> web.Response:
    return web.Response(text="answered")


class Server:
    """A server at a socket with small limits."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self.path = path
        app = web.Application()
        app.router.add_get("/", answer)
        self.runner = LimitedRunner(app, limits, access_log=None)

    async def __aenter__(self) -> Self:
        await self.runner.setup()
        await web.SockSite(self.runner, listen(self.path)).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()

    async def half_request(self) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        writer.write(HALF)
        self.kept = [*getattr(self, "kept", []), writer]
        return reader

    async def ask(self, path: str = "") -> str:
        async with ClientSession(connector=UnixConnector(str(self.path))) as session:
            return await (await session.get(f"http://x/{path}")).text()


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    return lambda scenario, **limits: asyncio.run(scenario(Server(tmp_path / "socket", Limits(**limits))))


def test_a_half_request_is_closed_after_a_while(run: Callable[..., None]) -> None:
    async def scenario(server: Server) -> None:
        async with server:
            assert await (await server.half_request()).read() == b""

    run(scenario, head_s=0.05)


def test_a_half_request_after_a_whole_one_is_closed_as_well(run: Callable[..., None]) -> None:
    async def scenario(server: Server) -> None:
        async with server:
            reader, writer = await asyncio.open_unix_connection(str(server.path))
            writer.write(HALF + b"\r\n" + HALF)
            assert b"answered" in await reader.read()
            writer.close()

    run(scenario, head_s=0.05, idle_s=0.1)  # of what came with a whole request, the time between requests decides


def test_a_request_that_takes_longer_than_a_head_may_is_answered(run: Callable[..., None]) -> None:
    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(0.2)
        return web.Response(text="late")

    async def scenario(server: Server) -> None:
        server.runner.app.router.add_get("/slow", slow)
        async with server:
            assert await server.ask("slow") == "late"

    run(scenario, head_s=0.05)


def test_one_source_beyond_its_limit_is_refused_and_admitted_again_when_one_has_ended(
    run: Callable[..., None],
) -> None:
    async def scenario(server: Server) -> None:
        async with server:
            held = [await server.half_request() for _ in range(3)]
            with contextlib.suppress(ConnectionError):
                assert await (await server.half_request()).read() == b""
            assert not any(reader.at_eof() for reader in held)
            server.kept[0].close()
            await server.kept[0].wait_closed()
            assert await server.ask() == "answered"

    run(scenario, per_source=3)


def test_half_requests_by_the_thousand_do_not_keep_other_clients_out(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "home") as cluster:
        held = [half_request(cluster.home.socket_file) for _ in range(800)]
        assert other_process_sees_the_cluster(cluster.environment)
        assert cluster.home.log_file.stat().st_size < 100_000
        for connected in held:
            connected.close()


def half_request(path: Path) -> UnixConnection:
    connection = UnixConnection(path, 10.0)
    connection.connect()
    with contextlib.suppress(OSError):  # it is refused already
        connection.sock.sendall(HALF)
    return connection


def other_process_sees_the_cluster(environment: dict[str, str]) -> bool:
    code = "from kfp_gpuquota.cluster.connect import connect; print(connect(retry_for_s=1.0).health().pid)"
    asked = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=False, timeout=TIMEOUT_S
    )
    return asked.returncode == 0


@contextlib.asynccontextmanager
async def reviewing(body_s: float) -> AsyncIterator[int]:
    """A webhook; yields its port."""
    app = build_app("x", CurrentPolicies(), CurrentRules(), body_s=body_s)
    runner = LimitedRunner(app, Limits(), access_log=None, shutdown_timeout=0.1, lingering_time=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def test_reviews_that_do_not_arrive_hold_bounded_memory() -> None:
    """Every pod may connect to the webhook's port, and what ends it keeps the cluster from creating pods."""

    async def scenario() -> None:
        async with reviewing(body_s=math.inf) as port:
            held = [await begun(port, "127.0.0.1") for _ in range(MOST_BYTES // MAX_BODY_BYTES)]
            held.append(await begun(port, "127.0.0.1"))
            assert b" 503 " in await held[-1][0].readline()
            held += [await begun(port, "127.0.0.2") for _ in range((MAX_BODIES_BYTES - MOST_BYTES) // MAX_BODY_BYTES)]
            held.append(await begun(port, "127.0.0.3"))
            assert b" 503 " in await held[-1][0].readline()
            async with ClientSession() as session, session.post(f"http://127.0.0.1:{port}{PATH}", data=b"{}") as small:
                assert small.status == 400
            for _, writer in held:
                writer.close()

    asyncio.run(scenario())


def test_a_review_that_does_not_arrive_is_given_up() -> None:
    async def scenario() -> None:
        async with reviewing(body_s=0.05) as port:
            reader, writer = await begun(port, "127.0.0.1")
            assert b" 408 " in await reader.readline()
            writer.close()

    asyncio.run(scenario())


async def begun(port: int, source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send the head of a review and a byte of its body, as large as one may be."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    writer.write(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES}\r\n\r\n ".encode())
    await writer.drain()
    return reader, writer


def test_a_message_that_is_repeated_is_written_some_times_a_minute() -> None:
    now = 0.0
    limit = RateLimit(lambda: now)

    def written(count: int) -> list[str]:
        records = [logging.LogRecord("x", logging.ERROR, "", 0, "failed: %d", (n,), None) for n in range(count)]
        return [record.getMessage() for record in records if limit.filter(record)]

    assert len(written(1000)) == BURST
    assert limit.filter(logging.LogRecord("x", logging.ERROR, "", 0, "another message", (), None))
    now = PERIOD_S
    assert written(1) == ["(980 repeated messages were left out) failed: 0"]
