"""A script of the zoo under ELASTIC_REHEARSE=1, as a program for `tests.forked`: NAME REDUCTION."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from elastic_runtime.rehearsal import second_worker
from tests.elastic_runtime.zoo import catalogue, shards, silent
from tests.elastic_runtime.zoo.generated.recipes import script_named
from tests.forked import Completed, preload, run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["catalogue", "rehearse", "shards", "silent"]

preload(
    "tests.elastic_runtime.zoo.rehearsing",
    "elastic_runtime.loop.job",
    "elastic_runtime.rehearsal.observer",
    "torch.distributed",
    "torch._dynamo",
)


def rehearse(name: str, reduction: str, directory: Path) -> Completed:
    """Rehearse it, and return the exit code and the output."""
    environment = {**os.environ, "ELASTIC_REHEARSE": "1", "TMPDIR": str(directory)}
    return run(main, name, reduction, environment=environment, cwd=directory)


def main(arguments: list[str]) -> None:
    """Be the first worker, and fork the second one where it would be started."""
    name, reduction = arguments
    atexit._clear()
    second_worker.starter = lambda environment, output: Forked(environment, output, name, reduction)
    train(name, reduction)


def train(name: str, reduction: str) -> None:
    """Run the script, and end as an interpreter does."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    try:
        script_named(name).body(reduction=reduction)
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001  (whatever ends a script)
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()
        if code := getattr(getattr(sys, "last_traceback", None), "code", 0):  # set by `process_exit.end_with`
            sys.stdout.flush()
            os._exit(code)


class Forked:
    """The second worker: the script from its beginning, in a fork of this process."""

    def __init__(self, environment: Mapping[str, str], output: Path, name: str, reduction: str) -> None:
        self.code: int | None = None
        held, self._kept = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._kept)
            os.dup2(held, 0)
            self._be_it(environment, output, name, reduction)
        os.close(held)

    def _be_it(self, environment: Mapping[str, str], output: Path, name: str, reduction: str) -> None:
        code = 1
        try:
            os.environ.update(environment)
            file = os.open(output, os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            atexit._clear()
            sys.excepthook = sys.__excepthook__
            train(name, reduction)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        """See subprocess.Popen."""
        if self.code is None:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        """See subprocess.Popen."""
        end = time.monotonic() + (timeout or 0.0)
        while self.poll() is None:
            if timeout is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        """See subprocess.Popen."""
        if self.poll() is None:
            os.kill(self.pid, 9)
