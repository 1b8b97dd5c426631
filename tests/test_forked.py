"""The fork server of the tests: what it starts is a process as any other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

forked.preload("tests.test_forked")


def report(arguments: list[str]) -> int:
    sys.stdout.write(f"{arguments} {dict(os.environ)} {Path.cwd()}")
    sys.stderr.write("done")
    return 3


def stay(arguments: list[str]) -> None:
    os.write(int(arguments[-1]), b"here")
    signal.pause()


def test_a_program_has_its_arguments_environment_directory_output_and_exit_code(tmp_path: Path) -> None:
    ended = forked.run(report, "a", "b", environment={"X": "1"}, cwd=tmp_path)
    assert ended == forked.Completed(3, f"['a', 'b'] {{'X': '1'}} {tmp_path}", "done")


def test_a_program_is_ended_by_signals_and_has_an_inherited_file() -> None:
    read, write = os.pipe()
    with Path(os.devnull).open("wb") as nowhere:
        program = forked.Program(stay, stdout=nowhere.fileno(), stderr=nowhere.fileno(), inherited=write)
    os.close(write)
    with os.fdopen(read, "rb", buffering=0) as answer:
        assert answer.read(4) == b"here"
        assert program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0)
        program.terminate()
        assert (program.wait(), program.poll(), program.returncode) == (-signal.SIGTERM,) * 3
        assert answer.read() == b""
