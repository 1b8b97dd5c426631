"""The two files by which an agent and a workload agree on a limit (docs/fractions.md).

The directory is the workload's to write in, and on Kubernetes the agent is root: it follows no link there, opens
nothing but regular files, and believes two numbers.
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


class Told(msgspec.Struct, frozen=True):
    """What a workload may use of each of its devices, in MiB."""

    limit_mib: int


class Heard(msgspec.Struct, frozen=True):
    """What a workload says: the limit that it follows now, and what it would like to use (None: all it may)."""

    follows_mib: int | None = None
    wanted_mib: int | None = None


def tell(directory: Path, limit_mib: int) -> None:
    """Replace the limit. Raises OSError."""
    temporary = f"{LIMIT_FILE}.new"
    within = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=within)
        new = os.open(temporary, _NEW, 0o644, dir_fd=within)
        try:
            os.fchmod(new, 0o644)  # whatever our umask: the workload is another user
            os.write(new, msgspec.json.encode(Told(limit_mib)))
        finally:
            os.close(new)
        os.replace(temporary, LIMIT_FILE, src_dir_fd=within, dst_dir_fd=within)
    finally:
        os.close(within)


def told(directory: Path) -> int | None:
    """The limit that stands; None where nothing was said."""
    said = _read(f"{directory}/{LIMIT_FILE}", Told)
    return None if said is None else said.limit_mib


def heard(directory: Path) -> Heard | None:
    """What the workload says; None for one that does not listen, or that writes what cannot be read."""
    return _read(f"{directory}/{USAGE_FILE}", Heard)


def _read(path: str, kind: type[_Struct]) -> _Struct | None:
    try:
        return msgspec.json.decode(content, type=kind) if (content := _content(path)) else None
    except msgspec.DecodeError:
        return None


def _content(path: str) -> bytes:
    """A regular file's beginning; empty for anything else, such as a link, or a pipe that would make us wait."""
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
