"""The devices of this machine: its GPUs, or CPU slots that stand for them."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api import Device, Node
from kfp_gpuquota.api.affinity import GPU_PRODUCT
from kfp_gpuquota.api.defragmentation import Defragmentation
from kfp_gpuquota.api.node import SharingRules
from kfp_gpuquota.api.quantity import show_gpus
from kfp_gpuquota.api.validation import MAX_COUNT, MAX_MIB, check_count, check_name, check_range
from kfp_gpuquota.cluster.local.shared.config import SharedConfig
from kfp_gpuquota.cluster.ray.config import RayConfig
from kfp_gpuquota.errors import InvalidFieldError, UsageError
from kfp_gpuquota.fractions import Policy
from kfp_gpuquota.scheduler import RESERVE_AFTER_S

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_CPU_SLOTS = 2
CPU_SLOT = "cpu-slot"
MAX_HALF_LIFE_S = 365 * 86_400.0
_MIB = 1 << 20


SHAPE = (
    "nodes", "gpus_per_node", "gpus", "cpu_slots", "gpu_memory_mib",
    "cpus_per_node", "memory_per_node_mib", "pools", "ray",
)  # fmt: skip
"""The fields of a cluster's configuration that say what it has; the others are its rules."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The shape of the embedded cluster, and its rules."""

    # The shape
    nodes: int = 1
    gpus_per_node: int | None = None  # None: the machine's GPUs, or 2 CPU slots
    gpus: tuple[str, ...] = ()  # those of the machine's that it may use, by index or UUID; all by default
    cpu_slots: bool = False  # CPU slots stand for GPUs, even where there are some
    gpu_memory_mib: int | None = None  # its GPUs are simulated, and each has so much memory
    cpus_per_node: float | None = None  # cores that jobs may ask for; the machine's, divided among the nodes
    memory_per_node_mib: int | None = None  # the same of main memory
    pools: dict[str, int] = {}  # the number of nodes in each node pool, assigned from the first node on
    ray: RayConfig | None = None  # the nodes are those of a Ray cluster

    # The rules
    memory_policy: Policy = Policy()  # what the agent may do about the memory of GPUs that several share
    sharing: SharingRules | None = None  # simulated GPUs have no driver that holds memory by default
    usage_half_life_s: float | None = None  # past borrowing reduces a share; it counts half after this time
    moves: bool = True  # jobs are moved to make room for another one
    defragmentation: Defragmentation | None = None  # jobs are moved in a window to gather free GPUs
    reserve_after_s: float = RESERVE_AFTER_S  # what a waiting job within its guarantee needs is kept after so long
    log_limit_mib: int = 100  # of each worker's log the last part is kept
    keep_ended_s: float = 30 * 86_400.0  # ended jobs are kept with their logs and checkpoints
    keep_ended_jobs: int = 5000  # of them at most, for each user
    shared: SharedConfig | None = None  # several users of the machine use it, and jobs run as their owners

    def __post_init__(self) -> None:
        check_count("nodes", self.nodes, 1, "nodes")
        if self.gpus_per_node is not None:
            check_count("gpus_per_node", self.gpus_per_node, 1)
        self._check_gpus()
        for field, mib in (("gpu_memory_mib", self.gpu_memory_mib), ("memory_per_node_mib", self.memory_per_node_mib)):
            if mib is not None:
                check_count(field, mib, 1, "MiB", MAX_MIB)
        for pool, count in self.pools.items():
            check_name("pools", pool)
            check_count("pools", count, 1, "nodes")
        check_range("reserve_after_s", self.reserve_after_s, 0, MAX_HALF_LIFE_S, "s")
        check_count("log_limit_mib", self.log_limit_mib, 1, "MiB", MAX_MIB)
        check_range("keep_ended_s", self.keep_ended_s, 0, MAX_HALF_LIFE_S, "s")
        check_count("keep_ended_jobs", self.keep_ended_jobs, 0, "jobs")
        if self.shared is not None and self.ray is not None:
            raise UsageError("--shared and --ray exclude each other: on a Ray cluster all jobs run as Ray's user")
        if sum(self.pools.values()) > self.nodes:
            rule = f"there are {self.nodes} nodes, and they name {sum(self.pools.values())}"
            raise InvalidFieldError("pools", self.pools, rule)
        if self.usage_half_life_s is not None:
            check_range("usage_half_life_s", self.usage_half_life_s, 1, MAX_HALF_LIFE_S, "s")
        if self.cpus_per_node is not None:
            check_range("cpus_per_node", self.cpus_per_node, 0, MAX_COUNT, "cores")

    def _check_gpus(self) -> None:
        named = ",".join(self.gpus)
        if len(set(self.gpus)) != len(self.gpus):
            raise InvalidFieldError("gpus", named, "it names a GPU twice")
        if len(self.gpus) % self.nodes:
            raise InvalidFieldError("gpus", named, f"it must name as many GPUs for each of the {self.nodes} nodes")
        if self.gpus and (self.cpu_slots or self.gpu_memory_mib is not None):
            raise InvalidFieldError("gpus", named, "it names GPUs, and simulated ones have no names")


