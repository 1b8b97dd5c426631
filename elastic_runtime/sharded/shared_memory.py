"""Memory that other processes of the machine map, and that stays with them when the process that made it is killed.

A segment is a memfd: it has no name, so nothing is left behind when its last user has ended. Another process opens it
as /proc/PID/fd/N, which the kernel allows to processes of the same user, or root, in one PID namespace. Random numbers
at its beginning show that it is the right one, since a pid means another process in another namespace.

Rejected: files in /dev/shm, which outlive a killed job, and of which a container has 64 MiB by default.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAME = "elastic-copies"
_HEAD = 64
_NONE = -1


class Address(NamedTuple):
    """Where another process finds a segment; `token`: the random numbers that it begins with."""

    pid: int = _NONE
    descriptor: int = _NONE
    nbytes: int = 0
    token: int = 0


class Segment:
    """`body`: its memory, as bytes. `version`: four numbers that its owner writes beside what they belong to."""

    def __init__(self, address: Address, mapped: mmap.mmap) -> None:
        self.address = address
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        self._head = whole[:_HEAD].view(torch.int64)
        self.body = whole[_HEAD : _HEAD + address.nbytes]

    @property
    def token(self) -> int:
        """Return the random number in the memory itself."""
        return int(self._head[0])

    @property
    def version(self) -> tuple[int, ...]:
        """Return what `mark` has written last."""
        return tuple(self._head[1:5].tolist())

    def mark(self, version: Sequence[int]) -> None:
        """Write the version of what the memory holds."""
        self._head[1:5] = torch.tensor(version)


def new_segment(nbytes: int) -> Segment | None:
    """Return a new segment, of zeros; None where the system has no such memory."""
    try:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        return None
    try:
        os.ftruncate(descriptor, _HEAD + nbytes)
        address = Address(os.getpid(), descriptor, nbytes, 1 + secrets.randbits(62))
        segment = Segment(address, mmap.mmap(descriptor, _HEAD + nbytes))
    except OSError:
        os.close(descriptor)
        return None
    segment._head[0] = address.token  # noqa: SLF001
    weakref.finalize(segment, os.close, descriptor)
    return segment


def open_segment(address: Address) -> Segment | None:
    """Return a segment of another process; None where this process cannot open it."""
    with contextlib.suppress(OSError, ValueError):
        path = Path(f"/proc/{address.pid}/fd/{address.descriptor}")
        if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):
            return None  # of another PID namespace: to open a device or a pipe may have effects
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size == _HEAD + address.nbytes:
                found = Segment(address, mmap.mmap(descriptor, _HEAD + address.nbytes))
                return found if found.token == address.token else None
        finally:
            os.close(descriptor)
    return None
