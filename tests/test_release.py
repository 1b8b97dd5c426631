"""`make release`: two distributions without a file in common, the same bytes each time, and files that install."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
import zipfile
from typing import TYPE_CHECKING

import pytest
import yaml  # type: ignore[import-untyped]
from packaging.requirements import Requirement
from packaging.version import Version

from kfp_gpuquota.version import __version__
from tests.kubernetes.conftest import skip_or_fail
from tests.kubernetes.test_chart import run_helm
from tools.devcluster import UnavailableError
from tools.release import distributions, manifests, requirements, sbom
from tools.release.__main__ import release

if TYPE_CHECKING:
    from pathlib import Path

EPOCH = 1_790_000_000
ABSENT = ("torch", "msgspec", "numpy", "aiohttp", "typer")


def bare_python(folder: Path) -> Path:
    """An interpreter that has no packages."""
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def install(python: Path, index: Path, name: str) -> None:
    """Install a distribution and what it requires, from a folder and from nowhere else."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--no-index", f"--find-links={index}", name], check=True)


def run(python: Path, program: str) -> str:
    done = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_each_distribution_has_one_package_and_its_own_extras() -> None:
    server, runtime = (distributions.project(name)["project"] for name in (distributions.SERVER, distributions.RUNTIME))
    assert server["dependencies"] == [f"elastic-runtime=={__version__}"]
    assert runtime["dependencies"] == []
    assert "scripts" not in runtime
    assert runtime["optional-dependencies"].keys() == {"torch", "accelerate", "transformers"}
    assert "dev" not in server["optional-dependencies"]
    assert server["version"] == runtime["version"] == __version__
    wanted = sbom.dependencies(distributions.SERVER)
    assert {"aiohttp", "kfp", "torch"} <= wanted.keys()
    assert not [name for name, version in wanted.items() if version == "NOASSERTION"], "constraints.txt names each"


def test_the_charts_archive_has_the_same_bytes_each_time_and_renders(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = (manifests.package(tmp_path / name, EPOCH) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    objects = yaml.safe_load_all(run_helm("template", "gpuquota", str(first)))
    assert sum(one is not None for one in objects) > 50


@pytest.mark.parametrize("name", requirements.NAMES)
def test_a_file_of_requirements_has_each_package_that_is_needed_by_version_and_hash(name: str) -> None:
    text = (requirements.FOLDER / f"{name}.txt").read_text()
    versions = requirements.pinned(text)
    assert all("--hash=sha256:" in part for part in text.split("==")[1:])
    assert "://" not in text
    for line in requirements.needs(name):
        wanted = Requirement(line)
        assert wanted.specifier.contains(versions[wanted.name]), line
    constraints = (distributions.REPOSITORY / "constraints.txt").read_text()
    tested = {name.lower(): version for name, version in requirements.pinned(constraints).items()}
    same = {name: version for name, version in versions.items() if name not in requirements.HELD_BACK}
    assert same == {name: tested.get(name, version) for name, version in same.items()}
    assert "kfp" not in versions
    if "kubernetes" in versions:
        assert Version(versions["kubernetes"]) > Version(tested["kubernetes"]), "only kfp holds it back"


@pytest.mark.parametrize("path", sorted((distributions.REPOSITORY / "images").glob("*/Dockerfile")), ids=str)
def test_a_dockerfile_installs_by_hash_alone_and_starts_from_an_image_that_its_builder_can_name(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert {"${BASE}"} <= set(bases) <= {"${BASE}", "${GO}"}, "each is an argument"
    for command in re.findall(r"pip (?:install|wheel)[^&\n]*", text):
        assert "--require-hashes -r" in command or "--no-deps" in command, command
        if command.rstrip().endswith(" ."):
            assert "--no-build-isolation" in command, "pip would download what builds it, whichever version that is"


def test_a_release_has_the_requirements_of_an_administrators_command_line(tmp_path: Path) -> None:
    copied = {path.name for path in distributions.requirement_files(tmp_path)}
    assert copied == {f"requirements-{name}.txt" for name in requirements.EXTRAS}


def test_install_files_name_images_by_digest_where_there_is_one(tmp_path: Path) -> None:
    digests = {"controller": f"sha256:{'1' * 64}", "reservation": f"sha256:{'2' * 64}"}
    for path in manifests.render(tmp_path, "registry.example/x", "v1", digests):
        text = path.read_text()
        assert f"registry.example/x/controller@{digests['controller']}" in text
        assert f"registry.example/x/reservation@{digests['reservation']}" in text
        assert "x/controller:v1" not in text
    (tagged, _) = manifests.render(tmp_path, "registry.example/x", "v1")
    assert "registry.example/x/controller:v1" in tagged.read_text()


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(distributions.BuildError, match="has other files"):
        release(tmp_path, "registry.example", "v1", EPOCH)
    assert (tmp_path / "mine.txt").exists()


@pytest.mark.slow
def test_a_release_is_built_twice_with_the_same_bytes_and_installs_into_bare_environments(tmp_path: Path) -> None:
    try:
        first, second = (release(tmp_path / name, "registry.example/q", "v1", EPOCH) for name in ("a", "b"))
    except UnavailableError as error:
        skip_or_fail(error)
    assert [path.name for path in first] == [path.name for path in second]
    assert len(first) == 12
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name
    check_sums(tmp_path / "a")
    check_wheels(tmp_path / "a", tmp_path)
    for overlay in manifests.OVERLAYS:
        text = (tmp_path / "a" / f"install-{overlay}.yaml").read_text()
        assert "registry.example/q/controller:v1" in text
        assert "kfp-gpuquota/controller" not in text
    document = json.loads((tmp_path / "a" / f"kfp-gpuquota-{__version__}.spdx.json").read_text())
    assert document["spdxVersion"] == "SPDX-2.3"
    assert {"kfp-gpuquota", "elastic-runtime", "torch"} <= {one["name"] for one in document["packages"]}
    named = {one["SPDXID"] for one in (*document["packages"], *document["files"])} | {"SPDXRef-DOCUMENT"}
    assert {one[end] for one in document["relationships"] for end in ("spdxElementId", "relatedSpdxElement")} <= named


def check_sums(folder: Path) -> None:
    done = subprocess.run(["sha256sum", "--check", sbom.SUMS], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def check_wheels(index: Path, tmp_path: Path) -> None:
    wheels = {path.name.partition("-")[0]: set(zipfile.ZipFile(path).namelist()) for path in index.glob("*.whl")}
    assert not wheels["kfp_gpuquota"] & wheels["elastic_runtime"]
    for package, names in wheels.items():
        sources = {
            f"{package}/{path.relative_to(distributions.REPOSITORY / package)}"
            for path in (distributions.REPOSITORY / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert {name for name in names if ".dist-info/" not in name} == sources
        assert any(name.endswith("/LICENSE") for name in names)
    training = bare_python(tmp_path / "training")
    install(training, index, "elastic-runtime")
    assert run(training, "import elastic_runtime; print(elastic_runtime.init.__name__)") == "init"
    assert run(training, "import importlib.util as u; print(u.find_spec('kfp_gpuquota'))") == "None"
    server = bare_python(tmp_path / "server")
    install(server, index, "kfp-gpuquota")
    assert run(server, "import kfp_gpuquota.errors, elastic_runtime; print(1)") == "1"
    assert run(server, "from kfp_gpuquota.cli.entry import main; import sys; sys.argv = ['x', '--help']; main()")
    for name in ABSENT:
        assert run(server, f"import importlib.util as u; print(u.find_spec('{name}'))") == "None"
