"""The process above each worker, run for real."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.local.workers import shim, shims
from tests.polling import TIMEOUT_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator


class Shim:
    """One shim on a directory; `within`: the command that runs it."""

    def __init__(self, directory: Path, within: tuple[str, ...] = ()) -> None:
        self.directory, self.within = directory, within
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *command: str, grace_period_s: float = 5.0, inherited: tuple[int, ...] = (), **spec: Any) -> None:
        content = {
            "command": command,
            "environment": {"PATH": os.environ["PATH"]},
            "working_directory": "/",
            "grace_period_s": grace_period_s,
            **spec,
        }
        (self.directory / "spec.json").write_text(json.dumps(content))
        self.process = self.spawn(inherited)

    def spawn(self, inherited: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        argv = [*self.within, sys.executable, "-I", "-S", shim.__file__, str(self.directory)]
        return subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True, pass_fds=inherited)

    def worker(self) -> int:
        """The worker's pid, once it runs."""
        return int(self.read("process.json")["pid"])

    def read(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        until(path.exists)
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    def log(self) -> str:
        return (self.directory / "log").read_text()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def a_shim(tmp_path: Path) -> Iterator[Shim]:
    made = Shim(tmp_path)
    yield made
    if made.process is not None:
        made.process.send_signal(signal.SIGUSR1)
        made.process.wait(TIMEOUT_S)


def test_the_exit_code_and_the_output_are_written_down(a_shim: Shim) -> None:
    a_shim.start("sh", "-c", "echo out; echo err >&2; exit 3")
    assert a_shim.read("exit.json")["code"] == 3
    assert sorted(a_shim.log().split()) == ["err", "out"]


def test_a_worker_ended_by_a_signal_has_the_shells_exit_code(a_shim: Shim) -> None:
    a_shim.start("sh", "-c", "kill -KILL $$")
    assert a_shim.read("exit.json")["code"] == 128 + signal.SIGKILL


def test_a_worker_id_never_runs_twice(a_shim: Shim) -> None:
    a_shim.start("sleep", "infinity")
    a_shim.worker()
    second = a_shim.spawn()
    assert second.wait(TIMEOUT_S) == shim.EXIT_LOCKED


def test_a_worker_that_has_ended_is_not_run_again(a_shim: Shim) -> None:
    a_shim.start("sh", "-c", "echo once")
    a_shim.read("exit.json")
    assert a_shim.process is not None
    a_shim.process.wait(TIMEOUT_S)
    assert a_shim.spawn().wait(TIMEOUT_S) == shim.EXIT_LOCKED
    assert a_shim.log() == "once\n"


def test_sigterm_reaches_the_workers_whole_group(a_shim: Shim) -> None:
    a_shim.start("sh", "-c", "sleep infinity & trap 'echo told; exit 5' TERM; echo ready; wait")
    until(lambda: (a_shim.directory / "log").exists() and "ready" in a_shim.log())
    a_shim.signal(signal.SIGTERM)
    assert a_shim.read("exit.json")["code"] == 5
    assert "told" in a_shim.log()


def test_a_worker_that_ignores_sigterm_is_killed_when_its_grace_period_is_over(a_shim: Shim) -> None:
    a_shim.start("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done", grace_period_s=0.3)
    until(lambda: (a_shim.directory / "log").exists() and "ready" in a_shim.log())
    begin = time.monotonic()
    a_shim.signal(signal.SIGTERM)
    assert a_shim.read("exit.json")["code"] == 128 + signal.SIGKILL
    assert time.monotonic() - begin >= 0.3


def test_what_a_worker_leaves_behind_is_ended_also_in_a_session_of_its_own(a_shim: Shim) -> None:
    a_shim.start("sh", "-c", "setsid sleep infinity & echo $!; sleep infinity & echo $!; sleep 0.1")
    a_shim.read("exit.json")
    assert [is_running(int(pid)) for pid in a_shim.log().split()] == [False, False]


def test_the_worker_dies_with_its_shim(a_shim: Shim) -> None:
    a_shim.start("sleep", "infinity")
    worker = a_shim.worker()
    a_shim.signal(signal.SIGKILL)
    until(lambda: not is_running(worker))
    assert not (a_shim.directory / "exit.json").exists()


@pytest.mark.parametrize(
    ("command", "code", "output"),
    [
        (("no-such-program",), shim.EXIT_NOT_FOUND, "No such file"),
        (("/etc/passwd",), shim.EXIT_CANNOT_EXECUTE, "Permission denied"),
    ],
)
def test_a_command_that_cannot_be_run_says_so_as_in_a_shell(
    a_shim: Shim, command: tuple[str, ...], code: int, output: str
) -> None:
    a_shim.start(*command)
    assert a_shim.read("exit.json")["code"] == code
    assert output in a_shim.log()


def test_a_missing_directory_is_named_in_the_log(a_shim: Shim) -> None:
    a_shim.start("true", working_directory="/no/such/directory")
    assert a_shim.read("exit.json")["code"] == shim.EXIT_NOT_FOUND
    assert "/no/such/directory" in a_shim.log()


def test_zombies_of_the_workers_descendants_are_collected(a_shim: Shim) -> None:
    a_shim.start("sh", "-c", "(sleep 0.05 & echo $!) & wait; sleep infinity")
    until(lambda: (a_shim.directory / "log").exists() and a_shim.log().strip() != "")
    orphan = int(a_shim.log())
    until(lambda: not Path(f"/proc/{orphan}").exists())


def test_nobody_else_can_read_the_log(a_shim: Shim) -> None:
    a_shim.start("true")
    a_shim.read("exit.json")
    assert (a_shim.directory / "log").stat().st_mode & 0o077 == 0


def test_a_worker_that_the_machine_ended_by_a_restart_ended_with_its_last_line(tmp_path: Path) -> None:
    identity = {"shim_pid": 1, "shim_start": 0, "boot_id": "an earlier one"}
    (tmp_path / "process.json").write_text(json.dumps(identity))
    assert shims.ended_at(tmp_path) is None
    (tmp_path / "log").write_text("epoch 3\n")
    os.utime(tmp_path / "log", (1000.0, 1000.0))
    assert shims.ended_at(tmp_path) == 1000.0
    (tmp_path / "process.json").write_text(json.dumps(identity | {"boot_id": shim.boot_id()}))
    assert shims.ended_at(tmp_path) is None


def test_the_locks_of_gpus_that_a_shim_inherits_are_not_its_workers(a_shim: Shim) -> None:
    with socket.socket(socket.AF_UNIX) as lock:
        a_shim.start("sleep", "infinity", inherited=(lock.fileno(),))
        process = Path(f"/proc/{a_shim.worker()}")
        until(lambda: (process / "comm").read_text() == "sleep\n")
        assert sorted(path.name for path in (process / "fd").iterdir()) == ["0", "1", "2"]
