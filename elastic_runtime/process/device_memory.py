"""Device memory: limits that the cluster sets while the training runs, and iterations that did not fit.

ELASTIC_MEMORY_DIR holds two files, each replaced atomically: `limit.json`, written by the node's agent, has what this
process may use of each device; `usage.json`, written here, has the followed limit and the demand. Between two
steps a new limit is followed: the cache is freed, torch's per-process fraction set, and the micro-batches made smaller
by what is left for samples. The global batch stays. What was taken away comes back when the limit grows.

What a training does not need is left to others: once its steps have shown how much they take, it wants that and a bit
more. It asks before it grows: where its peak comes near, and where an iteration does not fit, which is repeated then.
One that has misjudged itself so leaves nothing to others any more.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from elastic_runtime.process.simulated_memory import SimulatedDevice

if TYPE_CHECKING:
    from elastic_runtime.plan.batch_sizes import MicroBatchLimit

MIB = 1 << 20
LOOK_EVERY_STEPS = 16
HEADROOM = 1.125
NEAR = 0.97  # of what it wants: so close to it, it wants more
SPARE = 0.9  # of what it may use: what is nearer to that is not worth to be left to others
ANSWER_S = 2.0
POLL_S = 0.02

_log = logging.getLogger("elastic_runtime")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an iteration failed because its device, or the machine, has too little memory for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def free_cache() -> None:
    """Release the memory that torch caches."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


class Device(Protocol):
    """The device memory of this process."""

    def limit_to(self, mib: int) -> float:
        """Use no more than this from now on; the part of what samples took until now that is left for them."""

    @property
    def used_mib(self) -> int:
        """Return the MiB that this process holds."""

    @property
    def peak_mib(self) -> int | None:
        """The most it held since its limit was last changed; None where it always takes all that it may."""


class CudaDevice:
    """The current CUDA device, by torch's caching allocator."""

    @property
    def used_mib(self) -> int:
        """Return the MiB that the allocator holds, used or cached."""
        return int(torch.cuda.memory_reserved()) // MIB

    @property
    def peak_mib(self) -> int | None:
        """With what the allocator had cached, for that is what the limit is about."""
        return int(torch.cuda.max_memory_reserved()) // MIB

    def limit_to(self, mib: int) -> float:
        """Return the part of the activations' memory that fits: the memory held between two steps stays."""
        total = int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
        resident, peak = int(torch.cuda.memory_allocated()), int(torch.cuda.max_memory_allocated())
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, mib * MIB / total))
        torch.cuda.reset_peak_memory_stats()
        return (mib * MIB - resident) / max(peak - resident, 1)


class SimulatedDevices:
    """Simulated devices: this process holds what it may, as a caching allocator ends up doing."""

    def __init__(self, directories: str) -> None:
        self._devices = [SimulatedDevice(directory) for directory in directories.split(":")]

    @property
    def used_mib(self) -> int:
        """The MiB used on the fullest of its devices."""
        return max(device.used_mib for device in self._devices)

    @property
    def peak_mib(self) -> int | None:
        """Return None: the process uses its whole limit."""
        return None

    def limit_to(self, mib: int) -> float:
        """All of it is for samples."""
        before = self.used_mib
        for device in self._devices:
            change = min(mib, device.total_mib) - device.used_mib
            if change > 0:
                device.allocate(min(change, device.free_mib))
            else:
                device.release(-change)
        return mib / before if before else 1.0


def device_of(variables: dict[str, str]) -> Device | None:
    """Return the device on which this process's memory is counted; None on a machine without devices."""
    if directories := variables.get("ELASTIC_SIMULATED_DEVICES"):
        return SimulatedDevices(directories)
    return CudaDevice() if torch.cuda.is_available() else None


class MemoryFollower:
    """Follows the limit that `directory` ("": none) holds. `limit` None: micro-batches are fixed and cannot shrink."""

    def __init__(self, directory: str, limit: MicroBatchLimit | None, device: Device | None = None) -> None:
        self._directory, self._limit = Path(directory) if directory else None, limit
        self._device = device or (device_of(dict(os.environ)) if directory else None)
        self._seen = self._steps = 0
        self._wanted: int | None = None
        self._misjudged = False
        self._follows: int | None = None
        self._most = 0
        if self._directory is not None and self._device is not None:
            self._tell()

    @property
    def follows_mib(self) -> int | None:
        """The limit that is followed now."""
        return self._follows

    def follow(self) -> bool:
        """Between two steps: take over a new limit, if there is one; whether micro-batches change by it."""
        if self._directory is None or self._device is None:
            return False
        limit = self._read_limit(self._directory / "limit.json")
        if limit is None or limit == self._follows:
            self._note_need(self._device)
            return False
        return self._take_over(self._device, limit)

    def grow(self) -> bool:
        """An iteration did not fit. Whether what was left to others has come back, so that it may fit now."""
        if self._directory is None or self._device is None or self._wanted is None or self._follows is None:
            return False
        self._misjudged = True
        self._want(None)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            limit = self._read_limit(self._directory / "limit.json")
            if limit is not None and limit > self._follows:
                self._take_over(self._device, limit)
                return True
            time.sleep(POLL_S)
        return False

    def _note_need(self, device: Device) -> None:
        """Estimate the needed memory at intervals, only of steps whose micro-batches have the full size."""
        self._steps += 1
        whole = self._limit is None or self._limit.whole
        if self._steps % LOOK_EVERY_STEPS or self._follows is None or not whole or self._misjudged:
            return
        if (peak := device.peak_mib) is None:
            return
        needed = int(peak * HEADROOM)
        if self._wanted is None:
            if needed < SPARE * self._follows:
                self._want(needed)
        elif peak > NEAR * self._wanted:
            self._want(needed)

    def _want(self, mib: int | None) -> None:
        self._wanted = mib
        self._tell()

    def _take_over(self, device: Device, limit: int) -> bool:
        before, self._follows = self._follows, limit
        part, self._steps = device.limit_to(limit), 0
        if self._wanted is not None and limit < self._wanted:
            self._wanted = None  # others need more than it has left them: it wants back all that it may
        self._tell()
        if before is None:
            self._most = limit
            return False
        return self._resize(before, limit, part)

    def _resize(self, before: int, limit: int, part: float) -> bool:
        """Return the micro-batches that fit into `limit` MiB."""
        if self._limit is not None:
            self._limit.scale(1.0 if limit >= self._most else part)
        elif limit < before:
            _log.warning(
                "the memory limit fell from %d to %d MiB, but reduction='exact' fixes the shape of a shard, so this "
                "worker cannot yield; use more shards, or reduction='fast'",
                before,
                limit,
            )
        self._most = max(limit, self._most)
        return self._limit is not None

    def _read_limit(self, path: Path) -> int | None:
        """The limit, where the file is another one than last time; it is looked at once a step."""
        try:
            status = path.stat()
            if status.st_mtime_ns ^ status.st_ino == self._seen:
                return None
            self._seen = status.st_mtime_ns ^ status.st_ino
            return int(json.loads(path.read_text(encoding="utf-8"))["limit_mib"])
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def _tell(self) -> None:
        assert self._directory is not None
        temporary = self._directory / "usage.json.new"
        temporary.write_text(json.dumps({"follows_mib": self._follows, "wanted_mib": self._wanted}), encoding="utf-8")
        temporary.replace(self._directory / "usage.json")
