"""Mirrors the quota in a Kubeflow Profile into a GpuQuota, and labels its namespace as managed.

The Profile itself is never written: its own controller rewrites it at each reconcile. Problems are reported in the
mirrored quota's conditions and as events on the Profile's namespace.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.api.request_paths import join, with_query
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import APPLY_PATCH, MERGE_PATCH, ApiError
from kfp_gpuquota.cluster.kubernetes.client.writes.request import Write
from kfp_gpuquota.cluster.kubernetes.objects import labels, paths
from kfp_gpuquota.cluster.kubernetes.quota.quotas import has_spec, project_of_plugin, quota_spec
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from kfp_gpuquota.cluster.kubernetes.client.writes.write_queue import Writer
    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Namespace, Profile
    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import GpuQuota

PLUGIN: Final = "GpuQuota"
SOURCE: Final = "profile"
DEFAULT: Final = "default"  # of default_quotas.py
RETRY_S: Final = 5.0

log = logging.getLogger(__name__)


class Profiles:
    """Mirrors Profiles into GpuQuotas. `quotas` are the existing ones; `report(namespace, reason, message)` warns."""

    def __init__(self, writer: Writer, quotas: dict[str, GpuQuota], report: Callable[[str, str, str], None]) -> None:
        self._writer, self._quotas, self._report = writer, quotas, report
        self._profiles: dict[str, Profile] = {}
        self._names: dict[str, str] = {}
        self._namespaces: dict[str, Namespace] = {}
        self._namespace_names: dict[str, str] = {}
        self._reported: dict[str, str] = {}
        self._started = False

    def start(self) -> None:
        """Reconcile all quotas and namespaces with the Profiles, after all objects have been listed."""
        self._started = True
        for name in {*self._profiles, *self._quotas}:
            self._look(name)

    def put_profile(self, profile: Profile) -> None:
        """Add or update a Profile."""
        name = profile.metadata.name
        self._profiles[name], self._names[profile.metadata.uid] = profile, name
        if self._started:
            self._mirror(name)

    def drop_profile(self, uid: str) -> None:
        """Remove a deleted Profile; the garbage collector deletes its quota."""
        name = self._names.pop(uid, None)
        if name is not None and self._profiles[name].metadata.uid == uid:
            del self._profiles[name]

    def put_namespace(self, namespace: Namespace) -> None:
        """Add or update a namespace."""
        name = namespace.metadata.name
        self._namespaces[name], self._namespace_names[namespace.metadata.uid] = namespace, name
        if self._started:
            self._label(name)

    def drop_namespace(self, uid: str) -> None:
        """Remove a deleted namespace."""
        name = self._namespace_names.pop(uid, None)
        if name is not None and self._namespaces[name].metadata.uid == uid:
            del self._namespaces[name]

    def quota_changed(self, name: str) -> None:
        """Restore a mirrored quota that was edited or deleted: the Profile takes precedence."""
        if self._started and name in self._profiles:
            self._mirror(name)

    def _look(self, name: str) -> None:
        quota = self._quotas.get(name)
        if name in self._profiles:
            self._mirror(name)
        elif quota is not None and quota.metadata.labels.get(labels.SOURCE) == SOURCE:
            self._drop(quota)

    def asks(self, name: str) -> bool:
        """Return whether the namespace's Profile requests a quota."""
        profile = self._profiles.get(name)
        return profile is not None and plugin_of(profile) is not None

    def _mirror(self, name: str) -> None:
        profile = self._profiles[name]
        raw = plugin_of(profile)
        quota = self._quotas.get(name)
        if raw is None:
            if quota is not None and quota.metadata.labels.get(labels.SOURCE) == SOURCE:
                self._drop(quota)
            return
        self._warn_of_resource_quota(profile)
        try:
            project = project_of_plugin(name, bytes(raw))
        except InvalidFieldError as error:
            self._warn(name, "InvalidGpuQuota", f"{error.message}; the last valid quota stays in effect")
            return
        wanted = quota_spec(project)
        if quota is not None and quota.metadata.labels.get(labels.SOURCE) == DEFAULT:
            self._drop(quota)  # its deletion triggers the mirror; otherwise fields of two sources would be merged
            return
        if quota is None or not _is_mirror(quota, wanted):
            self._write(name, mirrored(profile, wanted))
        self._label(name)

    def _drop(self, quota: GpuQuota) -> None:
        self._write(quota.metadata.name, dropped(quota))

    def _label(self, name: str) -> None:
        namespace = self._namespaces.get(name)
        if namespace is None or not self.asks(name) or namespace.metadata.labels.get(labels.MANAGED):
            return  # "false", set by an admin, stays
        self._write(name, managed(namespace))

    def _write(self, name: str, write: Write) -> None:
        self._writer.submit(write, lambda _: None, partial(self._refused, name, write))

    def _refused(self, name: str, write: Write, error: Exception) -> None:
        if isinstance(error, ApiError) and error.not_found:
            return
        log.warning("%s %s was refused, retry in %g s: %s", write.verb, name, RETRY_S, error)
        asyncio.get_running_loop().call_later(RETRY_S, self._look, name)

    def _warn_of_resource_quota(self, profile: Profile) -> None:
        hard = profile.spec.resource_quota_spec.hard if profile.spec.resource_quota_spec else {}
        if counted := sorted(name for name in hard if labels.GPU_RESOURCE in name):
            self._warn(
                profile.metadata.name,
                "ResourceQuotaCountsGpus",
                f"the Profile's resourceQuotaSpec counts {', '.join(counted)}, so the team cannot borrow GPUs beyond "
                "it; leave GPUs to the GpuQuota plugin",
            )

    def _warn(self, name: str, reason: str, message: str) -> None:
        if self._reported.get(f"{name} {reason}") != message:
            self._reported[f"{name} {reason}"] = message
            self._report(name, reason, message)


