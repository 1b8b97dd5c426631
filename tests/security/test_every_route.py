"""Every HTTP route of the daemon: a limit of the body, one decoding of it, a line in the audit log."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.server.app import MAX_BODY_BYTES
from kfp_gpuquota.server.routes import ROUTES
from kfp_gpuquota.server.transport.unix_sockets import UnixConnection

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster

CHANGES = [route for route in ROUTES if route.method != "GET"]
DEEP = b'{"spec": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
NAMES = {"{project}": "team-a", "{job}": "train", "{policy}": "none"}


def ask(cluster: EmbeddedCluster, method: str, path: str, body: bytes) -> int:
    """Send a request over a connection of its own; return the status."""
    for name, value in NAMES.items():
        path = path.replace(name, value)
    connection = UnixConnection(cluster.home.socket_file, 30.0)
    headers = {"Authorization": f"Bearer {cluster.home.read_or_make_token()}", "Content-Type": "application/json"}
    try:
        connection.request(method, path, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def lines(cluster: EmbeddedCluster) -> list[str]:
    """Return the requests of the audit log, with their status."""
    found = (
        map(json.loads, cluster.home.audit_file.read_text().splitlines()) if cluster.home.audit_file.exists() else []
    )
    return [f"{one['request'].split()[0]} {one['status']}" for one in found]


def test_every_route_refuses_what_it_cannot_decode_and_writes_a_line_for_each_change(
    embedded_cluster: EmbeddedCluster,
) -> None:
    expected = []
    bodies = (DEEP, b"[" * 100_000, b"\xff\xfe", b"null", b" " * (MAX_BODY_BYTES + 1))
    for route in ROUTES:
        for body in bodies:
            status = ask(embedded_cluster, route.method, route.path, body)
            assert status < 500, (route.method, route.path, body[:20])
            if route.body is not None:
                assert status in {413, 422}, (route.method, route.path, body[:20])
            if route.method != "GET":
                expected.append(f"{route.method} {status}")
    expected += [f"POST {ask(embedded_cluster, 'POST', path, DEEP)}" for path in ("/v1/page", "/v1/nothing", "/")]
    assert lines(embedded_cluster) == expected


@pytest.mark.parametrize(
    ("route", "effect"),
    [("DELETE /v1/projects/{project}/jobs/{job}", 204), ("POST /v1/projects/{project}/jobs/{job}/cancel", 200)],
)
def test_a_change_that_is_made_is_answered_as_one_whatever_body_it_has(
    embedded_cluster: EmbeddedCluster, route: str, effect: int
) -> None:
    embedded_cluster.project("team-a", 1)
    embedded_cluster.submit("train")
    method, path = route.split()
    before = len(lines(embedded_cluster))
    assert ask(embedded_cluster, method, path, DEEP) == effect
    assert lines(embedded_cluster)[before:] == [f"{method} {effect}"]


def test_the_bodies_of_all_routes_that_take_one_are_named() -> None:
    """A new route is in the table, so that these tests ask it."""
    assert {route.method for route in CHANGES} == {"POST", "PUT", "DELETE"}
    assert {route.path for route in CHANGES if route.body is None} == {
        "/v1/projects/{project}", "/v1/policies/{policy}", "/v1/projects/{project}/jobs/{job}",
        *(f"/v1/projects/{{project}}/jobs/{{job}}/{action}" for action in ("cancel", "suspend", "resume")),
    }  # fmt: skip
