"""Reads from a pod that cannot be decoded what determines its devices. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from kfp_gpuquota.cluster.kubernetes.objects.core_types import Container, Metadata, Pod, PodSpec, PodStatus, Resources


def recovered_pod(raw: msgspec.Raw, problem: str) -> Pod:
    """Return a pod that cannot be decoded, with the fields that determine its devices; others have their defaults."""
    given = msgspec.json.decode(raw)
    spec, status = _fields(given, "spec"), _fields(given, "status")
    limits = [_fields(_fields(one, "resources"), "limits") for one in _items(spec, "containers")]
    inits = [_fields(_fields(one, "resources"), "limits") for one in _items(spec, "initContainers")]
    return Pod(
        metadata=msgspec.convert(_fields(given, "metadata"), Metadata),
        spec=PodSpec(
            node_name=str(spec.get("nodeName") or ""),
            containers=tuple(Container(resources=Resources(limits=one)) for one in limits),
            init_containers=tuple(Container(resources=Resources(limits=one)) for one in inits),
        ),
        status=PodStatus(phase=str(status.get("phase") or "")),
        problem=problem,
    )


def _fields(given: object, name: str) -> dict[str, Any]:
    found = given.get(name) if isinstance(given, dict) else None
    return found if isinstance(found, dict) else {}


def _items(given: dict[str, Any], name: str) -> list[Any]:
    found = given.get(name)
    return found if isinstance(found, list) else []
