"""The simulated network of the histories behaves as configured."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.elastic_runtime.relay import Relay
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

LINE = b"a worker's message\n"


@pytest.fixture
def port() -> Iterator[int]:
    """A server that echoes everything, one connection after another."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def echo() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(ConnectionError):
                    while data := connection.recv(100):
                        connection.sendall(data)

        thread = threading.Thread(target=echo)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(TIMEOUT_S)


@pytest.fixture
def relay(port: int) -> Iterator[Relay]:
    with Relay(lambda: port) as relay:
        yield relay


def connect(relay: Relay) -> socket.socket:
    return socket.create_connection(("127.0.0.1", relay.open_lane("w0")), timeout=TIMEOUT_S)


def ask(worker: socket.socket) -> bytes:
    worker.sendall(LINE)
    return worker.recv(100)


def test_it_passes_everything_on(relay: Relay) -> None:
    with connect(relay) as worker:
        assert ask(worker) == LINE


def test_what_is_slow_comes_late(relay: Relay) -> None:
    with connect(relay) as worker:
        relay.slow(["w0"], 0.1)
        began = time.monotonic()
        assert ask(worker) == LINE
        assert time.monotonic() - began >= 0.2, "there and back"


def test_what_is_held_comes_when_the_network_is_whole_again(relay: Relay) -> None:
    with connect(relay) as worker:
        relay.hold(["w0"], 3600)
        worker.sendall(LINE)
        worker.settimeout(0.1)
        with pytest.raises(TimeoutError):
            worker.recv(100)
        relay.heal()
        worker.settimeout(TIMEOUT_S)
        assert worker.recv(100) == LINE


def test_what_is_cut_ends_with_a_reset(relay: Relay) -> None:
    with connect(relay) as worker:
        ask(worker)
        relay.cut(["w0"])
        with pytest.raises(ConnectionResetError):
            worker.recv(100)


def test_what_is_torn_comes_half_and_ends_in_good_order(relay: Relay) -> None:
    with connect(relay) as worker:
        ask(worker)
        relay.tear(["w0"])
        worker.sendall(LINE)
        assert worker.recv(100) == b""  # it was the worker's line that was torn


def test_nobody_is_connected_to_a_coordinator_that_is_away() -> None:
    with Relay(lambda: 9) as relay, pytest.raises(ConnectionResetError), connect(relay) as worker:
        worker.recv(100)
