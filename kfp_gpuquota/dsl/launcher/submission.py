"""Submits the job of a step, or takes over the job of an earlier attempt of it."""

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
    from kfp_gpuquota.dsl.launcher.worker_location import WorkerLocation
    from kfp_gpuquota.server.cluster_api import ClusterApi


def claim(
    client: ClusterApi, location: WorkerLocation, step: Step, lease: Lease, log_line: Callable[[str], None]
) -> tuple[Job, Staging]:
    """Return the step's job, whose lease is held by `lease.holder` from now on, and its staging directories.

    A running job of this step is taken over; one that succeeded is returned if its outputs have not been published yet.
    A job that failed, was cancelled or has published its outputs stays listed, and the new job gets the next number.
    Raises NotFoundError for an unknown project, InvalidFieldError for a job that the cluster could never run.
    """
    for number in itertools.count(1):
        name = numbered(step.job_name, number)
        staging = Staging(step.executor_input, name)
        job = (
            _existing(client, step.project, name)
            or _submitted(location, step, name, staging, lease)
            or _existing(client, step.project, name)
        )
        if job is not None and _usable(location, job, staging) and _taken_over(client, job, lease):
            log_line(f"job {name} in project {step.project}")
            if not job.status.phase.final:
                location.serve(step, job, staging)
            return job, staging
    raise AssertionError


def _usable(location: WorkerLocation, job: Job, staging: Staging) -> bool:
    if job.status.phase is Phase.SUCCEEDED:
        return staging.exists() and location.has_outputs(job, staging)
    return not job.status.phase.final


def _taken_over(client: ClusterApi, job: Job, lease: Lease) -> bool:
    """Take over the job's lease; return False where the job is being stopped or was deleted meanwhile."""
    if job.status.phase.final:
        return True
    try:
        client.renew_lease(job.spec.project, job.spec.name, msgspec.structs.replace(lease, take_over=True))
    except (ConflictError, NotFoundError):
        return False
    return True


def _existing(client: ClusterApi, project: str, name: str) -> Job | None:
    try:
        return client.get_job(project, name)
    except NotFoundError:
        return None


def _submitted(location: WorkerLocation, step: Step, name: str, staging: Staging, lease: Lease) -> Job | None:
    """Submit the job, and return it; None where another attempt has submitted it meanwhile."""
    try:
        return location.submit(step, name, staging, lease)
    except AlreadyExistsError:
        return None
    except UsageError as error:  # no attempt of this step can succeed; after another error the next attempt may
        staging.discard()
        error.args = (f"step {step.name!r}: {error.message}",)
        raise
