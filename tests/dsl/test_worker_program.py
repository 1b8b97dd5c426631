"""The source of the workers' program: formatted, vetted, and its own tests, which have a clock of their own."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.kubernetes.conftest import skip_or_fail
from tools import worker_program


@pytest.mark.parametrize("check", ["gofmt -l .", "go vet .", "go test ."])
def test_the_workers_program_is_in_order(check: str) -> None:
    if shutil.which("go") is None:
        skip_or_fail("there is no Go")
    done = subprocess.run(check.split(), cwd=worker_program.SOURCE, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, "FAIL" in done.stdout) == (0, "", False), done.stdout
    assert check.startswith("go ") or not done.stdout, "these files are not formatted"
