"""Arrays of jobs: `gpuquota submit --array`, and commands that name an array instead of its jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api.start_conditions import INDEX_VARIABLE, ArrayTask
from kfp_gpuquota.api.wire import StopAction
from kfp_gpuquota.errors import GpuQuotaError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kfp_gpuquota.api import Job, JobSpec
    from kfp_gpuquota.cli.arguments.start_conditions import Array
    from kfp_gpuquota.server.cluster_api import ClusterApi


def specs_of(spec: JobSpec, array: Array) -> list[JobSpec]:
    """Return the jobs of an array: each has its index in its name and in its environment."""
    return [
        msgspec.structs.replace(
            spec,
            name=f"{spec.name}-{index}",
            environment={**spec.environment, INDEX_VARIABLE: str(index)},
            array=ArrayTask(name=spec.name, index=index, limit=array.limit),
        )
        for index in array.indices
    ]


def submit_all(reached: ClusterApi, specs: Sequence[JobSpec]) -> list[Job]:
    """Submit the jobs; if one is refused, or the user interrupts it, those before it are deleted again.

    Raises what the cluster answered.
    """
    made: list[Job] = []
    try:
        for spec in specs:
            made.append(reached.submit(spec))  # noqa: PERF401 (those that were made are needed after an error)
    except (GpuQuotaError, KeyboardInterrupt):
        if made:
            reached.stop_jobs(specs[0].project, [job.spec.name for job in made], StopAction.DELETE)
        raise
    return made


def arrays_in(jobs: Iterable[Job]) -> dict[str, list[str]]:
    """Return the names of each array's jobs, in the order of their indices."""
    members: dict[str, list[tuple[int, str]]] = {}
    for job in jobs:
        if (array := job.spec.array) is not None:
            members.setdefault(array.name, []).append((array.index, job.spec.name))
    return {name: [job for _, job in sorted(of)] for name, of in members.items()}


def one_job(reached: ClusterApi, project: str, name: str) -> Job:
    """Return the job. Raises NotFoundError, which says what to name where `name` is that of an array."""
    try:
        return reached.get_job(project, name)
    except NotFoundError:
        if members := arrays_in(reached.list_jobs(project).jobs).get(name):
            raise NotFoundError(
                f"{name} is an array of {len(members)} jobs; name one of them, as {members[0]}"
            ) from None
        raise


def expanded(names: Iterable[str], listed: Sequence[Job], *, ended: bool = True) -> list[str]:
    """Return the names with the jobs of an array in the place of its name, those that have `ended` among them or not.

    A name that is a job's own is that job.
    """
    own = {job.spec.name for job in listed}
    arrays = arrays_in(job for job in listed if ended or not job.status.phase.final)
    return [each for name in names for each in ([name] if name in own else arrays.get(name, [name]))]


def with_members(reached: ClusterApi, project: str, names: Sequence[str], *, ended: bool = True) -> list[str]:
    """Return the names as `expanded` does, each once. Jobs are listed only if a name is no job's."""
    try:
        for name in names:
            reached.get_job(project, name)
    except NotFoundError:
        names = expanded(names, reached.list_jobs(project).jobs, ended=ended)
    return list(dict.fromkeys(names))
