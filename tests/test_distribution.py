"""How tests are distributed to workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from tests.distribution import Distribution

def pytest_configure(config):
    config.pluginmanager.register(Distribution())
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


@pytest.mark.slow
def test_a_group_is_run_by_one_worker_while_the_other_runs_the_rest(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:schemathesis", "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "12 passed" in done.stdout, done.stdout + done.stderr
    (grouped,) = (path.name.removeprefix("grouped-") for path in tmp_path.glob("grouped-*"))
    assert {path.name.removeprefix("alone-") for path in tmp_path.glob("alone-*")} - {grouped}
