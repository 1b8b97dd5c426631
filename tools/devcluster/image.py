"""Container images without a registry: a tar of a few files that `ctr images import` takes."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PAUSE: Final = "localhost/pause:1"
BASE: Final = "localhost/base:1"
BUSYBOX: Final = "bin/busybox"
ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
FOLDERS: Final = ("bin", "dev", "etc", "lib", "lib64", "proc", "root", "run", "sys", "tmp", "usr", "var")
APPLETS: Final = ("sh", "cat", "echo", "env", "ls", "nc", "sleep", "test", "touch", "true", "wget")


def write(path: Path, name: str, programs: Mapping[str, Path], entrypoint: Sequence[str], user: str = "") -> None:
    """An image (docker archive) of static programs by their paths and nothing else; busybox has its usual names."""
    layer = _layer(programs)
    digest = hashlib.sha256(layer).hexdigest()
    config = _config(digest, entrypoint, user)
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]}]
    contents = {config_name: config, f"{digest}/layer.tar": layer, "manifest.json": json.dumps(manifest).encode()}
    with tarfile.open(path, "w") as archive:
        for file, content in contents.items():
            archive.addfile(_entry(file, size=len(content)), io.BytesIO(content))


def _layer(programs: Mapping[str, Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, program in programs.items():
            content = program.read_bytes()
            archive.addfile(_entry(path, size=len(content)), io.BytesIO(content))
        if BUSYBOX in programs:
            for folder in FOLDERS:
                archive.addfile(_entry(folder, tarfile.DIRTYPE, mode=0o1777 if folder == "tmp" else 0o755))
            for applet in APPLETS:
                archive.addfile(_entry(f"bin/{applet}", tarfile.SYMTYPE, target=f"/{BUSYBOX}"))
    return buffer.getvalue()


def _config(digest: str, entrypoint: Sequence[str], user: str) -> bytes:
    config = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Entrypoint": [*entrypoint], "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], "User": user},
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
