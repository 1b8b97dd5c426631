"""Images as archives of the OCI image layout, of which every byte follows from the arguments.

An archive holds one image for several architectures. Its index.json names one descriptor, the image's index, because
skopeo takes only an archive with a single image; the index names a manifest for each architecture.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import tarfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tools.release.layer import Blob

Json = dict[str, Any]

_INDEX: Final = "application/vnd.oci.image.index.v1+json"
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_LAYER: Final = "application/vnd.oci.image.layer.v1.tar+gzip"


@dataclass(frozen=True, slots=True)
class Settings:
    """How an image's process starts, and what is said of the image: the same for all architectures."""

    user: str
    entrypoint: Sequence[str]
    environment: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Sequence[str] = ()


def write(path: Path, name: str, settings: Settings, layers: Mapping[str, Sequence[Blob]], epoch: int) -> str:
    """Write an archive, and return the digest by which a registry has the image.

    `name` is REGISTRY/NAME:TAG; `layers` has those of each architecture, the lowest first.
    """
    blobs: dict[str, bytes] = {}
    manifests = [
        _manifest(blobs, settings, architecture, layers[architecture], epoch) for architecture in sorted(layers)
    ]
    index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": manifests, "annotations": dict(settings.labels)}
    annotations = {
        "io.containerd.image.name": full_name(name),
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }
    top = {**_store(blobs, _INDEX, _json(index)), "annotations": annotations}
    contents = {
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _json({"schemaVersion": 2, "mediaType": _INDEX, "manifests": [top]}),
        **{f"blobs/sha256/{digest}": blobs[digest] for digest in sorted(blobs)},
    }
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for file, content in contents.items():
            entry = tarfile.TarInfo(file)
            entry.size, entry.mtime, entry.mode = len(content), epoch, 0o644
            archive.addfile(entry, io.BytesIO(content))
    return str(top["digest"])


def full_name(name: str) -> str:
    """Return an image's full name, by which a kubelet finds it: without a registry it is one of docker.io."""
    first, separator, _ = name.partition("/")
    if separator and (first == "localhost" or "." in first or ":" in first):
        return name
    return f"docker.io/{name}" if separator else f"docker.io/library/{name}"


def _manifest(
    blobs: dict[str, bytes], settings: Settings, architecture: str, layers: Sequence[Blob], epoch: int
) -> Json:
    created = datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    process = {
        "User": settings.user,
        "Entrypoint": list(settings.entrypoint),
        "Env": [f"{name}={value}" for name, value in settings.environment.items()],
        "Labels": dict(settings.labels),
    }
    if settings.ports:
        process["ExposedPorts"] = {f"{port}/tcp": {} for port in settings.ports}
    config = {
        "created": created,
        "architecture": architecture,
        "os": "linux",
        "config": process,
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created": created, "created_by": "tools.release"} for _ in layers],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _store(blobs, _CONFIG, _json(config)),
        "layers": [_store(blobs, _LAYER, layer.content) for layer in layers],
    }
    platform = {"architecture": architecture, "os": "linux"} | ({"variant": "v8"} if architecture == "arm64" else {})
    return {**_store(blobs, _MANIFEST, _json(manifest)), "platform": platform}


def _store(blobs: dict[str, bytes], media_type: str, content: bytes) -> Json:
    digest = hashlib.sha256(content).hexdigest()
    blobs[digest] = content
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}


def _json(value: Json) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
