"""Where the workers of a step run: as processes beside the launcher, or in pods of their own."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast
from urllib.parse import quote

from kfp_gpuquota.cluster.connect import kube_context
from kfp_gpuquota.dsl import own_pod, worker
from kfp_gpuquota.dsl.pod_template import worker_template
from kfp_gpuquota.dsl.relay import Relay
from kfp_gpuquota.errors import AlreadyExistsError, GpuQuotaError, UsageError

if TYPE_CHECKING:
    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.wire import Lease
    from kfp_gpuquota.cluster.kubernetes.client import KubernetesClient
    from kfp_gpuquota.dsl.staging import Staging
    from kfp_gpuquota.dsl.step import Step
    from kfp_gpuquota.server.cluster_client import ClusterClient

Json = dict[str, Any]

POD_NAME: Final = "KFP_POD_NAME"
_WORKFLOWS: Final = "/apis/argoproj.io/v1alpha1"


class Place(Protocol):
    """How a step's job is submitted, how its workers reach the step's files, and who may have ended the run."""

    def identified(self, step: Step) -> Step:
        """The step with what tells it from every other, of its run and of others."""

    def submit(self, step: Step, name: str, staging: Staging, lease: Lease) -> Job:
        """Queue the step's job under this name."""

    def serve(self, step: Step, job: Job, staging: Staging) -> None:
        """The job is ours from now on: let its workers have the step's files, and bring theirs."""

    def run_was_ended(self) -> bool:
        """Whether somebody has terminated the pipeline's run, so that no other attempt will come."""

    def close(self) -> None:
        """The job has ended."""


def place_of(client: ClusterClient) -> Place:
    """Where this launcher's workers run."""
    if kube_context() is None:
        return Beside(client)
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
        command = (sys.executable, "-I", "-S", worker.__file__, str(staging.step_file))
        spec = step.options.job_spec(
            name=name, project=step.project, command=command, working_directory=str(Path.cwd()), labels=step.labels
        )
        return self._client.submit(spec, lease=lease)

    def serve(self, step: Step, job: Job, staging: Staging) -> None:
        """They see them."""

    def run_was_ended(self) -> bool:
        """Nobody says so here: a lease that ends does."""
        return False

    def close(self) -> None:
        """Nothing is open."""


class InPods:
    """Pods like the step's own. Its files travel through a relay in the launcher's pod."""

    def __init__(self, client: KubernetesClient) -> None:
        self._client = client
        self._own = _own_pod(client)
        self._relay: Relay | None = None

    def identified(self, step: Step) -> Step:
        """KFP's backend fills nothing of it in, and its environment does not say it: the pod's metadata does."""
        task = own_pod.task(self._own)
        return replace(step, run_id=own_pod.run_id(self._own), task=task, name=own_pod.name(task))

    def submit(self, step: Step, name: str, staging: Staging, lease: Lease) -> Job:
        """Queue the step's job under this name."""
        staging.create(step.argv, {})  # what its workers find in their environment stands in their template
        untouched = [worker.revealed(element, step.executor_input) for element in step.argv]
        template = worker_template(
            self._own, step.image, secret_name(name), untouched, resources=step.worker_resources, environment=os.environ
        )
        spec = step.options.job_spec(name=name, project=step.project, command=("step",), labels=step.labels)
        return self._client.submit(spec, lease=lease, template=template, checkpoint=step.options.checkpoint)

    def serve(self, step: Step, job: Job, staging: Staging) -> None:
        """Open the relay, and tell the workers where it is; after a take-over, where it is now.

        The step's file is written here too: the pod of an attempt that takes a job over begins with an empty directory,
        and workers that start later (in growth, or instead of others) read it.
        """
        staging.create(step.argv, {})
        address = self._own.get("status", {}).get("podIP")
        if not address:
            raise UsageError("the step's pod has no address yet that its workers could reach; try again")
        path = f"/api/v1/namespaces/{quote(job.spec.project)}/secrets"
        token = self._client.secret_value(job.spec.project, secret_name(job.spec.name), "token")
        self._relay = Relay(step.executor_input, staging, address, token)
        said = {"url": self._relay.url, "token": self._relay.token}
        owner = {"apiVersion": "gpuquota.dev/v1alpha1", "kind": "ElasticJob", "name": job.spec.name, "uid": job.uid}
        metadata = {"name": secret_name(job.spec.name), "ownerReferences": [owner]}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": said}
        try:
            self._client.calls.create(path, secret)
        except AlreadyExistsError:
            self._client.calls.patch(f"{path}/{quote(secret_name(job.spec.name))}", {"stringData": said})

    def run_was_ended(self) -> bool:
        """Whether the Workflow was terminated or stopped; one quick call.

        KFP terminates a run by `spec.activeDeadlineSeconds: 0`, Argo's own client by `spec.shutdown`.
        """
        workflow = own_pod.workflow(self._own)
        if not workflow:
            return False
        try:
            path = f"{_WORKFLOWS}/namespaces/{quote(self._client.namespace)}/workflows/{quote(workflow)}"
            spec = self._client.calls.get(path).get("spec", {})
            return bool(spec.get("shutdown")) or spec.get("activeDeadlineSeconds") == 0
        except GpuQuotaError:
            return False

    def close(self) -> None:
        """Stop the relay."""
        if self._relay:
            self._relay.close()


def secret_name(job: str) -> str:
    """Of the Secret that tells a job's workers where the relay is."""
    return f"{job}-relay"


def _own_pod(client: KubernetesClient) -> Json:
    name = os.environ.get(POD_NAME) or os.environ.get("HOSTNAME", "")
    try:
        return client.calls.get(f"/api/v1/namespaces/{quote(client.namespace)}/pods/{quote(name)}")
    except GpuQuotaError as error:
        raise UsageError(
            f"this step runs on Kubernetes, but its own pod {name!r} in namespace {client.namespace!r} cannot be read "
            f"({error.message}); its service account needs the role gpuquota-launcher"
        ) from error
