"""The page's process with the rights of its account, and users that a proxy names to it."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.kubernetes.installation import MANIFESTS, NAMESPACE
from tests.polling import until
from tests.web.visitor import Visitor
from tools.devcluster.layout import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from http.client import HTTPConnection
    from pathlib import Path

    from tools.devcluster import DevCluster

ROLES = "/apis/rbac.authorization.k8s.io/v1"
ACCOUNT = "gpuquota-web-page"
BASE = "/gpuquota"
RUN_PAGE = "/_/pipeline/?ns={namespace}#/runs/details/{run}"
COMPONENT = MANIFESTS / "components" / "web-page"


class User(Visitor):
    """A browser behind the proxy, which adds the user's name to each request, and the groups if there are any."""

    def __init__(self, port: int, name: str, groups: str = "") -> None:
        super().__init__(f"http://127.0.0.1:{port}{BASE}/enter")
        self.name = name
        self._named = {"kubeflow-userid": name, **({"kubeflow-groups": groups} if groups else {})}

    def _begun(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> HTTPConnection:
        return super()._begun(method, path, body, {**self._named, **headers})


@dataclass
class WebPage:
    """A running process."""

    port: int
    log: Path

    def user(self, name: str, groups: str = "") -> User:
        """Somebody's browser."""
        return User(self.port, name, groups)

    def audit(self) -> list[dict[str, Any]]:
        """The audit lines, oldest first."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if "request" in line]


@contextmanager
def web_page(cluster: DevCluster, log: Path, *options: str) -> Iterator[WebPage]:
    """Run the page with the account and the rights of the component; yield when it can be asked."""
    for name in ("rbac", "policy"):
        cluster.kubectl("apply", "-f", str(COMPONENT / f"{name}.yaml"))
    kubeconfig, port = cluster.kubeconfig_of_service_account(NAMESPACE, ACCOUNT), free_port()
    given = options or ("--trusted-proxy=127.0.0.0/8",)
    command = [sys.executable, "-m", "kfp_gpuquota.cluster.kubernetes.web", f"--kubeconfig={kubeconfig}"]
    more = [
        f"--port={port}",
        f"--base-path={BASE}/",
        "--log-format=json",
        "--dashboard",
        f"--run-page={RUN_PAGE}",
        *given,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *more], stderr=output)
    try:
        until(lambda: process.poll() is not None or "serving the web page" in log.read_text(), log.read_text)
        assert process.poll() is None, log.read_text()
        yield WebPage(port, log)
    finally:
        process.terminate()
        process.wait()


def bind(cluster: DevCluster, name: str, role: str, namespace: str = "", *, kind: str = "User") -> str:
    """Give the user or group a ClusterRole, in a namespace or everywhere; return the binding's path."""
    where = f"{ROLES}/namespaces/{namespace}/rolebindings" if namespace else f"{ROLES}/clusterrolebindings"
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    binding = f"{role}-{uuid.uuid4().hex[:6]}"
    cluster.api.create(where, {"metadata": {"name": binding}, "subjects": [subject], "roleRef": reference})
    return f"{where}/{binding}"
