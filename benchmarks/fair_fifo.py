"""Fair FIFO, a baseline: how long each job of a trace waits where no job of a project overtakes another.

It shares no code with the scheduler. The jobs of a project start in the order of their arrival. Of the first jobs of
all projects, those within their project's guarantee start first, the oldest one before the others, and stop the newest
jobs of projects beyond theirs if they do not fit otherwise. Then the project that holds the smallest part of its
guarantee is next; if its first job does not fit, no other borrows. A stopped job loses no work.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kfp_gpuquota.simulator import TraceJob, TraceNode


@dataclass(slots=True)
class Entry:
    """A job of the trace. `taken`: the node and the devices of each worker; `epoch` counts its stops."""

    at: float
    uid: int
    job: TraceJob
    left_s: float
    started_at: float = 0.0
    first_at: float | None = None
    taken: list[tuple[int, list[int]]] = field(default_factory=list)
    epoch: int = 0

    @property
    def size(self) -> float:
        """The GPUs that the job takes."""
        return self.job.workers * self.job.worker_gpus


class FairFifo:
    """The cluster and its queues; `idle` has the thousandths of each device that are idle, then CPU and memory."""

    def __init__(self, nodes: Sequence[TraceNode], guaranteed: Mapping[str, int]) -> None:
        self._nodes, self._guaranteed = nodes, guaranteed
        self._idle = [[1000] * node.gpus for node in nodes]
        self._other = [[node.cpu_milli or 10**9, node.memory_mib or 10**9] for node in nodes]
        self._waiting: dict[str, list[tuple[float, int, Entry]]] = {name: [] for name in guaranteed}
        self._held = dict.fromkeys(guaranteed, 0.0)
        self._running: list[Entry] = []
        self._ends: list[tuple[float, int, int, Entry]] = []

    def waits(self, jobs: Sequence[TraceJob]) -> dict[str, float]:
        """Return the time from the arrival to the first start of each job that starts, in seconds."""
        entries = [Entry(job.arrives_at, number, job, job.duration_s) for number, job in enumerate(jobs)]
        arrivals = entries[::-1]
        while arrivals or self._ends:
            now = min([entry.at for entry in arrivals[-1:]] + [end[0] for end in self._ends[:1]])
            while self._ends and self._ends[0][0] == now:
                *_, epoch, entry = heappop(self._ends)
                if epoch == entry.epoch:
                    self._release(entry)
            while arrivals and arrivals[-1].at == now:
                self._enqueue(arrivals.pop())
            while self._start_one(now):
                pass
        return {entry.job.name: entry.first_at - entry.at for entry in entries if entry.first_at is not None}

    def _start_one(self, now: float) -> bool:
        heads = [entries[0][2] for entries in self._waiting.values() if entries]
        for entry in sorted((one for one in heads if self._is_within(one)), key=lambda one: (one.at, one.uid)):
            if self._place(entry, now) or self._reclaim(entry, now):
                return True
        others = [one for one in heads if not self._is_within(one)]
        first = min(others, key=lambda one: (self._held[one.job.project] / self._share(one), one.at), default=None)
        return first is not None and self._place(first, now)

    def _share(self, entry: Entry) -> float:
        return max(0.001, self._guaranteed[entry.job.project])

    def _is_within(self, entry: Entry) -> bool:
        return self._held[entry.job.project] + entry.size <= self._guaranteed[entry.job.project]

    def _reclaim(self, entry: Entry, now: float) -> bool:
        """Stop the newest jobs of projects beyond their guarantee until the job fits; none if it does not fit then."""
        stopped: list[Entry] = []
        for victim in sorted(self._running, key=lambda one: (-one.started_at, -one.uid)):
            project = victim.job.project
            if project == entry.job.project or self._held[project] <= self._guaranteed[project]:
                continue
            stopped.append(victim)
            self._change(victim, -1)
            if self._find(entry):
                for one in stopped:
                    self._change(one, 1)
                    self._stop(one, now)
                return self._place(entry, now)
        for one in stopped:
            self._change(one, 1)
        return False

    def _stop(self, entry: Entry, now: float) -> None:
        entry.left_s -= now - entry.started_at
        self._release(entry)
        self._enqueue(entry)

    def _place(self, entry: Entry, now: float) -> bool:
        entry.taken = self._find(entry)
        if not entry.taken:
            return False
        self._change(entry, 1)
        self._waiting[entry.job.project].pop(0)
        self._running.append(entry)
        entry.started_at = now
        entry.first_at = now if entry.first_at is None else entry.first_at
        heappush(self._ends, (now + entry.left_s, entry.uid, entry.epoch, entry))
        return True

    def _find(self, entry: Entry) -> list[tuple[int, list[int]]]:
        """Return the fullest nodes on which all workers fit, with the devices; none if they do not fit."""
        job = entry.job
        found: list[tuple[int, list[int]]] = []
        used: dict[tuple[int, int], int] = {}
        for number in sorted(range(len(self._nodes)), key=lambda n: (sum(self._idle[n]), n)):
            if job.models and self._nodes[number].model not in job.models:
                continue
            cpu, memory = self._other[number]
            while len(found) < job.workers and cpu >= job.cpu_milli and memory >= job.memory_mib:
                left = [(idle - used.get((number, d), 0), d) for d, idle in enumerate(self._idle[number])]
                devices = [d for free, d in sorted(left) if free >= job.milli][: job.gpus]
                if len(devices) < job.gpus:
                    break
                used.update({(number, d): used.get((number, d), 0) + job.milli for d in devices})
                cpu, memory = cpu - job.cpu_milli, memory - job.memory_mib
                found.append((number, devices))
        return found if len(found) == job.workers else []

    def _change(self, entry: Entry, sign: int) -> None:
        """Take what the job's workers use, or with -1 release it."""
        for number, devices in entry.taken:
            for device in devices:
                self._idle[number][device] -= sign * entry.job.milli
            self._other[number][0] -= sign * entry.job.cpu_milli
            self._other[number][1] -= sign * entry.job.memory_mib
        self._held[entry.job.project] += sign * entry.size

    def _release(self, entry: Entry) -> None:
        self._change(entry, -1)
        entry.epoch += 1
        self._running.remove(entry)

    def _enqueue(self, entry: Entry) -> None:
        insort(self._waiting[entry.job.project], (entry.at, entry.uid, entry))
