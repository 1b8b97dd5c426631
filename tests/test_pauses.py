"""The tool that stops random processes of a command: all of them, for moments, and none for good."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import uuid
from pathlib import Path

from tests.polling import until
from tools.pauses import MARK, Pauses, main

MINE = uuid.uuid4().hex
SLEEPS = [sys.executable, "-c", "import time; time.sleep(1000)"]
DAEMON = [sys.executable, "-c", f"import subprocess; print(subprocess.Popen({SLEEPS}, stdout=subprocess.DEVNULL).pid)"]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_processes_of_the_command_are_stopped_for_moments_also_those_in_the_background() -> None:
    environment = {**os.environ, MARK: MINE}
    outsider = subprocess.Popen(SLEEPS)
    pid = int(subprocess.check_output(DAEMON, env=environment))
    pauses = Pauses(f"{MARK}={MINE}".encode(), random.Random(1), every_s=0.05, pause_s=0.01)
    try:
        pauses.look(time.monotonic())
        assert pauses.known == {pid}
        until(lambda: state_of(pid) == "T")
        pauses.look(time.monotonic() + 100)  # its pause is over, and the next one begins
        assert pauses.count == 2
        pauses.end()
        until(lambda: state_of(pid) != "T")
        assert state_of(outsider.pid) != "T"
    finally:
        for one in (pid, outsider.pid):
            os.kill(one, 9)
        outsider.wait()


def test_the_exit_code_is_the_commands() -> None:
    assert main(["--seed", "1", "--", sys.executable, "-c", "raise SystemExit(3)"]) == 3
