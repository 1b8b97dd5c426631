"""What LimitRanges add to containers that do not say what they request: pure bookkeeping.

Pods that others make have it by the time we see them; an ElasticJob's are planned before they are made, so what the API
server's admission will write into them (plugin LimitRanger) has to be known from the template.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kfp_gpuquota.cluster.kubernetes.objects.core_types import Container, LimitRange, PodSpec


class LimitRanges:
    """All namespaces'. `changed(namespace)`: containers get other requests there from now on."""

    def __init__(self, changed: Callable[[str], None]) -> None:
        self._changed = changed
        self._known: dict[str, LimitRange] = {}

    def put(self, found: LimitRange) -> None:
        """A LimitRange is as given."""
        self._known[found.metadata.uid] = found
        self._changed(found.metadata.namespace)

    def drop(self, uid: str) -> None:
        """A LimitRange is gone."""
        if (known := self._known.pop(uid, None)) is not None:
            self._changed(known.metadata.namespace)

    def requests_in(self, namespace: str) -> dict[str, Any]:
        """What a container requests there that says nothing; of several LimitRanges the first one by name counts."""
        here = (known for known in self._known.values() if known.metadata.namespace == namespace)
        requests: dict[str, Any] = {}
        for known in sorted(here, key=lambda known: known.metadata.name, reverse=True):
            for item in known.spec.limits:
                requests |= item.default_request if item.type == "Container" else {}
        return requests


def completed(spec: PodSpec, requests: Mapping[str, Any]) -> PodSpec:
    """The pod as admission will leave it: a container with a limit requests as much, whatever the default is."""
    if not requests:
        return spec
    return msgspec.structs.replace(
        spec,
        containers=tuple(_with_requests(container, requests) for container in spec.containers),
        init_containers=tuple(_with_requests(container, requests) for container in spec.init_containers),
    )


def _with_requests(container: Container, requests: Mapping[str, Any]) -> Container:
    asked = {**requests, **container.resources.limits, **container.resources.requests}
    return msgspec.structs.replace(container, resources=msgspec.structs.replace(container.resources, requests=asked))
