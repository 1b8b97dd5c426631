"""Rejects settings of kfp-kubernetes that the workers of a routed step cannot have, instead of dropping them. Pure.

All other settings are on the step's pod and are copied to the workers' pods (`pod_template.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.api.annotations import SHARE_ANNOTATIONS
from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.dsl.spec.pod_template import LAUNCHER_DOMAINS, MOUNT, PROGRAM_MOUNT
from kfp_gpuquota.errors import DefinitionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Json = dict[str, Any]

RESERVED_PATHS: Final = (
    MOUNT,
    PROGRAM_MOUNT,
    "/var/run/secrets/gpuquota.dev",
    "/var/lib/gpuquota/checkpoints",
    "/opt/gpuquota/runtime",
)
_VOLUMES: Final = ("pvcMount", "secretAsVolume", "configMapAsVolume", "emptyDirMounts", "genericEphemeralVolume")


def executor_configs(documents: Iterable[Json]) -> Json:
    """Return the Kubernetes configuration of each executor, from the documents after a PipelineSpec."""
    found: Json = {}
    for document in documents:
        kubernetes = document.get("platforms", {}).get("kubernetes", {})
        found |= kubernetes.get("deploymentSpec", {}).get("executors", {})
    return found


def check_config(step: str, config: Json) -> None:
    """Raise DefinitionError for the first setting that would not reach the step's workers."""
    for problem in _problems(config):
        raise DefinitionError(f"step {step!r}: {problem}")


def _problems(config: Json) -> Iterator[str]:
    metadata = config.get("podMetadata", {})
    for part, adder in (("labels", "add_pod_label"), ("annotations", "add_pod_annotation")):
        for name in metadata.get(part, {}):
            domain = name.partition("/")[0]
            if name in SHARE_ANNOTATIONS:
                yield (
                    f"{adder}({name!r}) asks for a part of a GPU, which a routed step asks for in its decorator: "
                    "@gpuquota.component(fraction=...) or (memory=...)"
                )
            elif domain == labels.GROUP or domain in LAUNCHER_DOMAINS:
                yield f"{adder}({name!r}) uses the domain {domain!r}, which belongs to the cluster; choose another name"
    for volume in (volume for field in _VOLUMES for volume in config.get(field, [])):
        path = volume.get("mountPath", "").rstrip("/")
        if path in RESERVED_PATHS:
            yield f"a volume is mounted at {path}, where a worker finds its own files; mount it elsewhere"
