"""What is in each image of a release. images/*/Dockerfile describe the same, for those that build with an engine.

A node's agent, the web page and the membership service are programs of the controller's image.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.version import __version__
from tools import worker_program
from tools.release import debian, distributions, oci, wheels
from tools.release.debian import Package
from tools.release.layer import Layer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tools.release.layer import Blob

ARCHITECTURES: Final = ("amd64", "arm64")
NAMES: Final = ("controller", "launcher", "reservation")
HOME: Final = "https://github.com/kfp-gpuquota/kfp-gpuquota"

_USER: Final = f"{debian.USER}:{debian.USER}"
_SEARCHED: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CONTROLLER: Final = wheels.Environment("opt/gpuquota")
_LAUNCHER: Final = wheels.Environment("opt/gpuquota/venv")
_RUNTIME: Final = "opt/gpuquota/runtime"
_SETTINGS: Final = {
    "controller": oci.Settings(
        user=_USER,
        entrypoint=(f"/{_CONTROLLER.prefix}/bin/python", "-m", "kfp_gpuquota.cluster.kubernetes"),
        environment={"PATH": _SEARCHED, "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        ports=("8080", "8443", "8444"),
    ),
    "launcher": oci.Settings(
        user=_USER,
        entrypoint=(f"/{_LAUNCHER.prefix}/bin/python", "-m", "kfp_gpuquota.dsl.launcher"),
        environment={"PATH": f"/{_LAUNCHER.prefix}/bin:{_SEARCHED}", "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"},
    ),
    "reservation": oci.Settings(user=_USER, entrypoint=("sh",), environment={"PATH": _SEARCHED}),
}


@dataclass(frozen=True, slots=True)
class Built:
    """The archive of an image, the packages in it, and the digest by which a registry has it."""

    path: Path
    packages: frozenset[Package]
    name: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True)
class _Part:
    """The layers of an image for one architecture, the lowest first, and the packages in them."""

    layers: list[Blob]
    packages: list[Package]


def build(
    target: Path,
    registry: str,
    tag: str,
    epoch: int,
    architectures: Sequence[str] = ARCHITECTURES,
    sources: Sequence[str] | None = None,
) -> list[Built]:
    """Build all images into `target`, which has our wheels; `sources` are apt's lines, by default this machine's.

    Raises BuildError or UnavailableError where this machine cannot build them, and BuildError where something cannot be
    downloaded.
    """
    if lack := debian.missing():
        raise distributions.BuildError(lack)
    for architecture in architectures:
        worker_program.provide(architecture)  # before minutes of downloads: without Go it cannot be built
    listed = debian.host_sources() if sources is None else sources
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(architectures)) as pool:
        futures = [pool.submit(_parts, target, one, listed, Path(folder) / one, epoch) for one in architectures]
        parts = dict(zip(architectures, (future.result() for future in futures), strict=True))
    return [_write(target, name, f"{registry.rstrip('/')}/{name}:{tag}", parts, epoch) for name in NAMES]


def archive_name(name: str) -> str:
    """Return the name of an image's archive."""
    return f"kfp-gpuquota-{name}-{__version__}.oci.tar"


def _write(target: Path, name: str, reference: str, parts: Mapping[str, Mapping[str, _Part]], epoch: int) -> Built:
    path = target / archive_name(name)
    settings = _SETTINGS[name]
    about = oci.Settings(settings.user, settings.entrypoint, settings.environment, _labels(name), settings.ports)
    digest = oci.write(path, reference, about, {one: part[name].layers for one, part in parts.items()}, epoch)
    packages = frozenset(package for part in parts.values() for package in part[name].packages)
    return Built(path, packages, name, digest)


def _labels(name: str) -> dict[str, str]:
    labels = {"title": f"kfp-gpuquota {name}", "version": __version__, "source": HOME}
    if revision := _revision():
        labels["revision"] = revision
    return {f"org.opencontainers.image.{key}": value for key, value in labels.items()}


def _revision() -> str:
    if not shutil.which("git"):
        return ""
    asked = ["git", "-C", str(distributions.REPOSITORY), "rev-parse", "HEAD"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _parts(target: Path, architecture: str, sources: Sequence[str], folder: Path, epoch: int) -> dict[str, _Part]:
    """Return the parts of all images for an architecture."""
    folder.mkdir()
    wanted = [*debian.PYTHON, *debian.SHELL]
    downloaded = debian.download(wanted, architecture, sources, folder / "debian", epoch)
    python = _python(downloaded, epoch)
    controller = _program(target, "controller", _CONTROLLER, architecture, folder / "controller", epoch)
    launcher = _program(target, "kubernetes", _LAUNCHER, architecture, folder / "launcher", epoch)
    tools, tool_packages = downloaded.layer(debian.SHELL)
    debian.add_applets(tools)
    shell = _Part([tools.pack(epoch)], tool_packages)
    alone, alone_packages = downloaded.layer(("base-files", *debian.SHELL))
    debian.complete_system(alone)
    debian.add_applets(alone)
    return {
        "controller": _joined(python, controller),
        "launcher": _joined(python, shell, launcher),
        "reservation": _Part([alone.pack(epoch)], alone_packages),
    }


def _joined(*parts: _Part) -> _Part:
    return _Part([one for part in parts for one in part.layers], [one for part in parts for one in part.packages])


def _python(downloaded: debian.Downloaded, epoch: int) -> _Part:
    layer, packages = downloaded.layer(debian.PYTHON)
    debian.complete_system(layer)
    return _Part([layer.pack(epoch)], packages)


def _program(
    target: Path, extra: str, environment: wheels.Environment, architecture: str, folder: Path, epoch: int
) -> _Part:
    (wheel,) = target.glob("kfp_gpuquota-*.whl")
    layer = Layer()
    environment.create(layer)
    packages = environment.install(wheels.download(wheel, extra, architecture, folder), layer)
    if environment is _LAUNCHER:  # from where workers' pods copy the program, and elastic_runtime where they lack it
        _copy(layer, f"{environment.packages}/elastic_runtime", f"{_RUNTIME}/elastic_runtime")
        layer.add(worker_program.PATH, worker_program.provide(architecture).read_bytes(), 0o755)
        packages.append(Package("golang", "std", worker_program.version()))
    return _Part([layer.pack(epoch)], packages)


def _copy(layer: Layer, folder: str, target: str) -> None:
    for path, file in list(layer.files.items()):
        if path.startswith(f"{folder}/"):
            layer.files[f"{target}{path.removeprefix(folder)}"] = file
