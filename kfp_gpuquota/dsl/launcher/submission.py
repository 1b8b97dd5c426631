"""The job of a step: the one that an earlier attempt left, or a new one."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api import Phase
from kfp_gpuquota.dsl.launcher.staging import Staging
from kfp_gpuquota.dsl.spec.naming import numbered
from kfp_gpuquota.errors import AlreadyExistsError, ConflictError, NotFoundError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.wire import Lease
    from kfp_gpuquota.dsl.launcher.step import Step
    from kfp_gpuquota.dsl.launcher.worker_location import Place
    from kfp_gpuquota.server.cluster_client import ClusterClient


def claim(
    client: ClusterClient, place: Place, step: Step, lease: Lease, say: Callable[[str], None]
) -> tuple[Job, Staging]:
    """The step's job, held by the lease's holder from now on, and where its outputs are staged.

    A job of this step that still runs is taken over, one that succeeded is taken as it is if its outputs have not been
    brought home. One that failed, was cancelled or is done with stays listed, and a new one gets the next number.
    Raises NotFoundError for an unknown project, InvalidFieldError for a job that the cluster could never run.
    """
    for number in itertools.count(1):
        name = numbered(step.job_name, number)
        staging = Staging(step.executor_input, name)
        job = (
            _existing(client, step.project, name)
            or _submitted(place, step, name, staging, lease)
            or _existing(client, step.project, name)
        )
        if job is not None and _usable(place, job, staging) and _taken_over(client, job, lease):
            say(f"job {name} in project {step.project}")
            if not job.status.phase.final:
                place.serve(step, job, staging)
            return job, staging
    raise AssertionError


def _usable(place: Place, job: Job, staging: Staging) -> bool:
    if job.status.phase is Phase.SUCCEEDED:
        return staging.exists() and place.has_outputs(job, staging)
    return not job.status.phase.final


def _taken_over(client: ClusterClient, job: Job, lease: Lease) -> bool:
    """Whether the job is ours from now on: not one that is being stopped for good, be it since this very moment."""
    if job.status.phase.final:
        return True
    try:
        client.renew_lease(job.spec.project, job.spec.name, msgspec.structs.replace(lease, take_over=True))
    except (ConflictError, NotFoundError):
        return False
    return True


def _existing(client: ClusterClient, project: str, name: str) -> Job | None:
    try:
        return client.get_job(project, name)
    except NotFoundError:
        return None


def _submitted(place: Place, step: Step, name: str, staging: Staging, lease: Lease) -> Job | None:
    """The new job; None where another attempt was faster."""
    try:
        return place.submit(step, name, staging, lease)
    except AlreadyExistsError:
        return None
    except UsageError as error:  # no attempt of this step can run; after any other failure one may
        staging.discard()
        error.args = (f"step {step.name!r}: {error.message}",)
        raise
