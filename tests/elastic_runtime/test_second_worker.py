"""How a rehearsal starts its own command a second time."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_runtime.errors import UsageError
from elastic_runtime.rehearsal.second_worker import start_again
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from pathlib import Path


def test_it_is_the_same_command_with_another_environment_and_its_output_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, sys; print(os.environ['REHEARSED'], sys.argv, sys.stdin.read()); print('no', file=sys.stderr)"
    monkeypatch.setattr(sys, "orig_argv", ["python", "-S", "-c", code, "a"])
    process = start_again({**os.environ, "REHEARSED": "join:x"}, tmp_path / "output")
    process.stdin.close()  # type: ignore[attr-defined]
    assert process.wait(TIMEOUT_S) == 0
    assert sorted((tmp_path / "output").read_text().splitlines()) == ["join:x ['-c', 'a'] ", "no"]


def test_an_interactive_session_is_told_to_save_a_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(UsageError, match="ELASTIC_REHEARSE=1 python FILE"):
        start_again({}, tmp_path / "output")
    assert not (tmp_path / "output").exists()


STARTING = """
import sys
from pathlib import Path
from elastic_runtime.errors import UsageError
from elastic_runtime.rehearsal.second_worker import start_again
try:
    start_again({}, Path("output"))
except UsageError as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize(
    ("arguments", "given", "why"),
    [
        ((), STARTING, "read from standard input"),
        (("-",), STARTING, "read from standard input"),
        (("-m", "pdb", "script.py"), "continue\nquit\n", "pdb would wait for commands"),
    ],
)
def test_a_command_that_reads_its_script_or_commands_from_standard_input_is_refused(
    arguments: tuple[str, ...], given: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(STARTING)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=tmp_path, input=given, stdout=subprocess.PIPE, text=True, check=True)
    assert why in done.stdout
    assert not (tmp_path / "output").exists()
