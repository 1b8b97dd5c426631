"""A node and its devices."""

from __future__ import annotations

import msgspec

from kfp_gpuquota.api.affinity import Taint
from kfp_gpuquota.api.validation import (
    MAX_COUNT,
    MAX_MIB,
    Cores,
    Count,
    Mebibytes,
    check_count,
    check_name,
    check_node_name,
    check_range,
)
from kfp_gpuquota.errors import InvalidFieldError


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU, or one CPU slot that stands for a GPU where a machine has none.

    `index` is its place on the node; `uuid` is what the driver calls it ("" for a slot); `memory_mib` is 0 for a
    slot.
    """

    index: int
    model: str = ""
    uuid: str = ""
    memory_mib: int = 0

    def __post_init__(self) -> None:
        check_count("index", self.index, unit="")
        check_count("memory_mib", self.memory_mib, 0, "MiB", MAX_MIB)


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine, or a part of one, on which workers run. Not `ready`: nothing new is placed there.

    `cpu` (cores), `memory_mib` and `max_workers` are what its workers may hold together; None: not counted. A
    node of a `pool` runs only what asks for that pool.
    """

    name: str
    devices: tuple[Device, ...]
    ready: bool = True
    labels: dict[str, str] = {}
    cpu: Cores | None = None
    memory_mib: Mebibytes | None = None
    max_workers: Count | None = None
    taints: tuple[Taint, ...] = ()
    pool: str = ""

    def __post_init__(self) -> None:
        check_node_name("name", self.name)
        if self.pool:
            check_name("pool", self.pool)
        if self.cpu is not None:
            check_range("cpu", self.cpu, 0, MAX_COUNT, "cores")
        if self.memory_mib is not None:
            check_count("memory_mib", self.memory_mib, 0, "MiB", MAX_MIB)
        if self.max_workers is not None:
            check_count("max_workers", self.max_workers, 0, "workers")
        indices = [device.index for device in self.devices]
        if len(set(indices)) != len(indices):
            raise InvalidFieldError("devices", indices, "each device's index must be unique on its node")

    @property
    def gpu_memory_mib(self) -> int:
        """The smallest device's memory: what a request for memory is a part of here."""
        return min((device.memory_mib for device in self.devices), default=0)
