"""What a cluster learns of the error that ends a script: the exit code, and a line in ELASTIC_ERROR_FILE."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import sys
from elastic_runtime import errors
from elastic_runtime.process.process_exit import report_errors
report_errors(sys.argv[1])
{}
"""


@pytest.mark.parametrize(
    ("last", "code", "line"),
    [
        ("raise errors.LoopError('two\\nlines')", 2, "LoopError: two lines"),
        ("raise errors.ModelMismatchError('x')", 1, "ModelMismatchError: x"),
        ("raise ValueError", 1, "ValueError"),
        ("raise ValueError('x' * 5000)", 1, f"ValueError: {'x' * 988}"),
        ("sys.exit(3)", 3, None),
        ("", 0, None),
    ],
)
def test_the_error_that_ends_the_script_is_reported(tmp_path: Path, last: str, code: int, line: str | None) -> None:
    file = tmp_path / "error"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(last), file],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert (file.read_text() if file.exists() else None) == line
    assert ("Traceback" in done.stderr) is (line is not None)


def test_a_file_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    script = SCRIPT.format("raise errors.LoopError('x')")
    arguments: list[str | Path] = [sys.executable, "-c", script, tmp_path / "no" / "folder"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "elastic_runtime.errors.LoopError: x")
