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
    from collections.abc import Mapping, Sequence

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
OF_ANOTHER_VERSION: Final = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
"""The programs that GPUQUOTA_KUBERNETES=v1.37.2 replaces; the others stay those of go.mod."""
NO_DEBUG_DATA: Final = "-gcflags=all=-dwarf=false"
"""An option of each build: the linker strips debug data, and the compiler takes a seventh more CPU to write it."""
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
            other = environment.get("GPUQUOTA_KUBERNETES", "")
            _build_version(target, other, environment) if other else _build(target)
    return target


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """One folder for each content of go.mod: a change of versions never mixes with what was."""
    content = hashlib.sha256((MODULE / "go.mod").read_bytes()).hexdigest()[:12]
    other = environment.get("GPUQUOTA_KUBERNETES", "")
    return cache_root(environment) / f"kubernetes-{content}{f'-{other}' if other else ''}"


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Outside the tree, for what takes minutes to make."""
    root = environment.get("GPUQUOTA_CACHE")
    return Path(root) if root else Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuquota"


def version() -> str:
    """The release of Kubernetes in go.mod, for example 'v1.36.3'."""
    match = re.search(r"^\s*k8s\.io/kubernetes (v\S+)", (MODULE / "go.mod").read_text(), re.MULTILINE)
    assert match, "go.mod names k8s.io/kubernetes"
    return match[1]


def provided_version(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the major and minor version of the programs that `provide` returns."""
    shown = subprocess.run([provide(environment) / "kube-apiserver", "--version"], capture_output=True, check=True)
    match = re.search(rb"v(\d+)\.(\d+)", shown.stdout)
    assert match, "kube-apiserver has a version"
    return int(match[1]), int(match[2])


def _found(environment: Mapping[str, str]) -> Path | None:
    # envtest's own archives hold three of the programs only, so KUBEBUILDER_ASSETS counts where it has all of them
    assets = environment.get("KUBEBUILDER_ASSETS")
    places = ([Path(assets)] if assets else []) + [cache_folder(environment)]
    return next((place for place in places if _complete(place)), None)


def _complete(folder: Path) -> bool:
    return all((folder / name).exists() for name in PROGRAMS)


def _build_version(target: Path, wanted: str, environment: Mapping[str, str]) -> None:
    """Build the control plane of another version of Kubernetes beside the other programs of go.mod."""
    if not re.fullmatch(r"v1\.\d+\.\d+", wanted):
        raise UnavailableError(f"GPUQUOTA_KUBERNETES is {wanted!r}, but it must be a version such as v1.37.2")
    others = provide({name: value for name, value in environment.items() if name != "GPUQUOTA_KUBERNETES"})
    module = target.with_name(f"{target.name}.module")
    shutil.rmtree(module, ignore_errors=True)
    shutil.copytree(MODULE, module)
    pinned = version().removeprefix("v1.").partition(".")[0]
    text = (module / "go.mod").read_text().replace(version(), wanted)
    staging = rf"(k8s\.io/\S+ )v0\.{pinned}\.\d+"  # k8s.io/api and its like follow the version of Kubernetes
    (module / "go.mod").write_text(re.sub(staging, rf"\g<1>{wanted.replace('v1.', 'v0.')}", text))
    _go(target, ["mod", "tidy", "-e"], module, "")
    packages = [f"k8s.io/kubernetes/cmd/{name}" for name in OF_ANOTHER_VERSION]
    _build(target, module, wanted, packages, others)
    shutil.rmtree(module)


def _build(
    target: Path,
    module: Path = MODULE,
    built_version: str = "",
    packages: Sequence[str] = ("tool",),
    others: Path | None = None,
) -> None:
    """Build the packages of the module, and link the programs that are not among them to those in `others`."""
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    flags = f"-s -w -X k8s.io/component-base/version.gitVersion={built_version or version()}"
    _go(target, ["install", "-buildvcs=false", NO_DEBUG_DATA, "-ldflags", flags, *packages], module, str(part))
    for name in PROGRAMS:
        if others is not None and not (part / name).exists():
            (part / name).symlink_to(others / name)
    part.rename(target)


def _go(target: Path, arguments: Sequence[str], module: Path, folder: str) -> None:
    log = target.with_name(f"{target.name}.log")
    with log.open("a") as output:
        done = subprocess.run(
            ["go", *arguments],
            cwd=module,
            env={**os.environ, "GOBIN": folder},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        raise UnavailableError(f"the control plane did not build; {log} shows why")


if __name__ == "__main__":  # with the standard library only: CI builds while it installs everything else
    provide()
