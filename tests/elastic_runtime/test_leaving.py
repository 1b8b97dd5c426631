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
    hasten_exit()
    raise SystemExit(0)
finally:
    print("finally")
"""


def test_everything_a_script_relies_on_runs_and_the_teardown_does_not() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["finally", "registered after", "registered before"]
    assert done.stderr == ""
