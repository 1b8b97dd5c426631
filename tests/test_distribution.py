"""How tests are distributed to workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distribution import mixed

CONFTEST = """
from tests.distribution import Distribution

def pytest_configure(config):
    config.pluginmanager.register(Distribution(config))
"""

TESTS = """
import os, pathlib, pytest
from tests.polling import until

@pytest.mark.parametrize("number", range(6))
@pytest.mark.xdist_group("one")
def test_grouped(number):
    pathlib.Path(f"grouped-{os.getpid()}").touch()
    until(lambda: list(pathlib.Path().glob("alone-*")))

@pytest.mark.parametrize("number", range(6))
def test_alone(number):
    pathlib.Path(f"alone-{os.getpid()}").touch()
"""


BY_KIND = """
import os, pathlib, pytest
from tests.polling import until

@pytest.mark.parametrize("number", range(4))
def test_it(number):
    kind = pathlib.Path(__file__).parent.name
    with open(f"ran-{os.getpid()}", "a") as file:
        file.write(kind[0])
    until(lambda: len(list(pathlib.Path().glob("ran-*"))) == 2)
"""


def test_modules_of_all_folders_are_mixed_and_stay_whole_and_in_order() -> None:
    names = ["a/t1.py::x", "a/t1.py::y", "a/t2.py::x", "a/t3.py::x", "b/t1.py::x", "b/t2.py::C::x"]
    position = mixed(names)
    assert sorted(position, key=lambda module: position[module]) == [
        "a/t1.py", "b/t1.py", "a/t2.py", "b/t2.py", "a/t3.py"
    ]  # fmt: skip


@pytest.mark.slow
def test_a_group_is_run_by_one_worker_while_the_other_runs_the_rest(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    assert "12 passed" in two_workers(tmp_path)
    (grouped,) = (path.name.removeprefix("grouped-") for path in tmp_path.glob("grouped-*"))
    assert {path.name.removeprefix("alone-") for path in tmp_path.glob("alone-*")} - {grouped}


@pytest.mark.slow
def test_half_of_the_workers_begin_with_what_needs_a_control_plane(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for folder in ("tests/kubernetes", "tests/others"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"test_{folder[6:]}.py").write_text(BY_KIND)
    assert "8 passed" in two_workers(tmp_path)
    assert {path.read_text()[0] for path in tmp_path.glob("ran-*")} == {"k", "o"}


def two_workers(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:schemathesis", "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
