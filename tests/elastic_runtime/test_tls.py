"""The connection to the coordinator over TLS: the real membership service behind a certificate of our own authority."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from elastic_runtime.membership.coordinator_client import Coordinator
from elastic_runtime.membership.environment import Environment
from elastic_runtime.membership.rendezvous_store import CoordinatorStore
from kfp_gpuquota.cluster.certificates import issue, new_authority
from kfp_gpuquota.server.membership.service import MembershipService
from tests.membership.test_service import Recorder
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elastic_runtime.membership.orders import Order

EVENTS = 300


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    """A worker's environment, with the service that it names listening over TLS."""
    now = time.time()
    authority = new_authority("test", now)
    serving = issue(authority, ["127.0.0.1"], now)
    (tmp_path / "ca.crt").write_bytes(authority.certificate)
    (tmp_path / "pair.pem").write_bytes(serving.certificate + serving.key)
    (tmp_path / "token").write_text("secret")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "pair.pem")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner, port = asyncio.run_coroutine_threadsafe(_serve(tls), loop).result(TIMEOUT_S)
    yield Environment(
        worker_id="w0",
        coordinator=f"https://127.0.0.1:{port}/v1/membership/job",
        token_file=str(tmp_path / "token"),
        ca_file=str(tmp_path / "ca.crt"),
    )
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(TIMEOUT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(TIMEOUT_S)
    loop.close()


async def _serve(tls: ssl.SSLContext) -> tuple[web.AppRunner, int]:
    service = MembershipService(Recorder())
    service.open("job", "secret")
    service.set_target("job", ["w0"])
    app = web.Application()
    app.add_routes(service.routes())
    app.cleanup_ctx.append(service.lifespan)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    return runner, runner.addresses[0][1]


def test_orders_come_while_events_go_out_over_one_tls_connection(environment: Environment) -> None:
    orders: list[Order] = []
    greeted, arrived = threading.Event(), threading.Event()

    def on_order(order: Order) -> None:
        orders.append(order)
        (arrived if order.generation else greeted).set()

    joined = [{"event": "WorkerJoined", "worker": "w0"}]
    coordinator = Coordinator(environment, on_order, lambda: joined, lambda error: pytest.fail(str(error)))
    coordinator.start()
    assert greeted.wait(TIMEOUT_S)
    for step in range(EVENTS):
        coordinator.send("ProgressReported", step=step)
    coordinator.send("WorkerReady")
    assert arrived.wait(TIMEOUT_S), orders
    coordinator.close()
    assert orders[-1].members == ("w0",)


def test_the_store_answers_over_tls(environment: Environment) -> None:
    store = CoordinatorStore(environment, 0)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_coordinator_that_another_authority_vouches_for_is_not_talked_to(
    environment: Environment, tmp_path: Path
) -> None:
    (tmp_path / "ca.crt").write_bytes(new_authority("another", time.time()).certificate)
    connection, _ = environment.connect(5.0)
    with pytest.raises(ssl.SSLCertVerificationError):
        connection.connect()
