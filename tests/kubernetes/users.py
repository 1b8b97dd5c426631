"""Connections of users: kubeconfig files, read by the official client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.kubernetes.user_client.connection import Connection
from kfp_gpuquota.cluster.kubernetes.user_client.kubeconfig import load_package

if TYPE_CHECKING:
    from pathlib import Path

load_package()  # once in the server of `tests.forked`, not in each program


def connection_of(kubeconfig: Path) -> Connection:
    """A connection with the current context of a kubeconfig."""
    return Connection.open(str(kubeconfig))
