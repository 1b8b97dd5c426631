"""The example of Ray Train, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


@pytest.mark.slow
@pytest.mark.xdist_group("ray-train")
def test_the_example_grows_and_shrinks_without_losing_an_epoch() -> None:
    ended = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.endswith("workers train") or "epochs:" in line]
    assert lines[:-1] == ["1 workers train", "2 workers train", "1 workers train"]
    assert int(lines[-1].removeprefix("epochs: ")) >= 80
