"""Python packages of an image: wheels for its architecture, unpacked as pip would on a machine of that architecture."""

from __future__ import annotations

import configparser
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tools.release import requirements
from tools.release.debian import PYTHON_VERSION, Package
from tools.release.distributions import BuildError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from tools.release.layer import Layer

MACHINES: Final = requirements.MACHINES
_VERSION: Final = ".".join(str(part) for part in PYTHON_VERSION)


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment in an image. `prefix` is its folder, without the slash of the root."""

    prefix: str

    @property
    def packages(self) -> str:
        """The folder of its packages."""
        return f"{self.prefix}/lib/python{_VERSION}/site-packages"

    def create(self, layer: Layer) -> None:
        """Add an environment of Debian's Python to a layer."""
        layer.add(
            f"{self.prefix}/pyvenv.cfg",
            f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {_VERSION}\n",
        )
        for name in ("python", "python3", f"python{_VERSION}"):
            layer.link(f"{self.prefix}/bin/{name}", f"/usr/bin/python{_VERSION}")

    def install(self, wheels: Iterable[Path], layer: Layer) -> list[Package]:
        """Add the files of wheels, with their programs; return the packages."""
        return sorted(self._unpack(path, layer) for path in wheels)

    def _unpack(self, path: Path, layer: Layer) -> Package:
        name, version, *_ = path.name.split("-")
        with zipfile.ZipFile(path) as wheel:
            for info in wheel.infolist():
                if not info.is_dir():
                    executable = bool((info.external_attr >> 16) & 0o111)
                    content = wheel.read(info)
                    layer.add(*self._installed(info.filename, content, executable=executable))
            listed = f"{name}-{version}.dist-info/entry_points.txt"
            programs = wheel.read(listed).decode() if listed in wheel.namelist() else ""
        for program, target in _console_scripts(programs):
            layer.add(f"{self.prefix}/bin/{program}", self._program(target), 0o755)
        return Package("pypi", name.lower().replace("_", "-"), version)

    def _installed(self, path: str, content: bytes, *, executable: bool) -> tuple[str, bytes, int]:
        """Return where a wheel's file belongs, what is in it there, and its mode."""
        mode = 0o755 if executable else 0o644
        first, _, rest = path.partition("/")
        if not first.endswith(".data"):
            return f"{self.packages}/{path}", content, mode
        scheme, _, inner = rest.partition("/")
        if scheme == "scripts":
            if content.startswith(b"#!python"):
                content = f"#!/{self.prefix}/bin/python\n".encode() + content.partition(b"\n")[2]
            return f"{self.prefix}/bin/{inner}", content, 0o755
        folders = {"purelib": self.packages, "platlib": self.packages, "data": self.prefix}
        if scheme not in folders:
            raise BuildError(f"{path}: a wheel with files of the scheme {scheme!r} cannot be unpacked into an image")
        return f"{folders[scheme]}/{inner}", content, mode

    def _program(self, target: str) -> str:
        module, _, function = target.partition(":")
        return f"#!/{self.prefix}/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"


def download(wheel: Path, extra: str, architecture: str, folder: Path) -> list[Path]:
    """Download what a wheel with an extra requires for Debian's Python, in the versions and with the hashes of
    `images/requirements`; return these wheels and ours, which lie beside `wheel`.

    Raises BuildError with pip's output, and under a Python of another version, because pip evaluates a requirement's
    conditions for the interpreter that runs it.
    """
    if sys.version_info[:2] != PYTHON_VERSION:
        raise BuildError(
            f"images contain Python {_VERSION} and are built with it: make release PYTHON=python{_VERSION}"
        )
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"),
        *(*requirements.platform_options(_VERSION, architecture), f"--dest={folder}"),
        *("--require-hashes", f"--requirement={requirements.path_of(extra)}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"the packages of an image for {architecture} were not downloaded: {done.stderr[-3000:]}")
    return sorted([*folder.glob("*.whl"), *wheel.parent.glob("*.whl")])


def _console_scripts(text: str) -> Iterator[tuple[str, str]]:
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names of programs have their case
    parser.read_string(text)
    for name, target in parser.items("console_scripts") if parser.has_section("console_scripts") else ():
        yield name, target.split("[")[0].strip()
