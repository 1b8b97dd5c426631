"""The workers' program of the launcher's image (images/launcher/worker), built with Go when its source has changed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from tools.devcluster.binaries import UnavailableError, cache_root

SOURCE: Final = Path(__file__).parents[1] / "images" / "launcher" / "worker"
NAME: Final = "gpuquota-worker"
PATH: Final = f"opt/gpuquota/bin/{NAME}"
"""Where the launcher's image has it, without the slash of the root."""
# The same bytes on every machine with the same Go; images/launcher/Dockerfile has them, too.
_FLAGS: Final = ("-trimpath", "-buildvcs=false", "-ldflags=-s -w -buildid=")


def provide(architecture: str = "") -> Path:
    """Return the program for an architecture in Go's words ("": this machine's). Raises UnavailableError."""
    if shutil.which("go") is None:
        raise UnavailableError(f"{NAME} is built with Go once: install Go 1.26 or newer")
    target = cache_root() / f"{NAME}-{_digest()}" / (architecture or "here") / NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the second of two builders finds what the first has built
        if not target.exists():
            _build(target, architecture)
    return target


def version() -> str:
    """Return the version of Go, whose standard library is part of the program: for example "1.26.8"."""
    return _go("env", "GOVERSION").removeprefix("go").split()[0]


def _digest() -> str:
    found = hashlib.sha256(f"{version()} {_FLAGS}".encode())
    for path in sorted(SOURCE.iterdir()):
        found.update(f"{path.name}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _build(target: Path, architecture: str) -> None:
    part = target.with_suffix(".part")
    _go("build", *_FLAGS, f"-o={part}", ".", **({"GOARCH": architecture} if architecture else {}))
    part.rename(target)


def _go(*arguments: str, **environment: str) -> str:
    settings = {**os.environ, "CGO_ENABLED": "0", "GOOS": "linux", "GOTOOLCHAIN": "local", **environment}
    done = subprocess.run(["go", *arguments], cwd=SOURCE, env=settings, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"{NAME} did not build: {done.stderr[-2000:]}")
    return done.stdout
