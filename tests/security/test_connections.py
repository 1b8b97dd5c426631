"""Floods: half requests, many connections, and what they write to the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Self

import pytest
from aiohttp import ClientSession, UnixConnector, web

from kfp_gpuquota.cluster.local.daemon_log import BURST, PERIOD_S, RateLimit
from kfp_gpuquota.server.transport.connections import LimitedRunner, Limits
from kfp_gpuquota.server.transport.unix_sockets import UnixConnection, listen
from tests.conftest import running_cluster
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable
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
