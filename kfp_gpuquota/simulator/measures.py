"""The measurements of a simulation: integrals over time, samples for the picture, and the outcome of each job."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kfp_gpuquota.scheduler.placement.fragmentation import Demand, Mix
from kfp_gpuquota.scheduler.state.model import GPU

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kfp_gpuquota.scheduler.state.model import Host
    from kfp_gpuquota.simulator.trace import TraceJob, TraceNode

MILLI = GPU // 1000
FULL_GPU_MILLI = 1000
UNCOUNTED = 1 << 40
"""Of CPU and memory on a node where they are not counted: more than any job asks for."""


class Spread(msgspec.Struct, frozen=True):
    """Durations in seconds; percentiles by nearest rank."""

    count: int = 0
    mean_s: float = 0.0
    median_s: float = 0.0
    p95_s: float = 0.0
    max_s: float = 0.0


class Series(msgspec.Struct, frozen=True):
    """Samples at `at` (s): GPUs used by project, GPUs asked for by jobs that wait, percent of idle GPUs unusable."""

    at: list[float]
    used: dict[str, list[float]]
    waiting_gpus: list[float]
    fragmentation_percent: list[float]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result under one policy.

    Utilisation and fragmentation are averages over the time from the first arrival (but for the earliest 1 %, which may
    be months ahead of all others) to the last: used GPUs in percent of all, and of the idle ones those that a job drawn
    from the trace could not use. `waiting` is from arrival to the first start, `queued` all time in the queue, also
    after evictions, both of jobs that start at all; `completion` is from arrival to the end. `lost_gpu_hours` were
    computed again after evictions, and moves that gather free GPUs, whose number is `moves`. `free_nodes_percent` is
    the part of all GPUs that were on nodes without jobs. By project: `waiting`, `queued`, `evicted` (jobs stopped as a
    whole) and `gpu_hours`.
    """

    policy: str
    title: str
    gpus: int
    jobs: int
    finished: int
    utilisation_percent: float
    fragmentation_percent: float
    waiting: dict[str, Spread]
    queued: dict[str, Spread]
    evicted: dict[str, int]
    gpu_hours: dict[str, float]
    completion: Spread
    resizes: int
    evictions: int
    moves: int
    free_nodes_percent: float
    lost_gpu_hours: float
    makespan_s: float
    plans: int
    slowest_plan_ms: float
    seconds: float
    series: Series


def spread(durations: Iterable[float]) -> Spread:
    """Their mean and percentiles."""
    ordered = sorted(durations)
    if not ordered:
        return Spread()
    count = len(ordered)
    return Spread(count, fmean(ordered), ordered[count // 2], ordered[min(count - 1, count * 95 // 100)], ordered[-1])


@dataclass(slots=True)
class Meter:
    """Follows the cluster in time. Call `advance` before anything changes."""

    grid: Sequence[float]
    hosts: Mapping[str, Host]
    fragments: Fragments
    projects: Sequence[str]
    used: dict[str, float] = field(default_factory=dict)
    waiting_gpus: float = 0.0
    gpu_seconds: float = 0.0
    now: float = 0.0
    samples: list[tuple[float, dict[str, float], float, float]] = field(default_factory=list)
    free_percent: list[float] = field(default_factory=list)

    def advance(self, now: float) -> None:
        """Nothing has changed until `now`."""
        begins, ends = self.grid[0], self.grid[-1]
        self.gpu_seconds += sum(self.used.values()) * max(0.0, min(now, ends) - max(self.now, begins))
        while len(self.samples) < len(self.grid) and self.grid[len(self.samples)] < now:
            at = self.grid[len(self.samples)]
            self.samples.append((at, dict(self.used), self.waiting_gpus, self.fragments.percent(self.hosts)))
            self.free_percent.append(_free_percent(self.hosts.values()))
        self.now = now

    def add(self, project: str, gpus: float) -> None:
        """The project uses more, or less."""
        self.used[project] = self.used.get(project, 0.0) + gpus

    def series(self) -> Series:
        """Return the samples over time."""
        used = {name: [round(sample[1].get(name, 0.0), 3) for sample in self.samples] for name in self.projects}
        return Series(
            [sample[0] for sample in self.samples],
            used,
            [round(sample[2], 3) for sample in self.samples],
            [round(sample[3], 3) for sample in self.samples],
        )


def _free_percent(hosts: Iterable[Host]) -> float:
    """Return the part of all GPUs that are on nodes without workers, in percent."""
    sizes = [(len(host.devices), not host.tasks) for host in hosts]
    return 100 * sum(size for size, free in sizes if free) / max(1, sum(size for size, _ in sizes))


class Fragments:
    """Return how much of the idle capacity a job drawn from the trace cannot use (the measure of FGD, ATC 2023)."""

    def __init__(self, nodes: Sequence[TraceNode], jobs: Sequence[TraceJob]) -> None:
        mix: dict[Demand, float] = {}
        for job in jobs:
            demand = Demand(job.gpus, job.milli or FULL_GPU_MILLI, job.cpu_milli, job.memory_mib, job.models)
            mix[demand] = mix.get(demand, 0.0) + 1
        # Every kind weighs as often as it comes; the rarest are left out, for they cost time and count little.
        common = dict(sorted(mix.items(), key=lambda item: -item[1])[:200])
        self._mix = Mix(common, np.array([node.model for node in nodes]), sharpness=1.0)
        self._names = [node.name for node in nodes]
        self._widest = max((node.gpus for node in nodes), default=0)

    def percent(self, hosts: Mapping[str, Host]) -> float:
        """Return the unusable part of all idle capacity, in percent."""
        gpu = np.zeros((len(self._names), self._widest), dtype=np.int64)  # (nodes, devices): thousandths idle
        cpu, memory = np.zeros(len(gpu), dtype=np.int64), np.zeros(len(gpu), dtype=np.int64)
        for i, name in enumerate(self._names):
            host = hosts[name]
            gpu[i, : len(host.devices)] = [host.idle(device) // MILLI for device in host.devices]
            cpu[i] = min(UNCOUNTED, host.cpu - host.other[0][0] - host.other[1][0])
            memory[i] = min(UNCOUNTED, (host.memory - host.other[0][1] - host.other[1][1]) // 2**20)
        idle = gpu.sum() * self._mix.weight.sum()
        return 100 * float(self._mix.fragments(np.arange(len(gpu)), gpu, cpu, memory).sum() / idle) if idle else 0.0
