"""Where the workers of a step run: as processes beside the launcher, or in pods of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from kfp_gpuquota.cluster.connect import kube_context
from kfp_gpuquota.dsl.worker import start

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.wire import Lease
    from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient
    from kfp_gpuquota.dsl.launcher.staging import Staging
    from kfp_gpuquota.dsl.launcher.step import Step
    from kfp_gpuquota.server.cluster_client import ClusterClient


class Place(Protocol):
    """How a step's job is submitted, how its workers reach the step's files, and what ends the step."""

    def identified(self, step: Step) -> Step:
        """The step with what tells it from every other, of its run and of others."""

    def submit(self, step: Step, name: str, staging: Staging, lease: Lease) -> Job:
        """Queue the step's job under this name."""

    def serve(self, step: Step, job: Job, staging: Staging) -> None:
        """The job is ours from now on: let its workers have the step's files, and bring theirs."""

    def has_outputs(self, job: Job, staging: Staging) -> bool:
        """Whether the outputs of a job that succeeded can be brought home."""

    def result_of(self, job: Job) -> str:
        """The worker that is the job's result, where that is certain before the cluster has seen it end; else ""."""

    def watch_run(self, ended: Callable[[], None]) -> None:
        """Call `ended`, from another thread, when the pipeline's run is terminated."""

    def make_way(self) -> bool:
        """This attempt was stopped: whether another one of the step will come."""

    def show(self, state: str, progress: tuple[int, int] | None) -> None:
        """Make visible beside the log what the job does, and (steps done, of so many)."""

    def close(self) -> None:
        """The job has ended."""


def place_of(client: ClusterClient) -> Place:
    """Where this launcher's workers run."""
    if kube_context() is None:
        return Beside(client)
    from kfp_gpuquota.dsl.launcher.in_pods import InPods  # noqa: PLC0415 (on one machine none of it is needed)

    return InPods(cast("KubernetesClient", client))


class Beside:
    """Processes of this machine, which see the same files."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client

    def identified(self, step: Step) -> Step:
        """It is: kfp.local says all of it in the arguments."""
        return step

    def submit(self, step: Step, name: str, staging: Staging, lease: Lease) -> Job:
        """Queue the step's job under this name."""
        staging.create(step.argv, step.environment)
        command = (sys.executable, "-I", "-S", start.__file__, str(staging.step_file))
        spec = step.options.job_spec(
            name=name, project=step.project, command=command, working_directory=str(Path.cwd()), labels=step.labels
        )
        return self._client.submit(spec, lease=lease)

    def serve(self, step: Step, job: Job, staging: Staging) -> None:
        """They see them."""

    def has_outputs(self, job: Job, staging: Staging) -> bool:
        """They were written beside their final places; another attempt may have brought them home since."""
        del job, staging
        return True

    def result_of(self, job: Job) -> str:
        """The cluster sees its processes end at once."""
        del job
        return ""

    def watch_run(self, ended: Callable[[], None]) -> None:
        """Nothing says so here: a lease that expires does."""

    def make_way(self) -> bool:
        """A new attempt may take the job over."""
        return True

    def show(self, state: str, progress: tuple[int, int] | None) -> None:
        """The log says it."""

    def close(self) -> None:
        """Nothing is open."""
