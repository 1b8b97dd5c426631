"""Where gloo listens: what peers on other machines can reach."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

import pytest

from elastic_runtime.membership.peer_interface import VARIABLE, choose_interface, interface_of

if TYPE_CHECKING:
    from collections.abc import Iterator


def outer_address() -> tuple[str, str]:
    """(a network interface of this machine that is not loopback, its address)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        any_socket.connect(("192.0.2.200", 9))  # sends nothing: only asks for the route
        address = str(any_socket.getsockname()[0])
    return interface_of(address), address


@contextlib.contextmanager
def connected_to(address: str) -> Iterator[socket.socket]:
    """A connection to a server on this address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with (
        socket.create_server((address, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as connection,
    ):
        yield connection


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")


def chosen(monkeypatch: pytest.MonkeyPatch, coordinator: str, name_of_this_host: str) -> str:
    """The interface that a worker of this coordinator lets gloo listen on; "": gloo's own choice."""
    monkeypatch.setattr(socket, "gethostname", lambda: name_of_this_host)
    with connected_to(coordinator) as connection:
        choose_interface(connection)
    return os.environ[VARIABLE]


def test_where_the_hosts_name_is_a_loopback_address_gloo_listens_on_the_way_to_the_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interface, address = outer_address()
    assert interface not in {"", "lo"}
    assert chosen(monkeypatch, address, "localhost") == interface


def test_where_the_hosts_name_is_unknown_too(monkeypatch: pytest.MonkeyPatch) -> None:
    interface, address = outer_address()
    assert chosen(monkeypatch, address, "no-such-host.invalid") == interface


def test_an_address_that_peers_can_reach_is_left_to_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    _, address = outer_address()
    assert chosen(monkeypatch, address, address) == ""


@pytest.mark.parametrize("loopback", ["127.0.0.1", "::1"])
def test_on_one_machine_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch, loopback: str) -> None:
    assert chosen(monkeypatch, loopback, "localhost") == ""


def test_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    _, address = outer_address()
    monkeypatch.setenv(VARIABLE, "theirs0")
    assert chosen(monkeypatch, address, "localhost") == "theirs0"


def test_a_unix_socket_has_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    for one in socket.socketpair():
        with one:
            choose_interface(one)
    assert os.environ[VARIABLE] == ""


@pytest.mark.parametrize(("address", "interface"), [("127.0.0.1", "lo"), ("::1", "lo"), ("203.0.113.9", "")])
def test_the_interface_of_an_address(address: str, interface: str) -> None:
    assert interface_of(address) == interface
