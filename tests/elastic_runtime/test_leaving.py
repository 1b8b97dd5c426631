"""A worker that was let go ends at once, but not before the script's own last words."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import atexit, sys
atexit.register(print, "registered before")
import torch
from elastic_runtime.leaving import hasten_exit
atexit.register(print, "registered after")

class AfterAtexit:
    def __del__(self):
        sys.__stdout__.write("torn down\\n")

kept = AfterAtexit()
try:
    hasten_exit(143)
    raise SystemExit(143)
finally:
    print("finally")
"""

FAILING = """
from elastic_runtime.leaving import hasten_exit
try:
    hasten_exit(0)
    raise SystemExit(0)
finally:
    raise RuntimeError("the last words failed")
"""


def test_everything_a_script_relies_on_runs_and_the_teardown_does_not() -> None:
    done = run(SCRIPT)
    assert done.stdout.splitlines() == ["finally", "registered after", "registered before"]
    assert (done.stderr, done.returncode) == ("", 143)


def test_an_error_of_the_script_while_it_leaves_is_told() -> None:
    done = run(FAILING)
    assert "RuntimeError: the last words failed" in done.stderr
    assert done.returncode == 1


def run(script: str) -> subprocess.CompletedProcess[str]:
    """The script, to its end."""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
