"""Reaches KFP's API server in a Kubernetes cluster as the kubeconfig's user: `kubectl port-forward`, and a token.

A port forward bypasses the ingress gateway, which authenticates the user for KFP. So on a multi-user Kubeflow a request
carries a token of a service account of the Profile for KFP's audience, as requests from the Profile's pods do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kfp_gpuquota.cluster.kubernetes.user_client import port_forward

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls

SERVICE: Final = "svc/ml-pipeline"
PORT: Final = 8888
AUDIENCE: Final = "pipelines.kubeflow.org"
TOKEN_S: Final = 3600


def forwarded(context: str, namespace: str) -> AbstractContextManager[str]:
    """Forward a local port to KFP's API server, and yield its URL on this machine; `namespace` is that of KFP.

    Raises what `user_client.port_forward` raises.
    """
    return port_forward.forwarded(context, namespace, SERVICE, PORT, needed_by="--kubeflow (unlike --host URL)")


def profile_token(calls: Calls, namespace: str, service_account: str) -> str:
    """Return a token of the Profile's service account, valid for TOKEN_S at KFP's API server. Raises UsageError."""
    return calls.service_account_token(namespace, service_account, TOKEN_S, [AUDIENCE])
