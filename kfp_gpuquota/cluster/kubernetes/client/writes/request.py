"""Requests to the API server, as the write queue sends them. `Write.about` names the object for logs and events."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import CALL_TIMEOUT_S, JSON, ApiError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer


class Lane(StrEnum):
    """Category of a request; each has slots of its own in the writer."""

    ADMIT = "admit"  # removes a pod's scheduling gate
    RELEASE = "release"  # evicts or deletes a pod
    CREATE = "create"  # creates a pod or an object that it mounts
    STATUS = "status"
    EVENT = "event"
    LOOK_UP = "look-up"  # reads an object of a tenant, or of another project
    OTHER = "other"


class Write(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `about` is "namespace/name" of its object, or only a name. `level` is the level of its log line:
    frequent writes are logged for debugging only. An attempt may take `limit_s`.
    """

    verb: str
    path: str
    about: str
    lane: Lane = Lane.OTHER
    body: Any = None
    content_type: str = JSON
    level: int = logging.INFO
    limit_s: float = CALL_TIMEOUT_S

    @property
    def namespace(self) -> str:
        """Return the object's namespace; "" if it is cluster-scoped."""
        return self.about.partition("/")[0] if "/" in self.about else ""


def pods_path(namespace: str) -> str:
    """Return the API path of a namespace's pods."""
    return join("/api/v1/namespaces", namespace, "pods")


def create(
    writer: Writer,
    api: str,
    plural: str,
    body: dict[str, Any],
    *,
    exists: Callable[[], None],
    failed: Callable[[Exception], None],
    taken: Callable[[], None] | None = None,
) -> None:
    """Create an object of a namespace; `api` is as "/api/v1". Call `exists`, or `failed` with the error.

    `taken`: called in place of `exists` if there is an object of that name already.
    """
    namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]

    def refused(error: Exception) -> None:
        if isinstance(error, ApiError) and error.status == 409:
            (taken or exists)()
        else:
            failed(error)

    path = join(f"{api}/namespaces", namespace, plural)
    write = Write(verb="POST", path=path, about=f"{namespace}/{name}", lane=Lane.CREATE, body=body)
    writer.submit(write, lambda _: exists(), refused)
