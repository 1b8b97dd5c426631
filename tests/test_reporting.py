"""How failures arrive from the workers of pytest-xdist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = """
from tests.reporting import Reporting

def pytest_configure(config):
    config.pluginmanager.register(Reporting())

def pytest_runtest_logreport(report):
    if report.nodeid.endswith("test_internal") and "PYTEST_XDIST_WORKER" in __import__("os").environ:
        raise ValueError("a defect of a plugin")
"""


def run(tmp_path: Path, tests: str) -> str:
    """Run tests in one worker, and return what is printed."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(tests)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:schemathesis", "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def test_a_failure_with_text_that_has_no_utf_8_arrives(tmp_path: Path) -> None:
    printed = run(tmp_path, "def test_hostile():\n    assert '\\ud800 hostile' == ''\n\ndef test_after():\n    pass\n")
    assert "1 failed, 1 passed" in printed, printed
    assert "\\ud800 hostile" in printed


PARSING = """
import ast, gc

def test_lost():
    gc.set_threshold(10)
    gc.callbacks.append(lambda *_: (lambda: (lambda: ast.parse("1"))())())
    assert [] == ["a difference"]

def test_after():
    gc.callbacks.clear()

""" + "\n".join(f"value_{number} = [{number}, ({number},)]" for number in range(200))


def test_a_failure_arrives_though_a_finalizer_parses_meanwhile(tmp_path: Path) -> None:
    printed = run(tmp_path, PARSING)
    assert "1 failed, 1 passed" in printed, printed
    assert "a difference" in printed


def test_an_internal_error_is_printed_last(tmp_path: Path) -> None:
    printed = run(tmp_path, "def test_internal():\n    pass\n")
    assert "a defect of a plugin" in printed.rpartition("internal error:")[2], printed
