"""Helm: built once from its published Go module into the cache folder, in seconds after the control plane.

helm/go.mod names the version. It is the newest whose Kubernetes modules are those of the control plane: three quarters
of its packages are compiled already then. A newer one compiles all of them again, which takes minutes.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from tools.devcluster import binaries, go_program

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def provide(environment: Mapping[str, str] = os.environ) -> Path:
    """The program. Raises UnavailableError where it is neither there nor can be built."""
    _, minor, _ = binaries.version().removeprefix("v").split(".")
    flags = f"-X helm.sh/helm/v3/internal/version.version={version()}"
    for package in ("chartutil", "lint/rules"):  # what `helm template` and `helm lint` take for the cluster's version
        flags += f" -X helm.sh/helm/v3/pkg/{package}.k8sVersionMajor=1"
        flags += f" -X helm.sh/helm/v3/pkg/{package}.k8sVersionMinor={minor}"
    return go_program.provide("helm", flags, environment=environment)


def version() -> str:
    """The release in go.mod, for example 'v3.21.4'."""
    match = re.search(r"helm\.sh/helm/v3 (v\S+)", (go_program.module_of("helm") / "go.mod").read_text())
    assert match, "go.mod names helm.sh/helm/v3"
    return match[1]
