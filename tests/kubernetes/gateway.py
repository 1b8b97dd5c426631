"""A reverse proxy in front of the page, with the headers that Istio's gateway and sidecar add: a process of its own.

    python -m tests.kubernetes.gateway PORT_OF_THE_PAGE USER {replace,append,merge}

It prints its port. The connections to the page come from 127.0.0.6, as those of a sidecar do. `replace` is what the
page needs of a gateway: the user's header of the browser is removed. Of the others, which are mistakes, `append` adds a
header of the same name, and `merge` a value to the browser's.
"""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

USER_HEADER: Final = "kubeflow-userid"
SIDECAR: Final = "127.0.0.6"
GATEWAY: Final = "spiffe://cluster.local/ns/istio-system/sa/istio-ingressgateway-service-account"
_PAGE: Final = "spiffe://cluster.local/ns/gpuquota-system/sa/gpuquota-web-page"


def added(client: str) -> dict[str, str]:
    """Return what Istio adds to a request from this address."""
    return {
        "x-forwarded-for": client,
        "x-forwarded-proto": "https",
        "x-envoy-external-address": client,
        "x-envoy-attempt-count": "1",
        "x-envoy-decorator-operation": "gpuquota-web-page.gpuquota-system.svc.cluster.local:80/gpuquota/*",
        "x-envoy-peer-metadata-id": "router~10.0.0.1~istio-ingressgateway-1.istio-system~istio-system",
        "x-forwarded-client-cert": f"By={_PAGE};Hash=00;Subject=\"\";URI={GATEWAY}",
        "x-request-id": "6f1d7d86-8d3c-4f6e-9c3b-1a2b3c4d5e6f",
        "x-b3-sampled": "0",
    }  # fmt: skip


class _Gateway(BaseHTTPRequestHandler):
    port, user, mode = 0, "", ""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        there = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60, source_address=(SIDECAR, 0))
        there.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self._forwarded():
            there.putheader(name, value)
        there.endheaders(body)
        answer = there.getresponse()
        content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in {"transfer-encoding", "content-length", "connection"}:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        there.close()

    do_POST = do_GET  # noqa: N815 (the names are http.server's)

    def _forwarded(self) -> list[tuple[str, str]]:
        """Return the browser's headers and the gateway's; x-forwarded-for is a list that goes on."""
        given = [(name, value) for name, value in self.headers.items() if name.lower() != "connection"]
        named = [value for name, value in given if name.lower() == USER_HEADER]
        more = added(self.client_address[0])
        if before := self.headers.get("x-forwarded-for"):
            more["x-forwarded-for"] = f"{before},{more['x-forwarded-for']}"
        replaced = {*more, *(() if self.mode == "append" else (USER_HEADER,))}
        user = ",".join([*named, self.user]) if self.mode == "merge" else self.user
        kept = [(name, value) for name, value in given if name.lower() not in replaced]
        return [*kept, *more.items(), (USER_HEADER, user)]

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def gateway(page_port: int, user: str, mode: str = "replace") -> Iterator[int]:
    """Run the proxy; yield its port."""
    command = [sys.executable, "-m", __name__, str(page_port), user, mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.terminate()


if __name__ == "__main__":
    _Gateway.port, _Gateway.user, _Gateway.mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Gateway)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
