"""What a test may have left behind."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


def threads_and_sockets(ports: Collection[int]) -> set[object]:
    """Those of this process: thread objects, and TCP sockets with one of these ports at an end, as /proc names them.

    Other sockets are those of fixtures that live longer, such as a control plane's clients, which connect at any time.
    """
    own = {target for target in _targets(Path("/proc/self/fd")) if target.startswith("socket:")}
    return {*threading.enumerate(), *(own & set(_sockets_at(ports)))}


def _sockets_at(ports: Collection[int]) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if {int(end.rpartition(":")[2], 16) for end in fields[1:3]} & set(ports):
                yield f"socket:[{fields[9]}]"


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
