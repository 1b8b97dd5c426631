"""The training function of docs/guides/trainer.md, run as it is written there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.polling import TIMEOUT_S

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "trainer.md"


def test_the_function_of_the_guide_trains(tmp_path: Path) -> None:
    (function, *_) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(f"{function}\n\ntrain()\nprint('trained')\n")
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.stdout.endswith("trained\n"), done.stderr
