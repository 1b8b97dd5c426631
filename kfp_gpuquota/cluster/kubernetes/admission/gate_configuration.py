"""The MutatingWebhookConfiguration: the authority in it, and what puts it back when it was deleted.

Invariants: nothing is put back that would outlive the installation, so its owner is the webhook's ClusterRole, with
which the garbage collector removes it. It is put back as it was read last, by name: a server-side apply is authorized
as `create` of this name, which RBAC can grant. A POST has no name yet when it is authorized, so it would need the right
to create webhooks for all kinds, and admission policies do not apply to objects of admissionregistration.k8s.io.

A removal of the installation deletes the configuration and then the programs, so it is put back only if it is still
missing after `MISSING_S`.
"""

from __future__ import annotations

import base64
import logging
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import APPLY_PATCH, JSON_PATCH, ApiError
from kfp_gpuquota.cluster.kubernetes.objects import labels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection

CONFIGURATION: Final = "gpuquota"
MISSING_S: Final = 20.0
_API_VERSION: Final = "admissionregistration.k8s.io/v1"
_PATH: Final = join("/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations", CONFIGURATION)
_RIGHTS: Final = "rbac.authorization.k8s.io/v1"
_OWNER: Final = "gpuquota-webhook"

log = logging.getLogger(__name__)

Json = dict[str, Any]


class GateConfiguration:
    """The configuration as this process has read it last."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._last: Json | None = None
        self._missing_since: float | None = None

    @property
    def missing(self) -> bool:
        """Return whether the last look has not found it."""
        return self._missing_since is not None

    async def maintain(self, trusted: bytes, now: float) -> None:
        """Write the authority into it, or put it back if it has been missing for a while. Raises RunError."""
        bundle = base64.b64encode(trusted).decode()
        try:
            found = await self._connection.read(_PATH, dict[str, Any])
        except ApiError as error:
            if not error.not_found:
                raise
            await self._put_back(bundle, now)
            return
        self._last, self._missing_since = found, None
        if operations := list(_injections(found.get("webhooks") or [], bundle)):
            params = {"fieldManager": labels.FIELD_MANAGER}
            await self._connection.call("PATCH", _PATH, operations, content_type=JSON_PATCH, params=params)

    async def _put_back(self, bundle: str, now: float) -> None:
        if self._missing_since is None:
            log.warning("there is no MutatingWebhookConfiguration %s: pods are not gated", CONFIGURATION)
            self._missing_since = now
        if self._last is None or now - self._missing_since < MISSING_S:
            return
        path = join("/apis/rbac.authorization.k8s.io/v1/clusterroles", _OWNER)
        owner = await self._connection.read(path, dict[str, Any])
        params = {"fieldManager": _manager(self._last), "force": "true"}
        body = restored(self._last, owner["metadata"]["uid"], bundle)
        await self._connection.call("PATCH", _PATH, body, content_type=APPLY_PATCH, params=params)
        self._missing_since = None
        log.warning("the MutatingWebhookConfiguration %s was deleted, and is put back as it was", CONFIGURATION)


def restored(last: Json, owner_uid: str, bundle: str) -> Json:
    """Return a configuration as it was, with this authority and an owner."""
    metadata = {
        name: last["metadata"][name] for name in ("name", "labels", "annotations") if last["metadata"].get(name)
    }
    owner = {"apiVersion": _RIGHTS, "kind": "ClusterRole", "name": _OWNER, "uid": owner_uid}
    webhooks = [{**one, "clientConfig": {**one["clientConfig"], "caBundle": bundle}} for one in last["webhooks"]]
    return {
        "apiVersion": _API_VERSION,
        "kind": "MutatingWebhookConfiguration",
        "metadata": {**metadata, "ownerReferences": [owner]},
        "webhooks": webhooks,
    }


def _manager(last: Json) -> str:
    """Return who has applied it: the next apply of that program meets no conflict."""
    managers = [one["manager"] for one in last["metadata"].get("managedFields", [])]
    return next((one for one in managers if one != labels.FIELD_MANAGER), labels.FIELD_MANAGER)


def _injections(webhooks: list[Json], bundle: str) -> Iterator[Json]:
    for index, webhook in enumerate(webhooks):
        if webhook["clientConfig"].get("caBundle") != bundle:
            yield {"op": "test", "path": f"/webhooks/{index}/name", "value": webhook["name"]}
            yield {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": bundle}
