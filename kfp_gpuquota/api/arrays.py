"""Jobs of an array that are shown as one: those that wait, or that have ended in the same way. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.api.job import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kfp_gpuquota.api.job import Job


def groups_of(jobs: Iterable[Job]) -> list[list[Job]]:
    """Return the jobs in their order; those of an array in one phase are together where the first of them is.

    A job that runs, or that starts or stops, is alone.
    """
    found: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        array, phase = job.spec.array, job.status.phase
        together = array is not None and (phase is Phase.PENDING or phase.final)
        key = (job.spec.project, array.name if array else "", phase.value, job.owner) if together else (job.uid,)
        found.setdefault(key, []).append(job)
    return list(found.values())


def name_of(group: Sequence[Job]) -> str:
    """Return the name of a group: a job's own, or that of an array with the indices, as "sweep-[0-3,7]"."""
    first = group[0].spec
    if len(group) == 1 or first.array is None:
        return first.name
    indices = sorted(job.spec.array.index for job in group if job.spec.array is not None)
    return f"{first.array.name}-[{_ranges(indices)}]"


def reason_of(group: Sequence[Job]) -> str:
    """Return the first reason that a job of the group has; "" if none has any."""
    return next((job.status.reason.message for job in group if job.status.reason is not None), "")


def _ranges(indices: Sequence[int]) -> str:
    """Return ordered numbers as Slurm writes them: "0-3,7"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] + 1 == index:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