def sharing_rules(config: ClusterConfig) -> SharingRules:
    """Return how the cluster's devices are shared."""
    if config.sharing is not None:
        return config.sharing
    return SharingRules(memory_reserve=0.0) if config.gpu_memory_mib else SharingRules()


def discover_nodes(config: ClusterConfig) -> tuple[Node, ...]:
    """Return the nodes of `config`: node-0, node-1, ...; more than one are labels on devices of this one machine.

    Raises InvalidFieldError for GPUs that the machine does not have.
    """
    simulated = config.gpu_memory_mib is not None or config.cpu_slots
    gpus = () if simulated else chosen_gpus(config.gpus, tuple(_gpus()))
    return lay_out(config, gpus, len(os.sched_getaffinity(0)), _memory_mib())


def chosen_gpus(chosen: tuple[str, ...], gpus: tuple[Device, ...]) -> tuple[Device, ...]:
    """Return the GPUs that are named, by index or UUID, in that order; all if none is. Raises InvalidFieldError."""
    names = {name: gpu for gpu in gpus for name in (str(gpu.index), gpu.uuid)}
    if missing := [name for name in chosen if name not in names]:
        there = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "no GPU"
        raise InvalidFieldError("gpus", ",".join(chosen), f"this machine has no GPU {missing[0]!r}; it has {there}")
    found = tuple(names[name] for name in chosen) or gpus
    if len({gpu.uuid for gpu in found}) != len(found):
        raise InvalidFieldError("gpus", ",".join(chosen), "it names a GPU twice")
    return found


def lay_out(
    config: ClusterConfig, gpus: tuple[Device, ...], cores: float = 1.0, memory_mib: int = 1024
) -> tuple[Node, ...]:
    """Distribute the machine's `gpus` to the nodes in their order; CPU slots if it has none.

    Raises InvalidFieldError if it has GPUs, but fewer than the nodes need.
    """
    count = config.gpus_per_node or (len(gpus) // config.nodes if gpus else DEFAULT_CPU_SLOTS)
    if gpus and not 0 < config.nodes * count <= len(gpus):
        each = f"{config.nodes} nodes with {show_gpus(count or 1)} each" if config.nodes > 1 else show_gpus(count)
        raise InvalidFieldError(
            "gpus_per_node", count or 1, f"{each} are more than the {show_gpus(len(gpus))} of this machine",
            hint="CPU slots stand for them with --cpu-slots",
        )  # fmt: skip
    pools = [pool for pool, size in config.pools.items() for _ in range(size)]
    slots = tuple(_slots(config.nodes * count, config.gpu_memory_mib or 0))
    devices = gpus or slots
    return tuple(
        Node(
            name=f"node-{number}",
            devices=_renumbered(devices[number * count : (number + 1) * count]),
            labels=_labels(devices[number * count]),
            cpu=round(cores / config.nodes, 3) if config.cpus_per_node is None else config.cpus_per_node,
            memory_mib=config.memory_per_node_mib or memory_mib // config.nodes,
            pool=pools[number] if number < len(pools) else "",
        )
        for number in range(config.nodes)
    )


def _labels(device: Device) -> dict[str, str]:
    """As NVIDIA's GPU feature discovery labels a node of Kubernetes, so that `gpu_type` means the same here."""
    return {GPU_PRODUCT: device.model.replace(" ", "-")} if device.uuid else {}


def _memory_mib() -> int:
    """The machine's main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MIB


def _renumbered(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    return tuple(msgspec.structs.replace(device, index=index) for index, device in enumerate(devices))


def environment_of(devices: tuple[Device, ...], threads: int) -> dict[str, str]:
    """Return the variables that limit a worker to these devices; `threads` is a slot's share of the cores."""
    if any(device.uuid for device in devices):
        return {"CUDA_VISIBLE_DEVICES": ",".join(device.uuid for device in devices)}
    return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(max(1, threads * len(devices)))}


def threads_per_slot(nodes: tuple[Node, ...]) -> int:
    """The cores of this machine shared among all slots, at least one each."""
    slots = sum(len(node.devices) for node in nodes)
    return max(1, len(os.sched_getaffinity(0)) // max(1, slots))


def _slots(count: int, memory_mib: int) -> Iterator[Device]:
    return (Device(index=index, model=CPU_SLOT, memory_mib=memory_mib) for index in range(count))


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
