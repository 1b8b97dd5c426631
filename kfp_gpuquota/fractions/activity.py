"""How much this machine's devices were used: from NVML, or from simulated devices.

A device that was not measured is left out of an answer, and counts as used: MIG devices, a driver that does not answer.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kfp_gpuquota.fractions.devices import simulated_mib
from kfp_gpuquota.fractions.processes import read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SIMULATED_FILE = "used_percent"


class GpuUse(NamedTuple):
    """What one device did since the last call: whether anything, in which part of the time, and its memory now.

    `busy` is None if the figures may be those of another device of the same kind.
    """

    busy: bool | None
    percent: float
    used_mib: int | None = None


class DeviceActivity(Protocol):
    """The devices of one node."""

    def measure(self) -> dict[str, GpuUse]:
        """Return the use of each device that was measured since the last call."""


class SimulatedActivity:
    """Simulated devices: {name: directory}; a device is measured while its file `used_percent` has a number."""

    def __init__(self, directories: Mapping[str, Path]) -> None:
        self._directories = dict(directories)

    def measure(self) -> dict[str, GpuUse]:
        """Return of each measured device the number in its file, and the memory of its entries."""
        texts = {
            name: read(f"{path}/{SIMULATED_FILE}").decode(errors="replace") for name, path in self._directories.items()
        }
        percents = {name: float(text) for name, text in texts.items() if _is_number(text)}
        return {
            name: GpuUse(percent > 0, percent, simulated_mib(self._directories[name]))
            for name, percent in percents.items()
        }


class NvmlActivity:
    """GPUs by NVML, named by their UUID. Untested without a GPU: NVML has no simulator.

    It reads the samples that the driver has taken since the last call, six in a second: one utilization alone is that
    of the last moment, and a training that computes for a tenth of each second would often look unused.
    """

    def __init__(self) -> None:
        import pynvml  # noqa: PLC0415 (only where there is a driver)

        self._nvml: Any = pynvml
        self._handles: dict[str, Any] = {}
        self._read_until: dict[tuple[str, int], int] = {}
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            self._handles = {_text(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the UUIDs of all GPUs of this machine, in the order of its bus."""
        return tuple(self._handles)

    @property
    def alike(self) -> bool:
        """Return whether all GPUs of this machine are of one model."""
        with suppress(self._nvml.NVMLError):
            return len({_text(self._nvml.nvmlDeviceGetName(handle)) for handle in self._handles.values()}) == 1
        return False

    def measure(self) -> dict[str, GpuUse]:
        """Return of each measured GPU whether a kernel ran or memory was read or written, and for how long kernels."""
        found: dict[str, GpuUse] = {}
        for uuid, handle in self._handles.items():
            with suppress(self._nvml.NVMLError):
                kinds = (self._nvml.NVML_GPU_UTILIZATION_SAMPLES, self._nvml.NVML_MEMORY_UTILIZATION_SAMPLES)
                ran, moved = [self._samples(uuid, handle, kind) for kind in kinds]  # both are read
                found[uuid] = GpuUse(any(ran) or any(moved), sum(ran) / len(ran), self._used_mib(handle))
        return found

    def _used_mib(self, handle: Any) -> int | None:
        with suppress(self._nvml.NVMLError):
            return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used) >> 20
        return None

    def _samples(self, uuid: str, handle: Any, kind: int) -> list[int]:
        """Return the new samples in percent. Raises NVMLError if there are none."""
        since = self._read_until.get((uuid, kind), 0)
        _, samples = self._nvml.nvmlDeviceGetSamples(handle, kind, since)
        new = [sample for sample in samples if sample.timeStamp > since]
        if not new:
            raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_FOUND)
        self._read_until[uuid, kind] = max(sample.timeStamp for sample in new)
        return [sample.sampleValue.uiVal for sample in new]


def busy(measured: Mapping[str, GpuUse]) -> dict[str, bool]:
    """Return of each measured device whether it was used, if that is certain."""
    return {name: use.busy for name, use in measured.items() if use.busy is not None}


def use_of(visible: str, devices: Sequence[str], used: Mapping[str, bool], *, bus_order: bool) -> bool | None:
    """Return whether a GPU of these CUDA_VISIBLE_DEVICES was used; None if one was not measured, or may be another.

    `devices` are all of the machine in the order of its bus, to which numbers refer only with
    CUDA_DEVICE_ORDER=PCI_BUS_ID (`bus_order`). Without it they are certainly unused only if all of the machine are.
    """
    if devices and all(used.get(device) is False for device in devices):
        return False if visible else None
    found = [used.get(name) for name in devices_of(visible, devices, bus_order=bus_order)]
    return None if not found or None in found else any(found)


def devices_of(visible: str, devices: Sequence[str], *, bus_order: bool) -> list[str]:
    """Return which of `devices` the parts of CUDA_VISIBLE_DEVICES name, "" for one that is not known."""
    found: list[str] = []
    for part in filter(None, visible.split(",")):
        if part.isdecimal():
            named = devices[int(part) : int(part) + 1] if bus_order else ()
        else:
            named = [device for device in devices if device.startswith(part)]
        found.append(named[0] if len(named) == 1 else "")
    return found


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        return 0 <= float(text) <= 100
    return False


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
