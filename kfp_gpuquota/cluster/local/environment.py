"""What a job of the embedded cluster takes over from the environment of the process that submits it."""

from __future__ import annotations

import os
from typing import Final

# What a command needs of the shell it was typed in to find the same programs and libraries. Not everything: the shell
# may hold secrets that do not belong into a job's record.
FORWARDED: Final = (
    "PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL",
)  # fmt: skip


def forwarded_environment() -> dict[str, str]:
    """Return what a job takes over from this process's environment."""
    return {name: os.environ[name] for name in FORWARDED if name in os.environ}
