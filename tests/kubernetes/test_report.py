"""`gpuquota report`: the GPU-hours that a server with Prometheus' API has."""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest

from tests import forked, programs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HELD = {("vision", "guaranteed"): 7200.0, ("vision", "borrowed"): 3600.0, ("speech", "guaranteed"): 36000.0}


class Answering(BaseHTTPRequestHandler):
    """Answers the two queries of a report, over seven days, as Prometheus does."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        (query,) = parse_qs(url.query).get("query", [""])
        result = []
        if "[604800s]" in query and "idle" in query:
            result = [{"metric": {}, "value": [0, "1800"]}]
        elif "[604800s]" in query:
            result = [
                {"metric": {"project": project, "kind": kind}, "value": [0, str(seconds)]}
                for (project, kind), seconds in HELD.items()
            ]
        body = json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()
        found = url.path == "/api/v1/query"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(body if found else b"")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def prometheus() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def report(folder: Path, *words: str) -> tuple[int, str]:
    environment = {**os.environ, "HOME": str(folder), "GPUQUOTA_CONTEXT": "."}
    done = forked.run(programs.gpuquota, "report", *words, environment=environment)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def test_gpu_hours_by_project_and_kind_are_shown_with_what_nobody_held(prometheus: str, tmp_path: Path) -> None:
    given = ("--since", "7d", "--prometheus", prometheus)
    code, shown = report(tmp_path, *given, "-o", "csv")
    assert (code, shown.splitlines()) == (
        0,
        [
            "project,guaranteed_gpu_hours,borrowed_gpu_hours,gpu_hours",
            "speech,10.0,0.0,10.0",
            "vision,2.0,1.0,3.0",
            "(idle),0.0,0.0,0.5",
        ],
    )
    assert "GPU-HOURS" in report(tmp_path, *given)[1]
    assert json.loads(report(tmp_path, *given, "-o", "json")[1])[1]["borrowed"] == 1.0


def test_a_mistake_is_named_with_what_to_do(prometheus: str, tmp_path: Path) -> None:
    for words, message in (
        ((), "--prometheus URL or GPUQUOTA_PROMETHEUS"),
        (("--prometheus", prometheus, "--since", "1y"), "for example 30d"),
        (("--prometheus", "localhost:9090"), "must be a URL such as http"),
        (("--prometheus", f"{prometheus}/grafana"), "404"),
    ):
        code, shown = report(tmp_path, *words)
        assert code == 2, shown
        assert message in shown
