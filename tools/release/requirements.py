"""The Python packages of the images, by version and hash: `python -m tools.release.requirements` writes them.

`images/requirements/NAME.txt` has each package that an image needs, that builds our wheel in a Dockerfile (`build`), or
that an administrator's command line needs (`admin`), with the hashes of the wheels for both architectures and for the
Pythons of the images: Debian's in a release, that of `python:3.12-slim` in the Dockerfiles. pip installs nothing else
(`--require-hashes`). Versions are those of constraints.txt, except of the client of Kubernetes: only kfp, which is in
none of them, holds it back.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Final

from tools.release.distributions import REPOSITORY, BuildError

FOLDER: Final = REPOSITORY / "images" / "requirements"
EXTRAS: Final = {"controller": ("controller",), "launcher": ("kubernetes",), "admin": ("cluster", "kubernetes")}
"""The extras of kfp-gpuquota that each file has."""
BUILD: Final = "build"
NAMES: Final = (*EXTRAS, BUILD)
PYTHONS: Final = ("3.11", "3.12")
MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
HELD_BACK: Final = frozenset({"kubernetes"})
_GLIBC: Final = (36, 35, 34, 31, 28, 27, 26, 24, 17)  # bookworm's is 2.36; pip does not deduce older ones


def path_of(extra: str) -> Path:
    """Return the file of the image that has this extra."""
    (name,) = [name for name, extras in EXTRAS.items() if extras == (extra,)]
    return FOLDER / f"{name}.txt"


def needs(name: str) -> list[str]:
    """Return what a file's packages are resolved from, as pyproject.toml has it."""
    whole = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    if name == BUILD:
        return list(whole["build-system"]["requires"])
    optional = whole["project"]["optional-dependencies"]
    return [line for extra in EXTRAS[name] for line in optional[extra]]


def pinned(text: str) -> dict[str, str]:
    """Return the versions of a file, by the package's name."""
    lines = (line.split()[0] for line in text.splitlines() if line and not line.startswith(("#", " ")))
    return dict(line.split("==") for line in lines)


def platform_options(python: str, architecture: str) -> list[str]:
    """Return pip's options for wheels of a Python on an architecture."""
    machine = MACHINES[architecture]
    platforms = [f"--platform=manylinux_2_{glibc}_{machine}" for glibc in _GLIBC]
    return [
        *("--only-binary=:all:", f"--python-version={python}", "--implementation=cp"),
        *(*platforms, f"--platform=manylinux2014_{machine}"),
    ]


def resolved(name: str) -> dict[str, str]:
    """Return the versions of a file's packages, by name. Raises BuildError."""
    kept = (line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line)
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("\n".join(line for line in kept if line.split("==")[0] not in HELD_BACK))
        found: dict[str, Any] = json.loads(
            _pip(
                *("install", "--dry-run", "--ignore-installed", "--quiet", "--report=-", f"--target={folder}/none"),
                *(*platform_options(PYTHONS[0], "amd64"), f"--constraint={constraints}"),
                *needs(name),
            )
        )
    return {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in found["install"]}


def hashes(versions: dict[str, str]) -> dict[str, set[str]]:
    """Return the SHA-256 of the wheels of all Pythons and architectures, by name. Raises BuildError."""
    found: dict[str, set[str]] = {name: set() for name in versions}
    for python in PYTHONS:
        for architecture in MACHINES:
            with tempfile.TemporaryDirectory() as folder:
                wanted = [f"{name}=={version}" for name, version in versions.items()]
                options = platform_options(python, architecture)
                _pip("download", "--quiet", "--no-deps", f"--dest={folder}", *options, *wanted)
                for wheel in Path(folder).glob("*.whl"):
                    name = wheel.name.split("-")[0].lower().replace("_", "-")
                    found[name].add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    return found


def write(name: str) -> None:
    """Write a file."""
    versions = {one.replace("_", "-"): version for one, version in sorted(resolved(name).items())}
    listed = hashes(versions)
    lines = [f"# The Python packages of {name}, by hash; written by: python -m tools.release.requirements"]
    for one, version in versions.items():
        lines.append(f"{one}=={version} " + " ".join(f"--hash=sha256:{each}" for each in sorted(listed[one])))
    (FOLDER / f"{name}.txt").write_text("\n".join(lines).replace(" --hash", " \\\n    --hash") + "\n")


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(done.stderr[-3000:])
    return done.stdout


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in NAMES:
        write(each)
