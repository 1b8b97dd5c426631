"""The devices of this machine: its GPUs, or CPU slots that stand for them."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api import Device, Node
from kfp_gpuquota.api.validation import check_count

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_CPU_SLOTS = 2
CPU_SLOT = "cpu-slot"
_MIB = 1 << 20


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The shape of the embedded cluster. Without `gpus_per_node`: the machine's GPUs, or 2 CPU slots."""

    nodes: int = 1
    gpus_per_node: int | None = None

    def __post_init__(self) -> None:
        check_count("nodes", self.nodes, 1, "nodes")
        if self.gpus_per_node is not None:
            check_count("gpus_per_node", self.gpus_per_node, 1)


def discover_nodes(config: ClusterConfig) -> tuple[Node, ...]:
    """The nodes of `config`: node-0, node-1, ...; more than one are labels on devices of this one machine."""
    return lay_out(config, tuple(_gpus()))


def lay_out(config: ClusterConfig, gpus: tuple[Device, ...]) -> tuple[Node, ...]:
    """The machine's `gpus` dealt out to the nodes in their order; CPU slots where they are too few for all."""
    count = config.gpus_per_node or len(gpus) // config.nodes or DEFAULT_CPU_SLOTS
    devices = gpus if config.nodes * count <= len(gpus) else tuple(_slots(config.nodes * count))
    return tuple(
        Node(name=f"node-{number}", devices=_renumbered(devices[number * count : (number + 1) * count]))
        for number in range(config.nodes)
    )


def _renumbered(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    return tuple(msgspec.structs.replace(device, index=index) for index, device in enumerate(devices))


def environment_of(devices: tuple[Device, ...], threads: int) -> dict[str, str]:
    """What a worker must see to use just these devices; `threads` is a slot's share of the cores."""
    if any(device.uuid for device in devices):
        return {"CUDA_VISIBLE_DEVICES": ",".join(device.uuid for device in devices)}
    return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(max(1, threads * len(devices)))}


def threads_per_slot(nodes: tuple[Node, ...]) -> int:
    """The cores of this machine shared among all slots, at least one each."""
    slots = sum(len(node.devices) for node in nodes)
    return max(1, len(os.sched_getaffinity(0)) // max(1, slots))


def _slots(count: int) -> Iterator[Device]:
    return (Device(index=index, model=CPU_SLOT) for index in range(count))


def _gpus() -> Iterator[Device]:
    with contextlib.suppress(ImportError):
        import pynvml  # noqa: PLC0415 (only where a cluster starts)

        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            try:
                yield from (_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
            finally:
                pynvml.nvmlShutdown()


def _gpu(nvml: object, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)  # type: ignore[attr-defined]
    return Device(
        index=index,
        model=_text(nvml.nvmlDeviceGetName(handle)),  # type: ignore[attr-defined]
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),  # type: ignore[attr-defined]
        memory_mib=nvml.nvmlDeviceGetMemoryInfo(handle).total // _MIB,  # type: ignore[attr-defined]
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
