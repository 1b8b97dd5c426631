"""The two files by which an agent and a workload agree on a limit (docs/fractions.md).

The workload can write to the directory, and on Kubernetes the agent is root: so the agent follows no link there, opens
only regular files, and reads two numbers.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_FILE: Final = "limit.json"
USAGE_FILE: Final = "usage.json"
LONGEST: Final = 4096
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class LimitMessage(msgspec.Struct, frozen=True):
    """The limit of a workload on each of its devices, in MiB."""

    limit_mib: int


class UsageMessage(msgspec.Struct, frozen=True):
    """A workload's report: the limit that it follows now, and the memory it wants (None: all up to its limit)."""

    follows_mib: int | None = None
    wanted_mib: int | None = None


def write_limit(directory: Path, limit_mib: int) -> None:
    """Write the workload's limit. Raises OSError."""
    temporary = f"{LIMIT_FILE}.new"
    within = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=within)
        new = os.open(temporary, _NEW, 0o644, dir_fd=within)
        try:
            os.fchmod(new, 0o644)  # independent of the umask: the workload is another user
            os.write(new, msgspec.json.encode(LimitMessage(limit_mib)))
        finally:
            os.close(new)
        os.replace(temporary, LIMIT_FILE, src_dir_fd=within, dst_dir_fd=within)
    finally:
        os.close(within)


def read_limit(directory: Path) -> int | None:
    """Return the limit that was written last; None where none was."""
    message = _read(f"{directory}/{LIMIT_FILE}", LimitMessage)
    return None if message is None else message.limit_mib


def read_usage(directory: Path) -> UsageMessage | None:
    """Return the workload's report; None for a workload that does not listen or writes an invalid file."""
    return _read(f"{directory}/{USAGE_FILE}", UsageMessage)


def _read(path: str, kind: type[_Struct]) -> _Struct | None:
    try:
        return msgspec.json.decode(content, type=kind) if (content := _content(path)) else None
    except msgspec.DecodeError:
        return None


def _content(path: str) -> bytes:
    """Return the start of a regular file; empty for anything else, such as a link, or a pipe, which could block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, LONGEST) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(descriptor)
