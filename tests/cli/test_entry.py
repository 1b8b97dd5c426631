"""The program where its dependencies are missing: a Python without site-packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.polling import TIMEOUT_S

ROOT = Path(__file__).parents[2]


def bare(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_a_missing_extra_is_one_sentence_with_the_command_that_helps() -> None:
    done = bare("from kfp_gpuquota.cli.entry import main; main()")
    assert done.returncode == 1
    assert done.stderr == "Error: typer and msgspec are not installed; run: pip install 'kfp-gpuquota[cluster]'\n"


def test_both_packages_can_be_imported_with_nothing_installed() -> None:
    done = bare("import kfp_gpuquota, elastic_runtime; print(len(elastic_runtime.__all__) > 3)")
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
