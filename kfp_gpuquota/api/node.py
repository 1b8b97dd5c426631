"""A node and its devices."""

from __future__ import annotations

from math import ceil
from typing import Final

import msgspec

from kfp_gpuquota.api.affinity import Taint
from kfp_gpuquota.api.share import DEFAULT_SMALLEST_SHARE, SMALLEST_FRACTION
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

DEFAULT_MAX_SHARERS: Final = 16
"""Processes on one device; each needs a context of the driver, and a turn."""

DEFAULT_MEMORY_RESERVE: Final = 0.02
"""The part of a device's memory that the driver holds for its page tables and error correction."""

MAX_MEMORY_RESERVE: Final = 0.5
MAX_SMALLEST_SHARE: Final = 0.5


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
    node of a `pool` runs only what asks for that pool. At most `max_sharers` workers share a device. The part
    `memory_reserve` of each device's memory is the driver's, and no job may ask for less than `smallest_share` of one.
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
    max_sharers: int = DEFAULT_MAX_SHARERS
    memory_reserve: float = 0.0
    smallest_share: float = DEFAULT_SMALLEST_SHARE

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
        check_count("max_sharers", self.max_sharers, 1, "workers")
        check_range("memory_reserve", self.memory_reserve, 0, MAX_MEMORY_RESERVE)
        check_range("smallest_share", self.smallest_share, SMALLEST_FRACTION, MAX_SMALLEST_SHARE)
        indices = [device.index for device in self.devices]
        if len(set(indices)) != len(indices):
            raise InvalidFieldError("devices", indices, "each device's index must be unique on its node")

    @property
    def gpu_memory_mib(self) -> int:
        """The smallest device's memory that jobs may hold: what a request for memory is a part of here."""
        return min((self.usable_mib(device) for device in self.devices), default=0)

    def usable_mib(self, device: Device) -> int:
        """Return the memory of a device that jobs may hold: without the driver's part."""
        return usable_mib(device.memory_mib, self.memory_reserve)


class SharingRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How devices are shared, the administrator's choice: see the fields of a node."""

    max_sharers: int = DEFAULT_MAX_SHARERS
    memory_reserve: float = DEFAULT_MEMORY_RESERVE
    smallest_share: float = DEFAULT_SMALLEST_SHARE

    def __post_init__(self) -> None:
        check_count("max_sharers", self.max_sharers, 1, "workers")
        check_range("memory_reserve", self.memory_reserve, 0, MAX_MEMORY_RESERVE)
        check_range("smallest_share", self.smallest_share, SMALLEST_FRACTION, MAX_SMALLEST_SHARE)

    def on(self, node: Node) -> Node:
        """Return the node with these rules."""
        return msgspec.structs.replace(node, **msgspec.structs.asdict(self))


def usable_mib(total_mib: int, reserve: float) -> int:
    """Return what is left of a device's memory without the part that is the driver's."""
    return total_mib - ceil(round(total_mib * reserve, 6))
