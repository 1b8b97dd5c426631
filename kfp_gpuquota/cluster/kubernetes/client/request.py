"""One request to the API server, as the write queue sends it. `Write.about` names the object for logs and events."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Any

import msgspec

from kfp_gpuquota.cluster.kubernetes.client.async_client import JSON


class Lane(StrEnum):
    """What a request does; each kind has slots of its own in the writer."""

    ADMIT = "admit"  # a gated pod may start
    RELEASE = "release"  # a pod is evicted or deleted
    CREATE = "create"  # a pod, and what it mounts
    STATUS = "status"
    EVENT = "event"
    OTHER = "other"


class Write(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `about` is "namespace/name" of its object, or a name alone. `level` is that of its line in the log:
    what is written again and again is for debugging only.
    """

    verb: str
    path: str
    about: str
    lane: Lane = Lane.OTHER
    body: Any = None
    content_type: str = JSON
    level: int = logging.INFO

    @property
    def namespace(self) -> str:
        """Of the object; "" where it has none."""
        return self.about.partition("/")[0] if "/" in self.about else ""


def pods_path(namespace: str) -> str:
    """Where a namespace's pods are."""
    return f"/api/v1/namespaces/{namespace}/pods"
