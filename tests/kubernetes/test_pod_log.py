"""Logs of pods, read in parts from an API server that fails in the middle of them.

The server is a small one of this test's own: a real one reads logs from kubelets (test_follow.py has both).
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import pytest

from kfp_gpuquota.cluster.kubernetes.objects.log_lines import LogLines, time_of
from kfp_gpuquota.cluster.kubernetes.user_client import pod_log
from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls
from kfp_gpuquota.cluster.kubernetes.user_client.pod_log import PodLog
from tests.kubernetes.users import connection_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIRST = time_of(b"2026-01-01T00:00:00Z") or 0
POD = "/api/v1/namespaces/team/pods/worker"


class Node:
    """The pod that the server has. `logs` are what successive streams of its log contain."""

    def __init__(self, phase: str, *logs: bytes) -> None:
        self.phase, self.logs = phase, list(logs)
        self.starting = 0
        """How many requests are refused since the container has not started."""
        self.exists = True
        self.asked: list[dict[str, str]] = []


@contextmanager
def serving(node: Node, folder: Path) -> Iterator[Calls]:
    """An API server with this pod; yields the calls of its user."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if not node.exists:
                self.answer(404, {"message": 'pods "worker" not found'})
            elif path == POD:
                self.answer(200, {"status": {"phase": node.phase}})
            elif node.starting:
                node.starting -= 1
                self.answer(400, {"message": 'container "main" is waiting to start: ContainerCreating'})
            else:
                assert path == f"{POD}/log"
                node.asked.append(dict(parse_qsl(query)))
                self.send_response(200)
                self.end_headers()
                text = node.logs.pop(0) if len(node.logs) > 1 else node.logs[0]
                lines = enumerate(text.splitlines(keepends=True))
                self.wfile.write(b"".join(b"2026-01-01T00:00:00.%09dZ " % at + line for at, line in lines))

        def answer(self, code: int, body: dict[str, object]) -> None:
            content = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        config = folder / "kubeconfig"
        config.write_text(json.dumps({
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "users": [{"name": "u", "user": {}}],
        }))  # fmt: skip
        try:
            yield Calls(connection_of(config), retry_for_s=0.5)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_log, "POLL_S", 0.0)


def whole(log: PodLog, timeout_s: float = 5.0) -> bytes:
    """Read until nothing more may follow."""
    text, more = b"", True
    while more:
        piece, more = log.read(timeout_s)
        text += piece
    return text


@pytest.mark.parametrize(("read", "rest"), [(0, b"one\ntwo\nend"), (1, b"two\nend"), (3, b"")])
def test_the_log_of_a_pod_that_has_ended_is_read_from_an_offset_to_its_end(
    tmp_path: Path, read: int, rest: bytes
) -> None:
    with serving(Node("Succeeded", b"one\ntwo\nend"), tmp_path) as calls:
        log = PodLog(calls, "team", "worker", FIRST + read - 1 if read else 0)
        assert whole(log) == rest
        assert log.offset == FIRST + 2


def test_what_there_is_is_read_without_following_it(tmp_path: Path) -> None:
    """A followed stream of a worker that prints nothing ends after its silence, and that of another one never."""
    node = Node("Running", b"one\n")
    with serving(node, tmp_path) as calls:
        log = PodLog(calls, "team", "worker", 0)
        assert log.read(0.0) == (b"one\n", True)
        assert log.read(0.0) == (b"", True)
        assert not any("follow" in query for query in node.asked)
        assert log.read(5.0) == (b"", True)
        assert node.asked[-1] == {"timestamps": "true", "sinceTime": "2026-01-01T00:00:00Z", "follow": "true"}


@pytest.mark.parametrize("cut", range(1, 80))
def test_a_line_is_returned_as_it_arrives_and_once(cut: int) -> None:
    """Also where the stream breaks off in the middle of it, or of its time."""
    sent = b"2026-01-01T00:00:00.000000000Z one\n2026-01-01T00:00:00.000000001Z 50 %\r100 %\n"
    lines = LogLines(0)
    lines.take(sent[:cut])
    found = lines.arrived()
    lines.reopened()
    lines.take(sent)
    assert found + lines.arrived() == b"one\n50 %\r100 %\n"
    assert lines.last == FIRST + 1
    assert lines.arrived() == b""


def test_a_stream_that_ends_before_its_pod_is_continued_where_it_ended(tmp_path: Path) -> None:
    node = Node("Running", b"one\n", b"one\ntwo\n")
    with serving(node, tmp_path) as calls:
        log = PodLog(calls, "team", "worker", 0)
        assert log.read(5.0) == (b"one\n", True)
        assert log.read(5.0) == (b"", True)
        assert log.read(5.0) == (b"two\n", True)
        node.phase = "Failed"
        assert whole(log) == b""
        assert log.offset == FIRST + 1


def test_a_container_that_has_not_started_is_waited_for(tmp_path: Path) -> None:
    node = Node("Pending", b"begin\n")
    node.starting = 3
    with serving(node, tmp_path) as calls:
        log = PodLog(calls, "team", "worker", 0)
        assert log.read(0.0) == (b"", True)
        assert log.read(30.0) == (b"begin\n", True)
        assert node.starting == 0
        log.close()


def test_a_pod_that_ended_before_its_container_has_started_has_no_log(tmp_path: Path) -> None:
    node = Node("Failed", b"")  # the kubelet has not admitted it, or an init container has failed
    node.starting = 100
    with serving(node, tmp_path) as calls:
        log = PodLog(calls, "team", "worker", 0)
        assert whole(log, 0.0) == b""
        assert node.starting > 90


def test_a_pod_that_is_gone_has_no_more_log(tmp_path: Path) -> None:
    node = Node("Running", b"one\n")
    with serving(node, tmp_path) as calls:
        log = PodLog(calls, "team", "worker", 0)
        assert log.read(5.0) == (b"one\n", True)
        node.exists = False
        assert log.read(5.0) == (b"", False)
        assert log.read(5.0) == (b"", False)


def test_a_server_that_is_away_ends_no_log(tmp_path: Path) -> None:
    node = Node("Running", b"one\n")
    with serving(node, tmp_path) as calls:
        log = PodLog(calls, "team", "worker", 0)
        assert log.read(5.0) == (b"one\n", True)
    assert log.read(5.0) == (b"", True)
    assert log.read(0.0) == (b"", True)
