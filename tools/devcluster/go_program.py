"""One program that is built from its published Go module, once, into the cache folder.

`NAME/go.mod` beside this file names the version: another one is built into another folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tools.devcluster.binaries import NO_DEBUG_DATA, UnavailableError, cache_root

if TYPE_CHECKING:
    from collections.abc import Mapping


def module_of(name: str) -> Path:
    """Return the folder of the program's go.mod."""
    return Path(__file__).with_name(name)


def provide(name: str, flags: str, *options: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the program; `flags` are the linker's. Raises UnavailableError where it cannot be built."""
    digest = hashlib.sha256((module_of(name) / "go.mod").read_bytes()).hexdigest()[:12]
    target = cache_root(environment) / f"{name}-{digest}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the second of two builders finds what the first has built
        if not (target / name).exists():
            _build(name, target, ["-ldflags", f"-s -w {flags}".rstrip(), *options])
    return target / name


def _build(name: str, target: Path, options: list[str]) -> None:
    if shutil.which("go") is None:
        raise UnavailableError(f"{name} is built with Go once: install Go 1.26 or newer")
    built = subprocess.run(
        ["go", "install", "-buildvcs=false", NO_DEBUG_DATA, *options, "tool"],
        cwd=module_of(name),
        env={**os.environ, "GOBIN": str(target)},
        capture_output=True,
        check=False,
    )
    if built.returncode:
        raise UnavailableError(f"{name} did not build: {built.stderr.decode(errors='replace')[-2000:]}")
