"""Runs a command while random processes of it are stopped for moments, as on a busy machine: `make paused CASES=...`.

A machine that many share does not make everything slower alike: one program waits for its turn while another goes on.
So a test fails here that asserts what is only soon true after what it waited for, or that has too short a time
limit. Each process of the command, and of what it starts in the background, is stopped by SIGSTOP at times of a Poisson
process; what was stopped by somebody else is left alone.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

MARK = "GPUQUOTA_PAUSES"
NOT_STOPPED = {"ELASTIC_STOPPED_S": "60"}  # else a training kills a worker that a signal has stopped for half a second
LOOKS_EVERY_S = 0.05
LONGEST_S = 4.0


def main(arguments: list[str] | None = None) -> int:
    """Run the command to its end; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.pauses", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--every", type=float, default=5.0, help="mean seconds between two pauses of a process (5)")
    parser.add_argument("--pause", type=float, default=0.7, help="mean seconds of a pause (0.7)")
    parser.add_argument("--seed", type=int, default=None, help="of the random numbers")
    parser.add_argument("--only", default="", help="a regular expression: only processes whose command line has it")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND [ARGUMENT ...]")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("give a command after --")
    mark = uuid.uuid4().hex
    drawn = random.Random(options.seed)  # noqa: S311
    pauses = Pauses(f"{MARK}={mark}".encode(), drawn, options.every, options.pause, options.only)
    with subprocess.Popen(command, env={**os.environ, **NOT_STOPPED, MARK: mark}) as process:
        try:
            while process.poll() is None:
                pauses.look(time.monotonic())
                time.sleep(LOOKS_EVERY_S)
        finally:
            pauses.end()
    sys.stderr.write(f"{pauses.count} pauses of {len(pauses.known)} processes\n")
    return process.returncode


class Pauses:
    """Who is stopped, and until when. Times are of `time.monotonic`."""

    def __init__(self, mark: bytes, drawn: random.Random, every_s: float, pause_s: float, only: str = "") -> None:
        self._mark, self._random, self._every_s, self._pause_s = mark, drawn, every_s, pause_s
        self._only = re.compile(only.encode())
        self._stopped: dict[int, float] = {}
        self.known: set[int] = set()
        self.count = 0

    def look(self, now: float) -> None:
        """Let go on whose time is over, and stop others."""
        for pid in [pid for pid, until in self._stopped.items() if until <= now]:
            self._continue(pid)
        for pid in self._processes():
            if self._random.random() < LOOKS_EVERY_S / self._every_s and pid not in self._stopped and not _stopped(pid):
                self._stop(pid, now)

    def end(self) -> None:
        """Let all go on."""
        for pid in list(self._stopped):
            self._continue(pid)

    def _processes(self) -> list[int]:
        found = []
        for folder in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                marked = self._mark in (folder / "environ").read_bytes().split(b"\0")
                if marked and self._only.search((folder / "cmdline").read_bytes()):
                    found.append(int(folder.name))
        self.known.update(found)
        return found

    def _stop(self, pid: int, now: float) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGSTOP)
            self._stopped[pid] = now + min(self._random.expovariate(1 / self._pause_s), LONGEST_S)
            self.count += 1

    def _continue(self, pid: int) -> None:
        del self._stopped[pid]
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGCONT)


def _stopped(pid: int) -> bool:
    """Return whether it is stopped already, or has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "TtZX"


if __name__ == "__main__":
    sys.exit(main())
