"""The fork server of the tests: what it starts is a process as any other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.polling import TIMEOUT_S
from tools.devcluster import processes

forked.preload("tests.test_forked")


def report(arguments: list[str]) -> int:
    sys.stdout.write(f"{arguments} {dict(os.environ)} {Path.cwd()}")
    sys.stderr.write("done")
    return 3


def parent(arguments: list[str]) -> None:
    sys.stdout.write(f"{os.getppid()}")


SHARING = """
import pathlib, sys
from tests import forked, test_forked

forked.share(pathlib.Path(sys.argv[1]))
input()
print(forked.run(test_forked.parent).stdout, flush=True)
input()
"""


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


def test_processes_share_one_server_which_exits_with_the_last_of_them(tmp_path: Path) -> None:
    servers = []
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-c", SHARING, str(tmp_path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        users = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(2)]  # type: ignore[call-overload]
        for user in users:  # the first one, which starts the server, has ended when the second one needs it
            user.stdin.write("\n")
            servers.append(int(user.stdout.readline()))
            user.stdin.write("\n")
            assert user.wait() == 0
    assert servers[0] == servers[1]
    assert processes.await_end(servers[0], TIMEOUT_S)


def run(*command: str, **more: Any) -> tuple[int, str]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, **more)
    return done.returncode, done.stdout


def test_a_script_has_its_arguments_directory_environment_and_exit_code(
    forked_python: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("NAME = __name__")
    script = tmp_path / "script.py"
    script.write_text(
        "import beside, os, sys; print(beside.NAME, __name__, sys.argv, os.getcwd(), os.environ['A']); sys.exit(7)"
    )
    code, output = run(*forked_python, str(script), "b", cwd=tmp_path, env={**os.environ, "A": "1"})
    assert (code, output) == (7, f"beside __main__ {[str(script), 'b']} {tmp_path} 1\n")


def test_code_and_modules_run_as_with_the_interpreter(forked_python: tuple[str, ...]) -> None:
    failing = (*forked_python, "-c", "import sys; print(sys.argv, flush=True); sys.exit('no')", "a")
    assert run(*failing, stderr=subprocess.STDOUT) == (1, "['-c', 'a']\nno\n")
    assert run(*forked_python, "-m", "tests.polling") == (0, "")
    assert run(*forked_python, "-c", "raise ValueError", stderr=subprocess.DEVNULL) == (1, "")


def test_a_script_ends_by_the_signal_that_its_process_gets(forked_python: tuple[str, ...]) -> None:
    code = "import signal, sys, threading; signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); "
    code += "print(1, flush=True); threading.Event().wait()"  # input() may swallow what a handler raises
    for number, expected in ((signal.SIGTERM, 9), (signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen(
            [*forked_python, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"1\n"
            process.send_signal(number)
            assert process.stdout.read() == b""  # closed by the script: it has ended too
            assert process.wait() == expected
    assert run(*forked_python, "-c", "import os; os.kill(os.getpid(), 9)")[0] == -signal.SIGKILL
