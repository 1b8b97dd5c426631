"""Measures GPUs, and keeps their use over the last hours: this machine's, and on Ray those of the workers."""

from __future__ import annotations

from threading import Thread
from typing import TYPE_CHECKING

from kfp_gpuquota.api.history import DeviceUse
from kfp_gpuquota.cluster.gpu_use import GpuUseHistory
from kfp_gpuquota.cluster.local.workers.sharing import device_name, simulated_directory
from kfp_gpuquota.fractions.activity import NvmlActivity, SimulatedActivity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kfp_gpuquota.api.history import UsePoint
    from kfp_gpuquota.cluster.local.home import Home
    from kfp_gpuquota.cluster.local.storage.state import ClusterState
    from kfp_gpuquota.fractions.activity import DeviceActivity, GpuUse


class Apart:
    """Measures in a thread: a driver that does not answer, as after a GPU has failed, holds up nothing else."""

    def __init__(self, make: Callable[[], DeviceActivity]) -> None:
        self._make = make
        self._activity: DeviceActivity | None = None
        self._found: dict[str, GpuUse] = {}
        self._thread: Thread | None = None

    def measure(self) -> dict[str, GpuUse]:
        """Return what was measured since the last call, nothing if that is not over, and measure again."""
        if self._thread is not None and self._thread.is_alive():
            return {}
        found, self._found = self._found, {}
        self._thread = Thread(target=self._run, name="gpu-meter", daemon=True)
        self._thread.start()
        return found

    def _run(self) -> None:
        self._activity = self._activity or self._make()
        self._found = self._activity.measure()


class GpuMeter:
    """One per daemon. Simulated devices are measured once a directory of one exists. `activity`: by default NVML's.

    `elsewhere` measures devices of other machines, in place of this machine's.
    """

    def __init__(
        self,
        home: Home,
        state: ClusterState,
        activity: DeviceActivity | None = None,
        *,
        elsewhere: DeviceActivity | None = None,
    ) -> None:
        self._state, self._elsewhere = state, elsewhere
        devices = [(node, device) for node in state.nodes.values() for device in node.devices]
        self._real = any(device.uuid for _, device in devices)
        self._simulated = {
            simulated_directory(home, node.name, device.index): device_name(node, device) for node, device in devices
        }
        self._activity = activity or elsewhere
        self._history = GpuUseHistory()

    @property
    def lags(self) -> bool:
        """Return whether a measurement may be late, in which case the next one has all of it."""
        if self._elsewhere is not None:
            return True
        return self._real and (self._activity is None or isinstance(self._activity, Apart))

    def measure(self) -> Mapping[str, GpuUse]:
        """Return the use of each device since the last call, by its name, and keep it."""
        if self._real and self._activity is None:
            self._activity = Apart(NvmlActivity)
        activity = self._activity or SimulatedActivity({self._simulated[path]: path for path in self._present()})
        measured = activity.measure()
        self._history.add(measured, self._state.clock())
        return measured

    def of(self, node: str, device: int) -> tuple[UsePoint, ...]:
        """Return the use of one device of a node, oldest first; () if it was not measured."""
        found = self._state.nodes.get(node)
        names = () if found is None else (device_name(found, one) for one in found.devices if one.index == device)
        return self._history.of(next(iter(names), ""))

    def all(self, since: float) -> tuple[DeviceUse, ...]:
        """Return the use of all devices that were measured."""
        found = (
            DeviceUse(
                node=node.name,
                device=device.index,
                model=device.model,
                memory_mib=device.memory_mib,
                points=self._history.of(device_name(node, device), since),
            )
            for node in self._state.nodes.values()
            for device in node.devices
        )
        return tuple(use for use in found if use.points)

    def _present(self) -> list[Path]:
        """Return the directories of simulated devices: one look where there are none."""
        folder = next((path.parent for path in self._simulated), None)
        found = folder.iterdir() if folder is not None and folder.is_dir() else ()
        return [path for path in found if path in self._simulated]
