"""The order of a project's waiting jobs and pods: pure.

The same order as the scheduler's within one queue (`scheduler.order.job_key`): priority, then age; in a project that is
fair to its users, what the user uses before age, as the reason of the last plan has it. Which project is
next is for fair share to say, and one for which there is room may start before another for which there is none; so a
place is a place in the project's own queue, and no promise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api.job import Phase
from kfp_gpuquota.api.project import Order
from kfp_gpuquota.api.reason import ReasonCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.api.job import Job


class Queued(msgspec.Struct, frozen=True, kw_only=True):
    """A waiting job, or pods that another owner created; `pool` is the requested node pool.

    `user_gpus` counts as used by its user, where that decides.
    """

    name: str
    uid: str
    priority: int
    submitted_at: float
    pool: str = ""
    user_gpus: float = 0.0

    @property
    def key(self) -> tuple[int, float, float, str]:
        """Its order among others."""
        return -self.priority, self.user_gpus, self.submitted_at, self.uid


def queued(job: Job) -> Queued | None:
    """The job as one that waits; None where it is held, or rests after its workers did not come up."""
    code = job.status.reason.code if job.status.reason else None
    if job.status.phase is not Phase.PENDING or code is ReasonCode.PODS_NOT_READY or (code is not None and code.holds):
        return None
    return Queued(
        name=job.spec.name,
        uid=job.uid,
        priority=job.spec.effective_priority,
        submitted_at=job.status.queued_at,
        pool=job.spec.node_pool,
        user_gpus=float(job.status.reason.details.get("user_gpus", 0.0)) if job.status.reason else 0.0,
    )


def has_places(order: Order, *, uses_known: bool) -> bool:
    """Return whether the places of a project's waiting jobs are known: by run time they change as time passes.

    `uses_known`: the reasons of jobs have what their users use; the status of objects on Kubernetes does not.
    """
    return order is not Order.SHORTEST and (uses_known or order is not Order.FAIR_USERS)


def ahead_of(one: Queued, all_: Iterable[Queued]) -> list[Queued]:
    """Return the waiting jobs and pods of the project that precede this one, in order."""
    return sorted((each for each in all_ if each.pool == one.pool and each.key < one.key), key=lambda each: each.key)
