"""A double of NVIDIA's dcgm-exporter: an HTTP server with its text format, and the Service by which it is found."""

from __future__ import annotations

import socket
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar

from tools.devcluster.api import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.devcluster.api import Api

NAMESPACE = "gpu-operator-test"
SERVICE = "nvidia-dcgm-exporter"
USED_MIB = 512


def own_address() -> str:
    """Return an address of this machine that an EndpointSlice may have: none of the loopback range."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("192.0.2.1", 9))  # nothing is sent
        return str(one.getsockname()[0])


@dataclass
class GpuExporter:
    """`used` has the utilization of the GPUs of pods, by namespace and name; `more` is served as it is.

    Each answer has another value of the energy counters, unless they are `frozen`. `asked` counts the requests.
    """

    used: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    more: bytes = b""
    frozen: bool = False
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    asked: int = 0
    port: int = 0

    def metrics(self) -> bytes:
        """Return what it serves."""
        self.asked += 1
        lines = ["# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).", "# TYPE DCGM_FI_DEV_GPU_UTIL gauge"]
        energy = 1000 if self.frozen else 1000 + self.asked
        for (namespace, pod), each in self.used.items():
            for index, value in enumerate(each):
                labels = f'gpu="{index}",UUID="GPU-{pod}-{index}",device="nvidia{index}",modelName="NVIDIA H200"'
                labels += f',container="main",namespace="{namespace}",pod="{pod}"'
                lines.append(f"DCGM_FI_DEV_GPU_UTIL{{{labels}}} {value}")
                lines.append(f"DCGM_FI_DEV_MEM_COPY_UTIL{{{labels}}} 0")
                lines.append(f"DCGM_FI_DEV_FB_USED{{{labels}}} {USED_MIB}")
                lines.append(f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{labels}}} {energy}")
        return "\n".join([*lines, ""]).encode() + self.more

    @contextmanager
    def serving(self, address: str = "127.0.0.1") -> Iterator[GpuExporter]:
        """Serve it on a free port."""

        class Handler(BaseHTTPRequestHandler):
            exporter: ClassVar[GpuExporter] = self

            def do_GET(self) -> None:
                body = self.exporter.metrics()
                self.send_response(self.exporter.status)
                for name, value in self.exporter.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(OSError):  # the client has read enough
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        server = ThreadingHTTPServer((address, 0), Handler)
        self.port = server.server_address[1]
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def endpoint_slice(address: str, port: int, nodes: list[str]) -> dict[str, Any]:
    """Return the EndpointSlice of exporters of these nodes, which all are the one at the address."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": SERVICE, "labels": {"kubernetes.io/service-name": SERVICE}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}, "nodeName": node} for node in nodes],
        "ports": [{"name": "gpu-metrics", "port": port, "protocol": "TCP"}],
    }


def publish(api: Api, address: str, port: int, nodes: list[str]) -> None:
    """Create the EndpointSlice, or replace it."""
    with suppress(ApiError):
        api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    path = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
    with suppress(ApiError):
        api.delete(f"{path}/{SERVICE}")
    api.create(path, endpoint_slice(address, port, nodes))


def install_notebooks(api: Api) -> None:
    """Install a minimal schema of Kubeflow's Notebooks of our own; a test plays their controller."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": "Notebook", "plural": "notebooks"}
    spec = {"group": "kubeflow.org", "scope": "Namespaced", "names": names, "versions": [served]}
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/notebooks.kubeflow.org"
    kind = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    api.apply(path, {**kind, "metadata": {"name": "notebooks.kubeflow.org"}, "spec": spec})
    api.until_served("/apis/kubeflow.org/v1/notebooks")
