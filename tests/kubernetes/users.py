"""Connections of users: kubeconfig files, read by the official client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.kubernetes.user_client import package
from kfp_gpuquota.cluster.kubernetes.user_client.connection import Connection

if TYPE_CHECKING:
    from pathlib import Path

package.load()  # once in the server of `tests.forked`, not in each program


def connection_of(kubeconfig: Path) -> Connection:
    """A connection with the current context of a kubeconfig."""
    return Connection.open(str(kubeconfig))
