"""The HTTP API for any caller: tokens, errors, limits, and the document that describes it."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import pytest

from kfp_gpuquota.errors import ClusterUnavailableError, NotFoundError, RunError
from kfp_gpuquota.server import openapi
from kfp_gpuquota.server.client import Client
from kfp_gpuquota.server.routes import ROUTES
from kfp_gpuquota.server.transport.unix_sockets import UnixConnection
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from tests.conftest import EmbeddedCluster


class Caller:
    """Plain HTTP, as a client in another language would send it."""

    def __init__(self, cluster: EmbeddedCluster) -> None:
        self.socket = cluster.home.socket_file
        self.token = cluster.home.token_file.read_text()

    def __call__(
        self, method: str, path: str, body: bytes | None = None, *, token: str | None = None
    ) -> tuple[int, Any]:
        connection = UnixConnection(self.socket, 20)
        given = self.token if token is None else token
        connection.request(method, path, body, {"Authorization": f"Bearer {given}"})
        answer = connection.getresponse()
        raw = answer.read()
        connection.close()
        return answer.status, json.loads(raw) if raw else None


@pytest.fixture
def call(embedded_cluster: EmbeddedCluster) -> Caller:
    embedded_cluster.project("team-a", 1)
    return Caller(embedded_cluster)


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/health", "/v1/openapi.json", "/v1/events", "/v1/nodes"])
def test_nothing_is_told_without_the_token(call: Caller, path: str) -> None:
    for token in ("", "wrong", call.token + "x", call.token[:-1], "\u00e9"):
        status, answer = call("GET", path, token=token.encode("utf-8").decode("latin-1"))
        assert (status, answer["error"]["code"]) == (401, "unauthorized")


SUBMIT = {"spec": {"name": "job", "project": "team-a", "command": ["true"]}, "request_id": "r"}

BAD_BODIES: list[tuple[bytes, int, str, str]] = [
    (b"", 422, "invalid-field", "it must be JSON"),
    (b"garbage", 422, "invalid-field", "it must be JSON"),
    (b"\xff\xfe", 422, "invalid-field", "it must be JSON"),
    (b"[" * 100_000, 422, "invalid-field", "nested too deeply"),
    (b"[]", 422, "invalid-field", "Expected `object`"),
    (b"{}", 422, "invalid-field", "missing required field `spec`"),
    (json.dumps({**SUBMIT, "colour": "red"}).encode(), 422, "invalid-field", "unknown field `colour`"),
    (json.dumps({**SUBMIT, "spec": {**SUBMIT["spec"], "gpus": 2.5}}).encode(), 422, "invalid-field", "2.5"),  # type: ignore[dict-item]
    (json.dumps({**SUBMIT, "spec": {**SUBMIT["spec"], "gpus": -1}}).encode(), 422, "invalid-field", "at least 1"),  # type: ignore[dict-item]
    (json.dumps({**SUBMIT, "spec": {**SUBMIT["spec"], "project": "nobody"}}).encode(), 404, "not-found", "create it"),  # type: ignore[dict-item]
]


@pytest.mark.parametrize(("body", "status", "code", "sentence"), BAD_BODIES)
def test_a_bad_body_gets_one_clear_sentence_and_changes_nothing(
    call: Caller, body: bytes, status: int, code: str, sentence: str
) -> None:
    answered, answer = call("POST", "/v1/jobs", body)
    assert (answered, answer["error"]["code"]) == (status, code)
    assert sentence in answer["error"]["message"]
    assert call("GET", "/v1/jobs")[1]["jobs"] == []


def test_a_body_beyond_the_limit_is_refused_unread(call: Caller) -> None:
    connection = UnixConnection(call.socket, 20)
    connection.putrequest("POST", "/v1/jobs")
    connection.putheader("Authorization", f"Bearer {call.token}")
    connection.putheader("Content-Length", str(100 << 20))
    connection.endheaders()
    try:
        for _ in range(100):
            connection.send(b" " * (1 << 20))
    except OSError:
        pass  # the server does not wait for the rest
    else:
        assert connection.getresponse().status == 413
    connection.close()
    assert call("GET", "/v1/health")[0] == 200


def test_jobs_are_selected_by_their_labels(call: Caller) -> None:
    for name in ("vision", "speech"):
        spec = {**SUBMIT["spec"], "name": name, "labels": {"team": name}}  # type: ignore[dict-item]
        assert call("POST", "/v1/jobs", json.dumps({"spec": spec, "request_id": name}).encode())[0] == 201
    for selector, names in (("team%20in%20(vision)", ["vision"]), ("!team", []), ("team", ["vision", "speech"])):
        listed = call("GET", f"/v1/jobs?selector={selector}")[1]["jobs"]
        assert [job["spec"]["name"] for job in listed] == names


@pytest.mark.parametrize(
    "path",
    ["/v1/jobs?timeout_s=soon", "/v1/jobs?timeout_s=-1", "/v1/jobs?timeout_s=nan", "/v1/jobs?after=1.5",
     "/v1/jobs?after=-1", "/v1/jobs?timeout_s=1e9", "/v1/events?after=x", "/v1/jobs?selector=a~b"],
)  # fmt: skip
def test_a_bad_query_names_its_field(call: Caller, path: str) -> None:
    status, answer = call("GET", path)
    assert (status, answer["error"]["code"]) == (422, "invalid-field")
    assert answer["error"]["field"] in path


@pytest.mark.parametrize(("method", "path"), [("GET", "/v2/jobs"), ("PATCH", "/v1/jobs"), ("GET", "/")])
def test_an_unknown_path_or_method_is_answered_in_json(call: Caller, method: str, path: str) -> None:
    status, answer = call(method, path)
    assert status in {404, 405}
    assert answer["error"]["code"] == "usage"


def test_the_path_and_the_body_must_name_the_same_project(call: Caller) -> None:
    status, answer = call("PUT", "/v1/projects/team-b", b'{"name": "team-c"}')
    assert (status, answer["error"]["field"]) == (422, "name")


def test_a_long_poll_answers_at_the_next_change(embedded_cluster: EmbeddedCluster, call: Caller) -> None:
    revision = call("GET", "/v1/jobs")[1]["revision"]
    answers: list[tuple[int, Any]] = []
    waiting = threading.Thread(target=lambda: answers.append(call("GET", f"/v1/jobs?after={revision}&timeout_s=20")))
    waiting.start()
    embedded_cluster.submit("job", "true")
    waiting.join(TIMEOUT_S)
    assert answers[0][1]["revision"] != revision
    assert [job["spec"]["name"] for job in answers[0][1]["jobs"]] == ["job"]


def test_a_long_poll_ends_when_its_time_is_over(call: Caller) -> None:
    revision = call("GET", "/v1/jobs")[1]["revision"]
    assert call("GET", f"/v1/jobs?after={revision}&timeout_s=0.05")[1]["revision"] == revision


def test_the_document_describes_every_route_and_resolves_every_reference(call: Caller) -> None:
    _, document = call("GET", "/v1/openapi.json")
    assert document == json.loads(json.dumps(openapi.document(document["info"]["version"])))
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in ROUTES}
    references = set(_references(document))
    assert references <= {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert len(references) > 10


def test_a_workers_token_does_not_open_the_api(embedded_cluster: EmbeddedCluster, call: Caller) -> None:
    job = embedded_cluster.submit("job")
    embedded_cluster.wait_for_phase("job", "Running")
    token = embedded_cluster.home.job_token_file(job.uid).read_text()
    assert call("GET", "/v1/jobs", token=token)[0] == 401
    path = f"/v1/membership/{job.uid}/store/0/count"
    assert call("POST", path, b"{}", token=token)[0] == 200
    assert call("POST", path, b"{}")[0] == 401


def test_a_client_says_how_to_start_a_cluster_that_does_not_answer(tmp_path: Path) -> None:
    client = Client(lambda: (tmp_path / "socket", "token"), retry_for_s=0.2)
    begin = time.monotonic()
    with pytest.raises(ClusterUnavailableError, match="gpuquota cluster start"):
        client.health()
    assert time.monotonic() - begin < 5


class _Proxy(http.server.BaseHTTPRequestHandler):
    """Another program at the cluster's address."""

    def do_GET(self) -> None:
        self.send_response(502)
        self.end_headers()
        self.wfile.write(b"<h1>Bad gateway</h1>")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class _UnixServer(socketserver.UnixStreamServer):
    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        connected, _ = super().get_request()
        return connected, ("local", 0)


def test_an_answer_of_another_program_is_a_failure_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with _UnixServer(str(path), _Proxy) as proxy:
        serving = threading.Thread(target=proxy.handle_request)
        serving.start()
        client = Client(lambda: (path, "token"))
        with pytest.raises(RunError, match="the server answered 502: <h1>Bad gateway"):
            client.health()
        serving.join()


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if "$ref" in node else []
        return own + [found for value in node.values() for found in _references(value)]
    return [found for value in node for found in _references(value)] if isinstance(node, list) else []


def test_a_daemon_without_the_route_of_a_command_is_said_to_be_older(embedded_cluster: EmbeddedCluster) -> None:
    client = cast("Client", embedded_cluster.client)
    for method, path in (("GET", "/v1/invented?since_s=1"), ("POST", "/v1/usage")):
        with pytest.raises(
            RunError, match=f"does not know {method} {path.partition('?')[0]}: it is of an earlier version"
        ):
            client._call(method, path, None)
    with pytest.raises(NotFoundError, match="project 'nothing' does not exist"):
        embedded_cluster.client.get_project("nothing")
