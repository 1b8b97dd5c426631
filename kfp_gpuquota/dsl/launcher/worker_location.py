"""The locations of a step's workers: processes on the launcher's machine, or separate pods."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kfp_gpuquota.dsl.worker import start

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.wire import Lease
    from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient
    from kfp_gpuquota.dsl.launcher.staging import Staging
    from kfp_gpuquota.dsl.launcher.step import Step
    from kfp_gpuquota.server.cluster_api import ClusterApi


class WorkerLocation(Protocol):
    """Submits a step's job, gives its workers access to the step's files, and watches the pipeline's run."""

    def with_identity(self, step: Step) -> Step:
        """Return the step with the identity of its run and its task."""

    def submit(self, step: Step, name: str, staging: Staging, lease: Lease) -> Job:
        """Submit the step's job under this name."""

    def serve(self, step: Step, job: Job, staging: Staging) -> None:
        """Give the job's workers access to the step's files; called once this attempt holds the job's lease."""

    def has_outputs(self, job: Job, staging: Staging) -> bool:
        """Return whether the outputs of a job that succeeded can be published by this attempt."""

    def result_worker_of(self, job: Job) -> str:
        """Return the worker whose success decides the job before the cluster has noticed its exit; else ""."""

    def watch_run(self, ended: Callable[[str], None]) -> None:
        """Call `ended` from another thread, with the reason, when the pipeline's run is over."""

    def timeout(self) -> str:
        """Return which time limit the step has reached, as a sentence; "" if it has not."""

    def prepare_next_attempt(self) -> bool:
        """Return whether another attempt of the step will follow this one, which was stopped."""

    def publish_state(self, state: str, progress: tuple[int, int] | None) -> None:
        """Publish the job's state and (finished steps, total steps) outside the log, where users see it."""

    def close(self) -> None:
        """Stop watching the run, because the job has ended."""


def worker_location(client: ClusterApi) -> WorkerLocation:
    """Return the location of this launcher's workers: this machine, or pods with a Kubernetes context."""
    if client.runs_here:
        return LocalWorkers(client)
    from kfp_gpuquota.dsl.launcher.pod_workers import PodWorkers  # noqa: PLC0415 (on one machine none of it is needed)

    return PodWorkers(in_pods(client))


def in_pods(client: ClusterApi) -> KubernetesClient:
    """Return the client of a cluster whose jobs are pods, with the calls that only such a cluster has."""
    from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient  # noqa: PLC0415 (see above)

    assert isinstance(client, KubernetesClient)
    return client


class LocalWorkers:
    """Workers that are processes on this machine and use the same files."""

    def __init__(self, client: ClusterApi) -> None:
        self._client = client

    def with_identity(self, step: Step) -> Step:
        """Return the step unchanged: kfp.local passes its identity in the arguments."""
        return step

    def submit(self, step: Step, name: str, staging: Staging, lease: Lease) -> Job:
        """Submit the step's job under this name."""
        staging.create(step.argv, step.environment)
        command = (sys.executable, "-I", "-S", start.__file__, str(staging.step_file))
        spec = step.options.job_spec(
            name=name, project=step.project, command=command, working_directory=str(Path.cwd()), labels=step.labels
        )
        return self._client.submit(spec, lease=lease)

    def serve(self, step: Step, job: Job, staging: Staging) -> None:
        """Do nothing: the workers use the same file system."""

    def has_outputs(self, job: Job, staging: Staging) -> bool:
        """Return True: the outputs are on this file system. Another attempt may have published them meanwhile."""
        del job, staging
        return True

    def result_worker_of(self, job: Job) -> str:
        """Return "": the cluster notices the exit of its processes at once."""
        del job
        return ""

    def watch_run(self, ended: Callable[[str], None]) -> None:
        """Do nothing: there is no run to watch on one machine; the job ends when its lease expires."""

    def timeout(self) -> str:
        """Return "": kfp.local has no time limits."""
        return ""

    def prepare_next_attempt(self) -> bool:
        """Return True: a new attempt may take the job over."""
        return True

    def publish_state(self, state: str, progress: tuple[int, int] | None) -> None:
        """Do nothing: the log contains it."""

    def close(self) -> None:
        """Do nothing: no run is watched."""
