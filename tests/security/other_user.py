"""Programs of another user of this machine: the tests run as root, and drop to a user that has nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from pathlib import Path

NOBODY = 65534

_DROP = f"""
# Imported before root's rights are given up: the library may lie where only root may read.
import encodings.idna, os, socket, sys, time
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
"""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python program of the other user; standard library only."""
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _DROP + script, *map(str, arguments)],
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(script: str, *arguments: object) -> str:
    """What it printed; it must end by itself."""
    program = start(script, *arguments)
    return program.communicate(timeout=TIMEOUT_S)[0].strip()


def open_to_everybody(path: Path) -> None:
    """Let every user pass the directories above `path`, which pytest makes private."""
    for parent in path.parents:
        if parent.stat().st_uid == os.geteuid() and parent != parent.parent:
            parent.chmod(parent.stat().st_mode | 0o055)
