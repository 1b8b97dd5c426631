"""Converts what jobs of a team are promised to fields of its GpuQuota's status, and back. Pure.

The status is written with the first plan that promises, so that another leader keeps what an earlier one decided: the
victims of a promise exit for nobody else (docs/decisions/promises.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.placement import Placement
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import Promise, PromisedPlacement
from kfp_gpuquota.scheduler import PlacementsPromised

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import GpuQuota
    from kfp_gpuquota.scheduler import State

MAX_STORED: Final = 2000
"""Placements and victims of a team; those beyond, of the youngest promises, are decided again after a failover."""


def promises_of(state: State, team: str) -> tuple[Promise, ...]:
    """Return the team's promises, the oldest first."""
    jobs = [job for job in state.promised.values() if job.queue.name == team]
    found, stored = [], 0
    for job in sorted(jobs, key=lambda job: (job.promised_at, job.uid)):
        stored += len(job.promised) + len(job.victims)
        if stored > MAX_STORED:
            break
        placements = tuple(PromisedPlacement(one.node, one.devices, one.part) for one in job.promised)
        found.append(Promise(job.uid, job.promised_at, placements, job.victims))
    return tuple(found)


def stored_promises(quota: GpuQuota, state: State) -> Iterator[PlacementsPromised]:
    """Yield the stored promises of jobs that the team still has."""
    for promise in quota.status.promises:
        job = state.jobs.get(promise.job)
        if job is not None and job.queue.name == quota.metadata.name:
            placements = tuple(Placement(p.node, p.devices, p.part) for p in promise.placements)
            yield PlacementsPromised(promise.job, placements, promise.at, promise.victims)
