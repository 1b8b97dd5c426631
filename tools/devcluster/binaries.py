"""The programs of a control plane: found, or built once from their published Go modules into a cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

MODULE: Final = Path(__file__).with_name("go")
PROGRAMS: Final = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
    "kubelet",
    "kwok",
)
ON_A_NODE: Final = ("containerd", "ctr", "runc", "ip", "busybox")
PACKAGES: Final = "containerd runc containernetworking-plugins busybox-static iproute2"
PLUGINS: Final = Path("/usr/lib/cni")


class UnavailableError(Exception):
    """This machine cannot run the request; the message names what it lacks, in one line."""


def missing(environment: Mapping[str, str] = os.environ, *, kubelet: bool = False) -> str:
    """What this machine lacks for a devcluster, in one line; "" when nothing."""
    if _found(environment) is None and shutil.which("go") is None:
        return "a Kubernetes control plane is built with Go once: install Go 1.26 or newer, or set KUBEBUILDER_ASSETS"
    if not kubelet:
        return ""
    if os.geteuid() != 0:
        return "a kubelet with real containers needs root"
    if shutil.which("go") is None:
        return "a program in a kubelet's containers is built with Go: install Go 1.26 or newer"
    absent = [name for name in ON_A_NODE if shutil.which(name) is None]
    if absent or not PLUGINS.is_dir():
        return f"a kubelet with real containers needs: apt-get install {PACKAGES}"
    return ""


def built(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `provide` will answer at once."""
    return _found(environment) is not None


def provide(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder with all of `PROGRAMS`; the first call on a machine builds them, in minutes.

    Raises UnavailableError where they are neither there nor can be built.
    """
    if (found := _found(environment)) is not None:
        return found
    if lack := missing(environment):
        raise UnavailableError(lack)
    target = cache_folder(environment)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the second of two builders finds what the first has built
        if not _complete(target):
            _build(target)
    return target


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """One folder for each content of go.mod: a change of versions never mixes with what was."""
    return cache_root(environment) / f"kubernetes-{hashlib.sha256((MODULE / 'go.mod').read_bytes()).hexdigest()[:12]}"


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Outside the tree, for what takes minutes to make."""
    root = environment.get("GPUQUOTA_CACHE")
    return Path(root) if root else Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuquota"


def version() -> str:
    """The release of Kubernetes in go.mod, for example 'v1.36.3'."""
    match = re.search(r"^\s*k8s\.io/kubernetes (v\S+)", (MODULE / "go.mod").read_text(), re.MULTILINE)
    assert match, "go.mod names k8s.io/kubernetes"
    return match[1]


def _found(environment: Mapping[str, str]) -> Path | None:
    # envtest's own archives hold three of the programs only, so KUBEBUILDER_ASSETS counts where it has all of them
    assets = environment.get("KUBEBUILDER_ASSETS")
    places = ([Path(assets)] if assets else []) + [cache_folder(environment)]
    return next((place for place in places if _complete(place)), None)


def _complete(folder: Path) -> bool:
    return all((folder / name).exists() for name in PROGRAMS)


def _build(target: Path) -> None:
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    flags = f"-s -w -X k8s.io/component-base/version.gitVersion={version()}"
    log = target.with_name(f"{target.name}.log")
    with log.open("w") as output:
        built = subprocess.run(
            ["go", "install", "-buildvcs=false", "-ldflags", flags, "tool"],
            cwd=MODULE,
            env={**os.environ, "GOBIN": str(part)},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if built.returncode:
        raise UnavailableError(f"the control plane did not build; {log} shows why")
    part.rename(target)


if __name__ == "__main__":  # with the standard library only: CI builds while it installs everything else
    provide()
