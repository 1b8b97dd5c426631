"""The memory of this machine's devices and its use by processes: from NVML, or from simulated devices."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kfp_gpuquota.errors import DeviceError
from kfp_gpuquota.fractions.processes import identify, read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_MIB = 1 << 20


class Use(NamedTuple):
    """A process's use of a device. `start`: its start time if the device records it, to detect a stale entry."""

    device: str
    pid: int
    used_mib: int
    start: int | None = None


class DeviceMemory(Protocol):
    """The devices of one node. `totals`: MiB by device. Both raise DeviceError where the driver does not answer."""

    def totals(self) -> dict[str, int]:
        """MiB of each device."""

    def uses(self) -> list[Use]:
        """Return the current use of each device by processes."""


def simulate(directory: Path, total_mib: int) -> None:
    """Make a simulated device, or give the one that is there another size."""
    (directory / "processes").mkdir(parents=True, exist_ok=True, mode=0o700)
    (directory / "total_mib").write_text(str(total_mib))


class SimulatedMemory:
    """Simulated devices: {name: directory} (docs/fractions.md)."""

    def __init__(self, directories: Mapping[str, Path]) -> None:
        self._directories = dict(directories)

    def totals(self) -> dict[str, int]:
        """MiB of each device."""
        return {name: int((path / "total_mib").read_text()) for name, path in self._directories.items()}

    def uses(self) -> list[Use]:
        """All entries, also stale ones of processes that have ended."""
        return [use for name, path in self._directories.items() for use in _entries(name, path)]


def simulated_mib(directory: Path) -> int | None:
    """Return the memory that processes use of a simulated device; None of one without entries."""
    try:
        uses = list(_entries("", directory))
        return sum(use.used_mib for use in uses if (one := identify(use.pid)) is not None and one.start == use.start)
    except (OSError, ValueError):  # an entry that is being written
        return None


def _entries(device: str, directory: Path) -> Iterator[Use]:
    processes = f"{directory}/processes"
    for entry in os.listdir(processes):  # noqa: PTH208 (names are all that is needed)
        pid, _, start = entry.partition("-")
        if start.isdecimal():
            yield Use(device, int(pid), int(read(f"{processes}/{entry}") or 0), int(start))


class NvmlMemory:
    """GPUs by NVML, named by their UUID. Untested without a GPU: NVML has no simulator."""

    def __init__(self) -> None:
        import pynvml  # noqa: PLC0415 (only where there is a driver)

        self._nvml: Any = pynvml
        with self._translated_errors():
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            self._handles = {_text(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}

    def totals(self) -> dict[str, int]:
        """MiB of each GPU."""
        with self._translated_errors():
            return {
                uuid: self._nvml.nvmlDeviceGetMemoryInfo(handle).total // _MIB for uuid, handle in self._handles.items()
            }

    def uses(self) -> list[Use]:
        """Compute processes; a process of another pid namespace shows the number that this namespace gives it."""
        with self._translated_errors():
            return [
                Use(uuid, running.pid, (running.usedGpuMemory or 0) // _MIB)
                for uuid, handle in self._handles.items()
                for running in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            ]

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            raise DeviceError(f"NVML does not answer: {error}; see whether nvidia-smi works on this node") from error


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
