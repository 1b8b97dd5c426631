"""Container images without a registry: a tar of a few files that `ctr images import` takes."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

PAUSE: Final = "localhost/pause:1"
BASE: Final = "localhost/base:1"
ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
FOLDERS: Final = ("bin", "dev", "etc", "lib", "lib64", "proc", "root", "run", "sys", "tmp", "usr", "var")
APPLETS: Final = ("sh", "cat", "echo", "env", "ls", "nc", "sleep", "test", "touch", "true", "wget")


def write(path: Path, name: str, busybox: Path, entrypoint: list[str]) -> None:
    """An image (docker archive) of busybox under its usual names, statically linked, and nothing else."""
    layer = _layer(busybox)
    digest = hashlib.sha256(layer).hexdigest()
    config = _config(digest, entrypoint)
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]}]
    contents = {config_name: config, f"{digest}/layer.tar": layer, "manifest.json": json.dumps(manifest).encode()}
    with tarfile.open(path, "w") as archive:
        for file, content in contents.items():
            archive.addfile(_entry(file, size=len(content)), io.BytesIO(content))


def _layer(busybox: Path) -> bytes:
    content, buffer = busybox.read_bytes(), io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder in FOLDERS:
            archive.addfile(_entry(folder, tarfile.DIRTYPE, mode=0o1777 if folder == "tmp" else 0o755))
        archive.addfile(_entry("bin/busybox", size=len(content)), io.BytesIO(content))
        for applet in APPLETS:
            archive.addfile(_entry(f"bin/{applet}", tarfile.SYMTYPE, target="/bin/busybox"))
    return buffer.getvalue()


def _config(digest: str, entrypoint: list[str]) -> bytes:
    config = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Entrypoint": entrypoint, "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [],
    }
    return json.dumps(config).encode()


def _entry(
    name: str, kind: bytes = tarfile.REGTYPE, *, size: int = 0, mode: int = 0o755, target: str = ""
) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.size, entry.mode, entry.linkname = kind, size, mode, target
    return entry
