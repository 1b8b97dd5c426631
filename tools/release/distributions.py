"""Sdist and wheel of the two distributions, built by hatchling from a copy of the sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Final

from kfp_gpuquota.version import __version__

REPOSITORY: Final = Path(__file__).parents[2]
RUNTIME: Final = "elastic-runtime"
SERVER: Final = "kfp-gpuquota"
_RUNTIME_EXTRAS: Final = ("torch", "accelerate", "transformers")
_DEVELOPMENT_EXTRAS: Final = ("dev", "quickstart")
_IGNORED: Final = shutil.ignore_patterns("__pycache__", "*.pyc")
_RUNTIME_README: Final = """\
# elastic-runtime

Elastic training for PyTorch: a job's number of workers changes between two steps, no step is lost, and no sample is
trained twice. It needs PyTorch and nothing else. [kfp-gpuquota](https://github.com/kfp-gpuquota/kfp-gpuquota) decides
how many GPUs a job has; the same script also runs alone and under `torchrun`.

    job = elastic_runtime.init(global_batch_size=512, max_batch_per_gpu=64)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
"""


class BuildError(Exception):
    """A distribution could not be built; the message has the output of hatchling."""


def build(target: Path, epoch: int) -> list[Path]:
    """Build all distributions into `target`, with `epoch` (seconds since 1970) as the time of all files."""
    built = []
    for name, package in ((RUNTIME, "elastic_runtime"), (SERVER, "kfp_gpuquota")):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / name
            _copy(source, name, package)
            built += _hatchling(source, target, epoch)
    return sorted(built)


def requirement_files(target: Path) -> list[Path]:
    """Copy what pip is given with --require-hashes before a wheel is installed, and return the files."""
    found = sorted((REPOSITORY / "images" / "requirements").glob("*.txt"))
    return [Path(shutil.copy(one, target / f"requirements-{one.name}")) for one in found if one.stem != "build"]


def project(name: str) -> dict[str, Any]:
    """Return the pyproject.toml of a distribution: the tree's, with its part of the extras and one package."""
    whole = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    about: dict[str, Any] = whole["project"]
    del about["dynamic"]
    about |= {"name": name, "version": __version__}
    extras = about.pop("optional-dependencies")
    if name == RUNTIME:
        about["description"] = "Elastic training for PyTorch, which needs nothing but PyTorch"
        about["keywords"] = ["pytorch", "elastic", "training", "distributed", "kubeflow"]
        del about["scripts"]
        about["optional-dependencies"] = {extra: extras[extra] for extra in _RUNTIME_EXTRAS}
    else:
        about["dependencies"] = [f"{RUNTIME}=={__version__}"]
        about["optional-dependencies"] = {
            extra: wanted for extra, wanted in extras.items() if extra not in _DEVELOPMENT_EXTRAS
        }
    package = "elastic_runtime" if name == RUNTIME else "kfp_gpuquota"
    hatch = {"build": {"targets": {"wheel": {"packages": [package]}}}}
    return {"build-system": whole["build-system"], "project": about, "tool": {"hatch": hatch}}


def _copy(source: Path, name: str, package: str) -> None:
    shutil.copytree(REPOSITORY / package, source / package, ignore=_IGNORED)
    shutil.copyfile(REPOSITORY / "LICENSE", source / "LICENSE")
    readme = _RUNTIME_README if name == RUNTIME else (REPOSITORY / "README.md").read_text()
    (source / "README.md").write_text(readme)
    (source / "pyproject.toml").write_text("\n".join(_toml(project(name), "")))


def _toml(table: dict[str, Any], path: str) -> list[str]:
    """Return the lines of a table. Strings, lists of strings and tables only: JSON writes these as TOML does."""
    values = [f"{json.dumps(key)} = {json.dumps(one)}" for key, one in table.items() if not isinstance(one, dict)]
    lines = [f"[{path}]", *values, ""] if values else []
    for key, one in table.items():
        if isinstance(one, dict):
            lines += _toml(one, f"{path}.{json.dumps(key)}" if path else json.dumps(key))
    return lines


def _hatchling(source: Path, target: Path, epoch: int) -> list[Path]:
    before = set(target.iterdir())
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(target.resolve())],
        cwd=source,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BuildError(f"{source.name} was not built: {done.stdout}{done.stderr}")
    return sorted(set(target.iterdir()) - before)
