"""Promtool: the machine's (Debian's package prometheus has one), else built once into the cache folder, in minutes.

promtool/go.mod names the version that is built, without service discoveries: rules do not need these, and they are most
of Prometheus' dependencies.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tools.devcluster import binaries
from tools.devcluster.binaries import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

MODULE: Final = Path(__file__).with_name("promtool")


def provide(environment: Mapping[str, str] = os.environ) -> Path:
    """The program. Raises UnavailableError where it is neither there nor can be built."""
    if found := shutil.which("promtool", path=environment.get("PATH")):
        return Path(found)
    digest = hashlib.sha256((MODULE / "go.mod").read_bytes()).hexdigest()[:12]
    target = binaries.cache_root(environment) / f"promtool-{digest}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the second of two builders finds what the first has built
        if not (target / "promtool").exists():
            _build(target)
    return target / "promtool"


def _build(target: Path) -> None:
    if shutil.which("go") is None:
        raise UnavailableError("promtool is built with Go once: install Go 1.26 or newer")
    built = subprocess.run(
        ["go", "install", "-buildvcs=false", "-tags", "remove_all_sd", "-ldflags", "-s -w", "tool"],
        cwd=MODULE,
        env={**os.environ, "GOBIN": str(target)},
        capture_output=True,
        check=False,
    )
    if built.returncode:
        raise UnavailableError(f"promtool did not build: {built.stderr.decode(errors='replace')[-2000:]}")
