"""Default requests that LimitRanges add to containers without requests. No I/O.

Pods of other controllers already have these when the watch delivers them. An ElasticJob is planned before its pods are
created, so the requests that the API server's LimitRanger plugin will add are computed from the template.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Container, LimitRange, PodSpec


class LimitRanges:
    """The LimitRanges of all namespaces. `changed(namespace)` is called when default requests may have changed."""

    def __init__(self, changed: Callable[[str], None]) -> None:
        self._changed = changed
        self._by_uid: dict[str, LimitRange] = {}

    def put(self, found: LimitRange) -> None:
        """Add or update a LimitRange."""
        self._by_uid[found.metadata.uid] = found
        self._changed(found.metadata.namespace)

    def drop(self, uid: str) -> None:
        """Remove a deleted LimitRange."""
        if (deleted := self._by_uid.pop(uid, None)) is not None:
            self._changed(deleted.metadata.namespace)

    def requests_in(self, namespace: str) -> dict[str, Any]:
        """Return the default requests of a container; of several LimitRanges the first one by name takes precedence."""
        in_namespace = (one for one in self._by_uid.values() if one.metadata.namespace == namespace)
        requests: dict[str, Any] = {}
        for limit_range in sorted(in_namespace, key=lambda one: one.metadata.name, reverse=True):
            for item in limit_range.spec.limits:
                requests |= item.default_request if item.type == "Container" else {}
        return requests


def completed(spec: PodSpec, requests: Mapping[str, Any]) -> PodSpec:
    """Return the spec with default requests as admission adds them; a container's limit overrides the default."""
    if not requests:
        return spec
    return msgspec.structs.replace(
        spec,
        containers=tuple(_with_requests(container, requests) for container in spec.containers),
        init_containers=tuple(_with_requests(container, requests) for container in spec.init_containers),
    )


def _with_requests(container: Container, requests: Mapping[str, Any]) -> Container:
    merged = {**requests, **container.resources.limits, **container.resources.requests}
    return msgspec.structs.replace(container, resources=msgspec.structs.replace(container.resources, requests=merged))
