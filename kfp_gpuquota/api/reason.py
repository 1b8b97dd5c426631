"""The reason of a decision: a stable code for programs, a sentence for people."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec


class ReasonCode(StrEnum):
    """The binding cause of a decision."""

    FITS = "fits"
    IDLE_GPUS = "idle-gpus"
    RECLAIMED = "reclaimed"
    PREEMPTED = "preempted"
    LENT_GPUS_RETURNED = "lent-gpus-returned"
    CONSOLIDATED = "consolidated"
    WAITS_FOR_RELEASE = "waits-for-release"
    OVER_LIMIT = "over-limit"
    OVER_QUOTA_BUILD = "over-quota-build"
    OVER_FAIR_SHARE = "over-fair-share"
    NO_FREE_GPUS = "no-free-gpus"
    FRAGMENTED = "fragmented"
    MIN_RUN_TIME = "min-run-time"
    NO_FREE_CPU = "no-free-cpu"
    NO_FREE_MEMORY = "no-free-memory"
    NODE_FULL = "node-full"
    NO_SUCH_NODE = "no-such-node"
    NODE_AFFINITY = "node-affinity"
    TOO_LARGE = "too-large"
    SUSPENDED = "suspended"
    NODE_LOST = "node-lost"
    STALE_GANG = "stale-gang"
    USER = "user"
    WORKER_FAILED = "worker-failed"
    WORKER_ENDED = "worker-ended"
    LEASE_ENDED = "lease-ended"
    RAN_TOO_LONG = "ran-too-long"
    WAITS_FOR_GPU_MEMORY = "waits-for-gpu-memory"
    GPU_MEMORY_RECLAIMED = "gpu-memory-reclaimed"
    OVER_GPU_MEMORY_LIMIT = "over-gpu-memory-limit"
    PODS_NOT_READY = "pods-not-ready"
    BEGINS_LATER = "begins-later"
    WAITS_FOR_JOBS = "waits-for-jobs"
    ARRAY_LIMIT = "array-limit"
    DEPENDENCY_FAILED = "dependency-failed"
    GPUS_UNUSED = "gpus-unused"
    PROJECT_HELD = "project-held"
    PROJECT_DRAINED = "project-drained"

    @property
    def holds(self) -> bool:
        """Whether a condition of the job's start is not met, or its project is held, so that it is not in the queue."""
        return self in _HOLDS


_HOLDS: Final = {
    ReasonCode.BEGINS_LATER,
    ReasonCode.WAITS_FOR_JOBS,
    ReasonCode.ARRAY_LIMIT,
    ReasonCode.PROJECT_HELD,
}


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One cause. `beneficiary` is the job (uid) for which it was done, `project` the team it belongs to."""

    code: ReasonCode
    message: str
    beneficiary: str = ""
    project: str = ""
    details: dict[str, str | int | float] = {}

    def __str__(self) -> str:
        return self.message
