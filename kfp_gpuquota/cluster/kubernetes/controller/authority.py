"""Publishes the certificate of the authority that signs the controller's, so that the web page can verify it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import APPLY_PATCH
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.what_if import AUTHORITY, AUTHORITY_FILE
from kfp_gpuquota.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection

EVERY_S: Final = 60.0

log = logging.getLogger(__name__)


async def keep_published(connection: Connection, namespace: str, trusted: Callable[[], bytes]) -> None:
    """Apply the ConfigMap once a minute until cancelled: it may have been deleted, or the authority renewed."""
    while True:
        try:
            await _publish(connection, namespace, trusted())
        except RunError as error:
            log.warning("the ConfigMap %s/%s could not be written: %s", namespace, AUTHORITY, error)
        await asyncio.sleep(EVERY_S)


async def _publish(connection: Connection, namespace: str, trusted: bytes) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": AUTHORITY, "labels": {"app.kubernetes.io/part-of": "gpuquota"}},
        "data": {AUTHORITY_FILE: trusted.decode()},
    }
    path = join("/api/v1/namespaces", namespace, "configmaps", AUTHORITY)
    params = {"fieldManager": labels.FIELD_MANAGER, "force": "true"}
    await connection.call("PATCH", path, body, content_type=APPLY_PATCH, params=params)
