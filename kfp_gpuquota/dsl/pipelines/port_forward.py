"""Reaches KFP's API server in a Kubernetes cluster as the kubeconfig's user: `kubectl port-forward`, and a token.

A port forward bypasses the ingress gateway, which authenticates the user for KFP. So on a multi-user Kubeflow a request
carries a token of a service account of the Profile for KFP's audience, as requests from the Profile's pods do.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from kfp_gpuquota.errors import ClusterUnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls

SERVICE: Final = "svc/ml-pipeline"
PORT: Final = 8888
AUDIENCE: Final = "pipelines.kubeflow.org"
TOKEN_S: Final = 3600
_STARTS_WITHIN_S: Final = 30.0
_STOPS_WITHIN_S: Final = 5.0
_FORWARDING = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+)")


@contextlib.contextmanager
def forwarded(context: str, namespace: str) -> Iterator[str]:
    """Forward a local port to KFP's API server, and yield its URL on this machine.

    `context` is a context of the kubeconfig ("": the current one), `namespace` that of KFP. Raises UsageError where
    kubectl is not installed, ClusterUnavailableError where it cannot forward the port.
    """
    program = shutil.which("kubectl")
    if not program:
        raise UsageError("--kubeflow needs kubectl to reach the cluster; install it, or give --host URL")
    command = [program, *([f"--context={context}"] if context else []), f"--namespace={namespace}", "port-forward"]
    process = subprocess.Popen(
        [*command, "--address=127.0.0.1", SERVICE, f":{PORT}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        yield f"http://127.0.0.1:{_local_port(process)}"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOPS_WITHIN_S)
        process.kill()
        process.wait()


def profile_token(calls: Calls, namespace: str, service_account: str) -> str:
    """Return a token of the Profile's service account, valid for TOKEN_S at KFP's API server. Raises UsageError."""
    path = f"/api/v1/namespaces/{quote(namespace)}/serviceaccounts/{quote(service_account)}/token"
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": [AUDIENCE], "expirationSeconds": TOKEN_S},
    }
    token: str = calls.create(path, body)["status"]["token"]
    return token


def _local_port(process: subprocess.Popen[bytes]) -> int:
    """Return the local port that kubectl reports in its output."""
    assert process.stdout is not None
    output, give_up_at = b"", time.monotonic() + _STARTS_WITHIN_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, give_up_at - time.monotonic())):
            piece = os.read(process.stdout.fileno(), 4096)
            output += piece
            if match := _FORWARDING.search(output):
                return int(match[1])
            if not piece:
                break
    why = output.decode(errors="replace").strip() or f"no answer within {_STARTS_WITHIN_S:g} s"
    raise ClusterUnavailableError(f"KFP's API server cannot be reached through kubectl port-forward: {why}")
