"""The few answers of a KFP 2 API server that submitting a run needs; it keeps the runs it was given.

A real one needs Kubernetes. What is checked with this is what we send; KFP's own client sends it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

EXPERIMENT = {"experiment_id": "experiment-1", "display_name": "Default"}


TOKEN = "a-users-token"
COOKIE = "oauth2_proxy_kubeflow=a-session"
PROFILE = "team-a"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if not self._is_known():
            return
        several = cast("Any", self.server).several_users
        if several and parse_qs(urlsplit(self.path).query).get("namespace", [PROFILE]) != [PROFILE]:
            self.send_error(403, "Forbidden")
            return
        self._answer({"multi_user": several} if self.path.endswith("healthz") else {"experiments": [EXPERIMENT]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        if not self._is_known():
            return
        if body.get("runtime_config", {}).get("parameters", {}).get("epochs") == 0:
            self.send_error(400, "Bad Request")
            return
        server.runs.append(body)
        self._answer({**body, "run_id": f"run-{len(server.runs)}"})

    def _is_known(self) -> bool:
        """As Kubeflow's gateway: a browser's request is sent to the login, one with a wrong token is refused."""
        given = self.headers
        known = given["Authorization"] == f"Bearer {TOKEN}" or given["Cookie"] == COOKIE
        if not cast("Any", self.server).several_users or known:
            return True
        if given["Authorization"]:
            self.send_error(401, "Unauthorized")
        else:
            self.send_response(302)
            self.send_header("Location", "/dex/auth")
            self.send_header("Content-Length", "0")
            self.end_headers()
        return False

    def _answer(self, content: dict[str, Any]) -> None:
        encoded = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@contextlib.contextmanager
def kfp_server(*, several_users: bool = False) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(its URL, the runs that it received). With several users it accepts TOKEN and COOKIE, for the Profile PROFILE."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.runs, server.several_users = [], several_users
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.runs
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> None:
    """Serve several users at the address and port that the arguments name."""
    host, port = sys.argv[1:]
    server: Any = ThreadingHTTPServer((host, int(port)), _Handler)
    server.runs, server.several_users = [], True
    server.serve_forever()


if __name__ == "__main__":
    main()
