"""The file of the audit log: a change's line is on the disk before the change is made.

Invariant: whatever the moment at which the daemon is killed or the disk becomes full, no change is made without a line.
`begin` writes the line with status 0 and syncs it; the answer replaces it in the same place, so that it needs no space.
Spaces inside the line make room for it. Blocks beyond the file's end are reserved for changes that stop something:
they can be made on a full disk, others are refused there.

Rejected: two lines for each change, since readers would have to join them; and a reservation of space alone, since a
daemon that is killed between the change and its line leaves none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.errors import StateFileError
from kfp_gpuquota.server.audit import AuditEntry, Writing

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES: Final = 10 << 20
KEPT_FILES: Final = 5
RESERVED_BYTES: Final = 256 << 10
"""Enough for the lines of 400 changes that stop something."""
ANSWER_BYTES: Final = 384
"""For the status and the sentence of a refusal, which is cut to fit."""
CUT: Final = "…"
KEEP_SIZE: Final = 1
UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

_libc = ctypes.CDLL(None, use_errno=True)


class AuditLog:
    """Appends to `path`, mode 0600; older entries are in path.1 to path.5, 10 MiB each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open_lines = 0
        self._file, self._end = _opened(path)

    def write(self, entry: AuditEntry) -> None:
        """Append an entry; it is left out if the disk is full."""
        with contextlib.suppress(OSError):
            self._append(_line(entry), reserved=False)

    def begin(self, entry: AuditEntry, writing: Writing) -> int:
        """Write the line of a change that is made next; return its position. Raises StateFileError."""
        line = _line(entry, room=ANSWER_BYTES)
        try:
            position = self._append(line, reserved=writing is Writing.RESERVED)
            os.fdatasync(self._file)
        except OSError as error:
            raise StateFileError(
                f"the audit log {self._path} cannot be written: {error.strerror}; nothing was changed: free some space"
            ) from error
        self._open_lines += 1
        return position

    def finish(self, position: int, begun: AuditEntry, answered: AuditEntry) -> None:
        """Write the answer into the line at that position."""
        self._open_lines -= 1
        with contextlib.suppress(OSError):  # a file system that copies on write may need space for it
            os.pwrite(self._file, _fitted(answered, len(_line(begun, room=ANSWER_BYTES))), position)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _append(self, line: bytes, *, reserved: bool) -> int:
        self._rotate_if_due()
        position = self._end
        try:
            _reserve(self._file, position, len(line) + RESERVED_BYTES)
        except OSError:
            if not reserved:
                raise
        if os.pwrite(self._file, line, position) < len(line):
            os.ftruncate(self._file, position)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end += len(line)
        return position

    def _rotate_if_due(self) -> None:
        """Begin another file, unless a line of this one has no answer yet."""
        if self._end < MAX_BYTES or self._open_lines:
            return
        following = self._path.with_name(f"{self._path.name}.new")
        try:
            file, end = _opened(following)
        except OSError:
            return  # no inode is left: this file goes on
        for number in range(KEPT_FILES - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                self._numbered(number).replace(self._numbered(number + 1))
        self._path.replace(self._numbered(1))
        following.replace(self._path)
        os.close(self._file)
        self._file, self._end = file, end

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _opened(path: Path) -> tuple[int, int]:
    """Open the file, with its reserved space if there is some; return its descriptor and where it ends."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.fchmod(file, 0o600)
    end = os.fstat(file).st_size
    if end and os.pread(file, 1, end - 1) != b"\n":  # a line that a kill cut off: its change was not made
        end = os.pread(file, end, 0).rfind(b"\n") + 1
        os.ftruncate(file, end)
    with contextlib.suppress(OSError):
        _reserve(file, end, RESERVED_BYTES)
    return file, end


def _reserve(file: int, start: int, size: int) -> None:
    """Reserve blocks beyond the end, which stays. Raises OSError if the disk is full.

    A file system that has no such operation has no reserved space: writing raises the error there.
    """
    arguments = (ctypes.c_int(file), ctypes.c_int(KEEP_SIZE), ctypes.c_long(start), ctypes.c_long(size))
    if _libc.fallocate(*arguments) and (code := ctypes.get_errno()) not in UNSUPPORTED:
        raise OSError(code, os.strerror(code))


def _line(entry: AuditEntry, room: int = 0) -> bytes:
    return msgspec.json.encode(entry)[:-1] + b" " * room + b"}\n"


def _fitted(entry: AuditEntry, size: int) -> bytes:
    """Return the entry's line with exactly `size` bytes; its error is cut to fit."""
    excess = len(_line(entry)) - size
    if excess > 0:
        error = entry.error[: -(excess + len(CUT.encode()))] + CUT
        entry = msgspec.structs.replace(entry, error=error)
    return _line(entry, room=size - len(_line(entry)))
