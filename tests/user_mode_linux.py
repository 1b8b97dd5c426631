"""A kernel of its own, for tests of what this machine's kernel or its init may not give: user-mode Linux."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

KERNEL = "linux.uml"
REQUIRED = "GPUQUOTA_REQUIRE_UML"
RUN_S = 240.0


def boot(directory: Path, init: str, *, access: str = "rw") -> str:
    """Return what a kernel prints whose first process is the shell script `init`, on the files of this machine."""
    program = shutil.which(KERNEL)
    if program is None:
        lack = f"there is no {KERNEL}; it is in Debian's user-mode-linux"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(lack)
        pytest.skip(lack)
    script, console = directory / "init", directory / "console"
    script.write_text(f"#!/bin/sh\n{init}")
    script.chmod(0o755)
    options = ["mem=1G", "root=/dev/root", "rootfstype=hostfs", access, "con=null", "con0=null,fd:1", f"init={script}"]
    with console.open("wb") as output:
        kernel = subprocess.Popen(
            [program, *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "HOME": str(directory), "TMPDIR": str(directory)},
        )
        try:
            kernel.wait(RUN_S)
        finally:
            if kernel.poll() is None:
                os.killpg(kernel.pid, signal.SIGKILL)
                kernel.wait()
    return console.read_text(errors="replace")
