"""Converts what jobs of a team are promised to fields of its GpuQuota's status, and back. Pure.

The status is written with the first plan that promises, so that another leader keeps what an earlier one decided: the
victims of a promise exit for nobody else (docs/decisions/promises.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.placement import Placement
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import Promise, PromisedPlacement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.cluster.kubernetes.objects.custom_types import GpuQuota
    from kfp_gpuquota.scheduler import State

MAX_STORED: Final = 2000  # placements of a team; those beyond, the youngest ones, are decided again after a failover


def promises_of(state: State, team: str) -> tuple[Promise, ...]:
    """Return the team's promises, the oldest first."""
    jobs = [job for job in state.promised.values() if job.queue.name == team]
    found, stored = [], 0
    for job in sorted(jobs, key=lambda job: (job.promised_at, job.uid)):
        stored += len(job.promised)
        if stored > MAX_STORED:
            break
        placements = tuple(PromisedPlacement(one.node, one.devices, one.part) for one in job.promised)
        found.append(Promise(job.uid, job.promised_at, placements))
    return tuple(found)


def stored_promises(quota: GpuQuota, state: State) -> Iterator[tuple[str, tuple[Placement, ...], float]]:
    """Yield (uid, placements, time) of the stored promises of jobs that the team still has."""
    for promise in quota.status.promises:
        job = state.jobs.get(promise.job)
        if job is not None and job.queue.name == quota.metadata.name:
            yield promise.job, tuple(Placement(p.node, p.devices, p.part) for p in promise.placements), promise.at
