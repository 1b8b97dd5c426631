"""What a test may have left behind."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def threads_and_sockets() -> set[object]:
    """Those of this process: thread objects, and sockets as /proc names them."""
    sockets = {target for target in _targets(Path("/proc/self/fd")) if target.startswith("socket:")}
    return {*threading.enumerate(), *sockets}


def processes_at(directory: Path) -> list[str]:
    """Pids of other processes that have a file in it open: workers, and their children, write their output there."""
    inside = f"{directory}/"
    return [
        process.name
        for process in Path("/proc").iterdir()
        if process.name.isdecimal()
        and int(process.name) != os.getpid()
        and any(target.startswith(inside) for target in _targets(process / "fd"))
    ]


def _targets(directory: Path) -> Iterator[str]:
    """What the links in a directory of /proc lead to."""
    with contextlib.suppress(OSError):
        for link in directory.iterdir():
            with contextlib.suppress(OSError):
                yield str(link.readlink())
