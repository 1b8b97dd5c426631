"""A worker: one process of a job, on one node, holding some of its devices."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kfp_gpuquota.api.quantity import as_number


class WorkerPhase(StrEnum):
    """STARTING: holds its devices, has no process yet. LEAVING: its exit was requested, it still holds its devices."""

    STARTING = "Starting"
    RUNNING = "Running"
    LEAVING = "Leaving"
    GONE = "Gone"


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a job.

    `id` is never reused. `devices` are indices on `node`, `share` is the part of each that it holds. `other_gpus` is
    what other resources of it count as (other vendors' GPUs, claimed devices). `exit_code` follows the shell: 128 + N
    for signal N.
    """

    id: str
    job_uid: str
    index: int
    node: str
    devices: tuple[int, ...]
    share: float = 1.0
    other_gpus: float = 0.0
    phase: WorkerPhase = WorkerPhase.STARTING
    rank: int | None = None
    pid: int | None = None
    started_at: float = 0.0
    finished_at: float | None = None
    exit_code: int | None = None

    @property
    def gpus(self) -> int | float:
        """The GPUs that it counts against quotas."""
        return as_number(len(self.devices) * self.share + self.other_gpus)