def plugin_of(profile: Profile) -> msgspec.Raw | None:
    """Return the raw spec of the Profile's GpuQuota plugin, if any."""
    return next((p.spec for p in profile.spec.plugins or () if p.kind == PLUGIN), None)


def dropped(quota: GpuQuota) -> Write:
    """Return the deletion of the quota, unless it has changed since."""
    meta = quota.metadata
    preconditions = {"uid": meta.uid, "resourceVersion": meta.resource_version}
    body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}
    return Write(verb="DELETE", path=paths.quota(meta.name), about=meta.name, body=body)


def managed(namespace: Namespace) -> Write:
    """Return the patch that labels a namespace as managed, unless it has changed since: "false" is its admin's."""
    meta = namespace.metadata
    label = {"resourceVersion": meta.resource_version, "labels": {labels.MANAGED: "true"}}
    path = with_query(join("/api/v1/namespaces", meta.name), fieldManager=labels.FIELD_MANAGER)
    body = {"metadata": label}
    return Write(verb="PATCH", path=path, about=meta.name, body=body, content_type=MERGE_PATCH)


def mirrored(profile: Profile, spec: dict[str, Any]) -> Write:
    """Return the server-side apply of the mirrored quota; fields of other managers stay."""
    name = profile.metadata.name
    owner = {"apiVersion": "kubeflow.org/v1", "kind": "Profile", "name": name, "uid": profile.metadata.uid}
    body = {
        "apiVersion": labels.API_VERSION,
        "kind": "GpuQuota",
        "metadata": {"name": name, "labels": {labels.SOURCE: SOURCE}, "ownerReferences": [owner]},
        "spec": spec,
    }
    return Write(
        verb="PATCH",
        path=with_query(paths.quota(name), fieldManager=f"{labels.FIELD_MANAGER}-profiles", force="true"),
        about=name,
        body=body,
        content_type=APPLY_PATCH,
    )


def _is_mirror(quota: GpuQuota, wanted: dict[str, Any]) -> bool:
    return has_spec(quota, wanted) and quota.metadata.labels.get(labels.SOURCE) == SOURCE
