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
        ("sys.excepthook = lambda *_: None; raise errors.LoopError('replaced')", 2, "LoopError: replaced"),
        ("import os\nif os.fork() == 0: raise ValueError\nos.wait()", 0, None),
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
    assert ("Traceback" in done.stderr) is ("raise" in last and "replaced" not in last)


def test_a_file_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    script = SCRIPT.format("raise errors.LoopError('x')")
    arguments: list[str | Path] = [sys.executable, "-c", script, tmp_path / "no" / "folder"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "elastic_runtime.errors.LoopError: x")


def test_a_worker_that_leaves_writes_what_it_has_left_in_open_files(tmp_path: Path) -> None:
    script = (
        "from elastic_runtime.process.process_exit import leave\nfile = open('log', 'w'); file.write('all'); leave(3)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, (tmp_path / "log").read_text()) == (3, "all")
