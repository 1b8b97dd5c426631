"""Creates the default quota of unmanaged namespaces, if the QuotaPolicy has `unmanaged: default-quota`.

Each namespace that is neither labelled, nor exempt, nor has a GpuQuota gets the default one (labelled
gpuquota.dev/source=default and owned by the namespace, so that it is deleted with it), and then the label that gates
its pods. Until then the API server refuses its GPU pods (policy gpuquota-unmanaged), so no pod starts ungated. The
quota of a Profile replaces the default, and an administrator may edit it. Other modes do not remove existing defaults.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.request_paths import with_query
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import APPLY_PATCH, ApiError
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write
from kfp_gpuquota.cluster.kubernetes.objects import labels, paths
from kfp_gpuquota.cluster.kubernetes.quota.profiles import managed
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import Unmanaged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Namespace
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import GpuQuota
    from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import ClusterRules, CurrentRules

SOURCE: Final = "default"
RETRY_S: Final = 5.0
CONFLICT_RETRY_S: Final = 0.2

log = logging.getLogger(__name__)


class DefaultQuotas:
    """Creates default quotas. `quotas` are the existing ones, by name.

    `claimed(namespace)` returns whether a Profile requests a quota for the namespace.
    """

    def __init__(
        self, writer: Writer, rules: CurrentRules, quotas: Mapping[str, GpuQuota], claimed: Callable[[str], bool]
    ) -> None:
        self._writer, self._rules, self._quotas, self._claimed = writer, rules, quotas, claimed
        self._namespaces: dict[str, Namespace] = {}
        self._names: dict[str, str] = {}
        self._under_way: set[str] = set()
        self._started = False

    def start(self) -> None:
        """Start reconciling every namespace, after all objects have been listed."""
        self._started = True
        self.rules_changed()

    def rules_changed(self) -> None:
        """Reconcile every namespace after a change of the QuotaPolicy."""
        for name in list(self._namespaces):
            self._look(name)

    def put_namespace(self, namespace: Namespace) -> None:
        """Add or update a namespace."""
        name = namespace.metadata.name
        self._namespaces[name], self._names[namespace.metadata.uid] = namespace, name
        self._look(name)

    def drop_namespace(self, uid: str) -> None:
        """Remove a deleted namespace; the garbage collector deletes its default quota."""
        name = self._names.pop(uid, None)
        if name is not None and self._namespaces[name].metadata.uid == uid:
            del self._namespaces[name]

    def _look(self, name: str) -> None:
        namespace, rules = self._namespaces.get(name), self._rules.rules
        if namespace is None or not self._started or name in self._under_way:
            return
        if rules.unmanaged is not Unmanaged.DEFAULT_QUOTA or rules.exempts(name) or self._claimed(name):
            return
        meta = namespace.metadata
        if labels.MANAGED in meta.labels or meta.deletion_timestamp is not None:
            return  # "false", set by an administrator, stays
        self._under_way.add(name)
        if name in self._quotas:
            self._label(name)
        else:
            done, failed = (lambda _: self._label(name)), partial(self._refused, name)
            self._writer.submit(default_quota(namespace, rules), done, failed)

    def _label(self, name: str) -> None:
        namespace = self._namespaces.get(name)
        if namespace is None or labels.MANAGED in namespace.metadata.labels:
            self._under_way.discard(name)
            return
        done, failed = (lambda _: self._under_way.discard(name)), partial(self._refused, name)
        self._writer.submit(managed(namespace), done, failed)

    def _refused(self, name: str, error: Exception) -> None:
        if isinstance(error, ApiError) and error.not_found:
            self._under_way.discard(name)
            return
        changed = isinstance(error, ApiError) and error.status == 409  # the watch reports it
        if not changed:
            log.warning("the default quota of namespace %s was not created, retry in %g s: %s", name, RETRY_S, error)
        asyncio.get_running_loop().call_later(CONFLICT_RETRY_S if changed else RETRY_S, self._retry, name)

    def _retry(self, name: str) -> None:
        self._under_way.discard(name)
        self._look(name)


def default_quota(namespace: Namespace, rules: ClusterRules) -> Write:
    """Return the request that applies the namespace's default quota without overwriting fields of other managers."""
    meta = namespace.metadata
    owner = {"apiVersion": "v1", "kind": "Namespace", "name": meta.name, "uid": meta.uid}
    body = {
        "apiVersion": labels.API_VERSION,
        "kind": "GpuQuota",
        "metadata": {"name": meta.name, "labels": {labels.SOURCE: SOURCE}, "ownerReferences": [owner]},
        "spec": dict(rules.default_quota),
    }
    path = paths.quota(meta.name)
    return Write(
        verb="PATCH",
        path=with_query(path, fieldManager=f"{labels.FIELD_MANAGER}-defaults"),
        about=meta.name,
        body=body,
        content_type=APPLY_PATCH,
    )
