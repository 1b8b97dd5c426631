"""The job of a step: the one that an earlier attempt left, or a new one."""

from __future__ import annotations

import contextlib
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_gpuquota.api import Phase, ReasonCode
from kfp_gpuquota.api.wire import Lease
from kfp_gpuquota.dsl import worker
from kfp_gpuquota.dsl.lease import DURATION_S
from kfp_gpuquota.dsl.naming import numbered
from kfp_gpuquota.dsl.staging import Staging
from kfp_gpuquota.errors import AlreadyExistsError, ConflictError, NotFoundError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.dsl.step import Step
    from kfp_gpuquota.server.client import Client


def claim(client: Client, step: Step, holder: str, say: Callable[[str], None]) -> tuple[Job, Staging]:
    """The step's job, held by `holder` from now on, and where its outputs are staged.

    A job of this step that still runs is taken over, one that succeeded is taken as it is if its outputs have not been
    brought home. One that failed, was cancelled or is done with stays listed, and a new one gets the next number.
    Raises NotFoundError for an unknown project, InvalidFieldError for a job that the cluster could never run.
    """
    lease = Lease(holder=holder, duration_s=DURATION_S)
    for number in itertools.count(1):
        name = numbered(step.job_name, number)
        staging = Staging(step.executor_input, name)
        job = (
            _existing(client, step.project, name)
            or _submitted(client, step, name, staging, lease)
            or _existing(client, step.project, name)
        )
        if job is not None and _usable(job, staging):
            if not job.status.phase.final:
                with contextlib.suppress(ConflictError):  # it has ended this very moment
                    client.renew_lease(step.project, name, lease)
            say(f"job {name} in project {step.project}")
            return job, staging
    raise AssertionError


def _usable(job: Job, staging: Staging) -> bool:
    if job.status.phase is Phase.SUCCEEDED:
        return staging.exists()
    orphaned = job.status.phase is Phase.STOPPING and _code(job) is ReasonCode.LEASE_ENDED
    return not job.status.phase.final and not orphaned


def _code(job: Job) -> ReasonCode | None:
    return job.status.reason.code if job.status.reason else None


def _existing(client: Client, project: str, name: str) -> Job | None:
    try:
        return client.get_job(project, name)
    except NotFoundError:
        return None


def _submitted(client: Client, step: Step, name: str, staging: Staging, lease: Lease) -> Job | None:
    """The new job; None where another attempt was faster."""
    staging.create(step.argv, step.environment)
    command = (sys.executable, "-I", "-S", worker.__file__, str(staging.step_file))
    spec = step.options.job_spec(
        name=name,
        project=step.project,
        command=command,
        working_directory=str(Path.cwd()),
        labels=step.labels,
    )
    try:
        return client.submit(spec, lease=lease)
    except AlreadyExistsError:
        return None
    except UsageError:  # no attempt of this step can run; after any other failure one may
        staging.discard()
        raise
