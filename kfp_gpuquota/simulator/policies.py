"""What is compared: a policy says which quotas hold and which actions of the scheduler run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kfp_gpuquota.scheduler.actions.cycle import ACTIONS


class Quotas(StrEnum):
    """What a project may hold."""

    BORROWING = "guaranteed, and all that is idle"
    STATIC = "guaranteed and no more"
    NONE = "no quota: one queue for all"


@dataclass(frozen=True, slots=True)
class Policy:
    """`strict`: in one queue the oldest first, and nobody overtakes it."""

    name: str
    title: str
    quotas: Quotas
    actions: tuple[str, ...] = ACTIONS
    strict: bool = False


POLICIES: Final = {
    policy.name: policy
    for policy in (
        Policy("gpuquota", "guaranteed quota, borrowing, reclaim, elastic jobs", Quotas.BORROWING),
        Policy("fifo", "first come, first served; the first waits for room, and all behind it", Quotas.NONE,
               actions=("allocate",), strict=True),
        Policy("static", "each project has its own GPUs and lends none", Quotas.STATIC),
        Policy("best-fit", "the oldest that fits starts on the fullest node; nobody gives way", Quotas.NONE,
               actions=("allocate",)),
    )
}  # fmt: skip
