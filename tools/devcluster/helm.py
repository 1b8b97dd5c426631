"""Helm: found, or built once from its published Go module into the cache folder, in seconds after the control plane.

helm/go.mod names the version. It is the newest whose Kubernetes modules are those of the control plane: three quarters
of its packages are compiled already then. A newer one compiles all of them again, which takes minutes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tools.devcluster import binaries
from tools.devcluster.binaries import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

MODULE: Final = Path(__file__).with_name("helm")


def provide(environment: Mapping[str, str] = os.environ) -> Path:
    """The program. Raises UnavailableError where it is neither there nor can be built."""
    digest = hashlib.sha256((MODULE / "go.mod").read_bytes()).hexdigest()[:12]
    target = binaries.cache_root(environment) / f"helm-{digest}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the second of two builders finds what the first has built
        if not (target / "helm").exists():
            _build(target)
    return target / "helm"


def version() -> str:
    """The release in go.mod, for example 'v3.21.4'."""
    match = re.search(r"helm\.sh/helm/v3 (v\S+)", (MODULE / "go.mod").read_text())
    assert match, "go.mod names helm.sh/helm/v3"
    return match[1]


def _build(target: Path) -> None:
    if shutil.which("go") is None:
        raise UnavailableError("helm is built with Go once: install Go 1.26 or newer")
    _, minor, _ = binaries.version().removeprefix("v").split(".")
    flags = f"-s -w -X helm.sh/helm/v3/internal/version.version={version()}"
    for package in ("chartutil", "lint/rules"):  # what `helm template` and `helm lint` take for the cluster's version
        flags += f" -X helm.sh/helm/v3/pkg/{package}.k8sVersionMajor=1"
        flags += f" -X helm.sh/helm/v3/pkg/{package}.k8sVersionMinor={minor}"
    built = subprocess.run(
        ["go", "install", "-buildvcs=false", "-ldflags", flags, "tool"],
        cwd=MODULE,
        env={**os.environ, "GOBIN": str(target)},
        capture_output=True,
        check=False,
    )
    if built.returncode:
        raise UnavailableError(f"helm did not build: {built.stderr.decode(errors='replace')[-2000:]}")
