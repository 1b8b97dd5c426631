"""The policies to compare: each defines the quotas in force and the actions of the scheduler that run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Order
from kfp_gpuquota.scheduler import RESERVE_AFTER_S
from kfp_gpuquota.scheduler.actions.cycle import ACTIONS
from kfp_gpuquota.scheduler.state.model import UNLIMITED

if TYPE_CHECKING:
    from kfp_gpuquota.api.defragmentation import Defragmentation


class Quotas(StrEnum):
    """The rule for the amount that a project may hold."""

    BORROWING = "guaranteed, and all that is idle"
    STATIC = "guaranteed and no more"
    NONE = "no quota: one queue for all"


@dataclass(frozen=True, slots=True)
class Policy:
    """The quotas and actions of one policy. `strict`: the oldest job of a queue is never overtaken.

    `backfill`: it is overtaken by jobs that do not delay it, whose run times are known (EASY), and by no others. After
    `reserve_after_s` what an entitled job needs is kept for it. `order` is that of the waiting jobs of each project. In
    the window of `defragmentation` jobs are moved to gather free GPUs.
    """

    name: str
    title: str
    quotas: Quotas
    actions: tuple[str, ...] = ACTIONS
    strict: bool = False
    backfill: bool = False
    reserve_after_s: float = RESERVE_AFTER_S
    order: Order = Order.FAIR
    defragmentation: Defragmentation | None = None


POLICIES: Final = {
    policy.name: policy
    for policy in (
        Policy("gpuquota", "guaranteed quota, borrowing, reclaim, elastic jobs", Quotas.BORROWING),
        Policy("fair-users", "as gpuquota, and each project is fair to its users", Quotas.BORROWING,
               order=Order.FAIR_USERS),
        Policy("shortest", "as gpuquota, and each project starts the shortest expected job first", Quotas.BORROWING,
               order=Order.SHORTEST),
        Policy("strict", "as gpuquota, and in each project none passes the first", Quotas.BORROWING,
               order=Order.STRICT),
        Policy("fifo", "first come, first served; all wait behind the first that lacks capacity", Quotas.NONE,
               actions=("allocate",), strict=True),
        Policy("static", "each project has its own GPUs and lends none", Quotas.STATIC),
        Policy("best-fit", "the oldest that fits starts on the fullest node; no job is stopped", Quotas.NONE,
               actions=("allocate",), reserve_after_s=UNLIMITED),
        Policy("backfill", "first come, first served; others start in between if they delay nobody (EASY)", Quotas.NONE,
               actions=("allocate",), backfill=True),
    )
}  # fmt: skip


def defragmenting(rule: Defragmentation) -> Policy:
    """Return the policy of clusters with jobs moved to gather free GPUs."""
    title = "as gpuquota, and jobs are moved to gather free GPUs"
    return replace(POLICIES["gpuquota"], name="defragment", title=title, defragmentation=rule)
