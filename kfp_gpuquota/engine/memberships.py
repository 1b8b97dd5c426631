"""Opens the membership of a job, at its start and when the cluster's process is restarted."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kfp_gpuquota.engine.protocols import Memberships, Store
    from kfp_gpuquota.engine.records import JobRecord
    from kfp_gpuquota.membership import Limits


class Access(NamedTuple):
    """The token of a job's workers; numbers of generations begin with `first`, and those up to `stored` are stored."""

    token: str
    first: int
    stored: int = 0


def open_membership(store: Store, memberships: Memberships, job: JobRecord, access: Access, limits: Limits) -> None:
    """Serve the job's workers, also those that still run after a restart; `limits` but its grace period."""
    running = [record.worker.id for record in store.alive_of(job.uid)]
    memberships.open(
        job.uid,
        access.token,
        min_workers=job.spec.workers_of(job.spec.smallest),
        first_generation=access.first,
        running=running,
        limits=dataclasses.replace(limits, leave_s=job.spec.grace_period_s),
        trained=[worker for worker in running if worker in job.members],
        worker_prefix=f"{job.uid}-",
        attempt=job.attempt,
        stored=access.stored,
    )
    memberships.set_target(job.uid, store.wanted_of(job.uid))
