"""This project's own images, built from their Dockerfiles: no daemon, and no registry of images.

`buildah` builds them. What they start FROM is made here of Debian's packages under the name that the Dockerfiles give:
a Debian with its Python, in place of Docker's image of that name, which a test's machine cannot pull. All is kept in a
cache outside the tree; the base is made once, in half a minute, the images themselves when the sources have changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.version import __version__
from tools.devcluster.binaries import UnavailableError, cache_root
from tools.release import debian

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

REPOSITORY: Final = Path(__file__).parents[2]
PACKAGES: Final = "buildah mmdebstrap"
_SOURCES: Final = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "kfp_gpuquota",
    "elastic_runtime",
    "images",
)
_SEARCHED: Final = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The packages come from where this machine's pip finds them, by this machine's certificates.
_PIP: Final = ("/etc/pip.conf", "/etc/ssl/certs")


def missing() -> str:
    """What this machine lacks to build images, in one line; "" when nothing."""
    if os.geteuid() != 0:
        return "building images here needs root"
    absent = [name for name in PACKAGES.split() if shutil.which(name) is None]
    return f"building images needs: apt-get install {PACKAGES}" if absent else ""


def base_name() -> str:
    """What the Dockerfiles of programs in Python start from."""
    text = (REPOSITORY / "images" / "controller" / "Dockerfile").read_text()
    (found,) = re.findall(r"^ARG BASE=(\S+)", text, re.MULTILINE)
    return f"docker.io/library/{found}"


def provide(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The archive (for `ctr images import`) of images/NAME, or of what they start from ("base").

    Raises UnavailableError where this machine cannot build it, BuildError where apt's sources cannot be read.
    """
    if lack := missing():
        raise UnavailableError(lack)
    folder = cache_root(environment) / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the second of two builders finds what the first has built
        archive = folder / f"{name}-{_digest(name)}.tar"
        if not archive.exists():
            for old in folder.glob(f"{name}-*.tar"):
                old.unlink()
            _build(name, archive, folder)
        return archive


def _digest(name: str) -> str:
    """Return a digest of everything in the image."""
    found = hashlib.sha256(f"{debian.RELEASE} {base_name()}".encode())
    for path in _files() if name != "base" else ():
        found.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _files() -> Iterable[Path]:
    for source in _SOURCES:
        path = REPOSITORY / source
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (one for one in found if one.is_file() and "__pycache__" not in one.parts)


def _build(name: str, archive: Path, folder: Path) -> None:
    store = _Store(folder / "store")
    if not store.has(base_name()):
        store.make_base()
    tag = base_name()
    if name != "base":
        tag = f"docker.io/kfp-gpuquota/{name}:{__version__}"
        given = [f"--volume={place}:{place}:ro" for place in _PIP if Path(place).exists()]
        if name == "launcher":  # this machine's Go, where the image has it
            given += [
                f"--volume={_run('go', 'env', 'GOROOT').strip()}:/usr/local/go:ro",
                f"--volume={_run('go', 'env', 'GOCACHE').strip()}:/root/.cache/go-build",  # it has the standard library
                f"--build-arg=GO={base_name()}",
            ]
        dockerfile = REPOSITORY / "images" / name / "Dockerfile"
        store.run(
            "bud", "--pull-never", "--isolation=chroot", *given, f"--file={dockerfile}", f"--tag={tag}", str(REPOSITORY)
        )
    part = archive.with_suffix(".part")
    part.unlink(missing_ok=True)
    store.run("push", tag, f"docker-archive:{part}:{tag}")
    store.run("rmi", "--prune")
    part.rename(archive)


class _Store:
    """Where buildah keeps its layers."""

    def __init__(self, folder: Path) -> None:
        self._options = (f"--root={folder}", f"--runroot={folder}-run")

    def run(self, *arguments: str) -> str:
        """Return a command's standard output. Raises UnavailableError with its output."""
        return _run("buildah", *self._options, *arguments)

    def has(self, tag: str) -> bool:
        """Whether the image is there."""
        return tag in self.run("images", "--format={{.Name}}:{{.Tag}}").split()

    def make_base(self) -> None:
        """Debian's smallest system with Python, and nothing of this machine."""
        with tempfile.TemporaryDirectory() as made:
            system = Path(made) / "system"
            packages = "python3,python3-venv,ca-certificates"
            options = ("--quiet", "--variant=minbase", f"--include={packages}")
            _run("mmdebstrap", *options, debian.RELEASE, str(system), *debian.host_sources())
            (system / "usr" / "bin" / "python").symlink_to("python3")
            container = self.run("from", "scratch").strip()
            self.run("add", "--quiet", container, str(system), "/")
            self.run("config", f"--env={_SEARCHED}", container)
            self.run("commit", "--quiet", "--rm", container, base_name())


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        output = (done.stdout + done.stderr).decode(errors="replace").strip()
        raise UnavailableError(f"{command[0]} failed ({done.returncode}): {output[-3000:]}")
    return done.stdout.decode()
