"""Device memory where there is no device: allocations that succeed, fail and are seen, as on a GPU.

A directory per device (docs/fractions.md). Several processes share it; the kernel's lock orders them, and what a
process held is free when it ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class SimulatedOutOfMemoryError(MemoryError):
    """The device has too little free memory for an allocation."""


class SimulatedDevice:
    """One device as one process uses it. Amounts are MiB."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.total_mib = int((self.directory / "total_mib").read_text())
        self._entry = self.directory / "processes" / f"{os.getpid()}-{_start_time(os.getpid())}"

    @property
    def used_mib(self) -> int:
        """Return the MiB that this process holds."""
        return _held(self._entry)

    @property
    def free_mib(self) -> int:
        """The memory that no process holds."""
        with self._locked():
            return self._free()

    def allocate(self, mib: int) -> None:
        """Allocate `mib` more. Raises SimulatedOutOfMemoryError, without allocating, if the device is full."""
        with self._locked():
            if mib > (free := self._free()):
                raise SimulatedOutOfMemoryError(
                    f"cannot allocate {mib} MiB: {free} of {self.total_mib} MiB are free on {self.directory.name}"
                )
            self._write(_held(self._entry) + mib)

    def release(self, mib: int) -> None:
        """Release `mib`, at most what is held."""
        with self._locked():
            self._write(max(0, _held(self._entry) - mib))

    def _free(self) -> int:
        return self.total_mib - sum(held for _, held in entries(self.directory))

    def _write(self, mib: int) -> None:
        self._entry.parent.mkdir(exist_ok=True)
        temporary = self._entry.with_suffix(".new")
        temporary.write_text(str(mib))
        temporary.replace(self._entry)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def create_device(directory: str | os.PathLike[str], total_mib: int) -> SimulatedDevice:
    """Make a device, or open the one that is there."""
    path = Path(directory)
    (path / "processes").mkdir(parents=True, exist_ok=True)
    (path / "total_mib").write_text(str(total_mib))
    return SimulatedDevice(path)


def entries(directory: Path) -> Iterator[tuple[int, int]]:
    """(pid, MiB) of each process that lives; what ended processes left is removed."""
    for entry in (directory / "processes").iterdir():
        pid, _, start = entry.name.partition("-")
        if not start.isdecimal():
            continue
        if str(_start_time(int(pid))) == start:
            yield int(pid), _held(entry)
        else:
            entry.unlink(missing_ok=True)


def _held(entry: Path) -> int:
    try:
        return int(entry.read_text())
    except FileNotFoundError:
        return 0


def _start_time(pid: int) -> int:
    """Return the start time in clock ticks since boot; 0 if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in {"Z", "X"} else int(fields[19])
