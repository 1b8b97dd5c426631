"""The workers of a step in separate pods, and the launcher's own pod, which Argo Workflows manages."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.api import WorkerPhase
from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.cluster.kubernetes.elasticjob import workflows
from kfp_gpuquota.cluster.kubernetes.objects import labels, paths
from kfp_gpuquota.cluster.kubernetes.user_client.calls import Calls
from kfp_gpuquota.dsl.launcher.run_watch import RunWatch
from kfp_gpuquota.dsl.spec import step_pod
from kfp_gpuquota.dsl.spec.pod_template import PROGRAM, worker_template
from kfp_gpuquota.dsl.worker import start as worker
from kfp_gpuquota.errors import (
    AlreadyExistsError,
    ClusterUnavailableError,
    GpuQuotaError,
    JobFailedError,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.wire import Lease
    from kfp_gpuquota.cluster.kubernetes.user_client.client import KubernetesClient
    from kfp_gpuquota.dsl.launcher.relay import Relay
    from kfp_gpuquota.dsl.launcher.staging import Staging
    from kfp_gpuquota.dsl.launcher.step import Step

Json = dict[str, Any]

POD_NAME: Final = "KFP_POD_NAME"
TTL_S: Final = 86_400.0
"""A finished job stays listed for a day, as KFP's Workflows do; it is deleted earlier when its Workflow is deleted."""
STATE: Final = "kfp.gpuquota.dev/state"
"""Annotation of the step's pod: what its job does or waits for. KFP shows the pod as running during all of it."""
# The training survives the eviction of its launcher, but autoscalers should not evict one without need. A
# PodDisruptionBudget was rejected: it would block every drain of the node until the step ends.
DO_NOT_EVICT: Final = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
_RUN_IS_OVER: Final = "its pipeline's run was terminated, or has ended"
_PROGRESS_FILE: Final = "ARGO_PROGRESS_FILE"


class PodWorkers:
    """Workers in pods that are copies of the step's pod. A relay in the launcher's pod transfers the step's files."""

    def __init__(self, client: KubernetesClient) -> None:
        self._client = client
        self._own = own_pod(client)
        self._relay: Relay | None = None
        self._watch: RunWatch | None = None
        self._shown = ""
        self._uid = str(self._own["metadata"]["uid"])
        self._delivered: set[str] = set()

    def with_identity(self, step: Step) -> Step:
        """Return the step with its run, task and name from the pod's metadata; KFP's backend does not pass them on."""
        task = step_pod.task(self._own)
        pipeline = workflows.pipeline_of(step_pod.workflow(self._own))
        return replace(step, run_id=step_pod.run_id(self._own), task=task, name=step_pod.name(task), pipeline=pipeline)

    def submit(self, step: Step, name: str, staging: Staging, lease: Lease) -> Job:
        """Submit the step's job under this name; its workers wait for the relay, which `serve` opens."""
        del staging
        template = template_of(self._own, step, name)
        spec = step.options.job_spec(
            name=name,
            project=step.project,
            command=("step",),
            labels=step.labels,
            resource_claim_template=step.options.resource_claim_template,
        )
        metadata: Json = {"annotations": {labels.STEP: step.task}}
        owner = step_pod.owner(self._own)
        if owner is not None and step.project == self._client.namespace:  # owner references do not cross namespaces
            metadata["ownerReferences"] = [owner]
        return self._client.submit(
            spec, lease=lease, template=template, checkpoint=step.options.checkpoint, ttl_s=TTL_S, metadata=metadata
        )

    def serve(self, step: Step, job: Job, staging: Staging) -> None:
        """Open the relay, and publish its address to the workers, also when this attempt has taken the job over.

        The step file is written first: the pod of an attempt that takes a job over begins with an empty directory,
        and workers that start later (expansion or replacement) read it.
        """
        from kfp_gpuquota.dsl.launcher.relay import Relay  # noqa: PLC0415 (imported while the workers' pods start)

        if self._relay is not None:  # of an attempt to serve the job that the API server did not answer
            self._relay.close()
        staging.create(step.argv, {})  # the workers' environment is in their pod template
        token = self._client.secret_value(job.spec.project, secret_name(job.spec.name), "token")
        self._relay = Relay(
            step.executor_input, staging, address_of(self._own), token, partial(self._note_outputs, job)
        )
        owner = {"apiVersion": labels.API_VERSION, "kind": "ElasticJob", "name": job.spec.name, "uid": job.uid}
        publish(self._client.calls, self._relay, job.spec.project, job.spec.name, owner)

    def has_outputs(self, job: Job, staging: Staging) -> bool:
        """Return whether this pod has the outputs of a job that succeeded.

        It has not where the worker uploaded them to the pod of an earlier attempt, which was deleted before it had
        published them. Raises JobFailedError where no attempt has received them.
        """
        result = job.status.result_worker or ""
        if result in self._delivered:
            return True
        metadata = self._client.calls.get(paths.job(job.spec.project, job.spec.name))["metadata"]
        annotations: dict[str, str] = metadata.get("annotations", {})
        uploaded_to = annotations.get(_outputs_annotation(result))
        if uploaded_to is None and (names := staging.declared()):
            raise JobFailedError(
                f"the job succeeded, but its outputs did not arrive: {', '.join(names)}; if its workers run in an "
                "image without Python and were started by release 0.2, run the step again"
            )
        return uploaded_to in {None, self._uid}

    def result_worker_of(self, job: Job) -> str:
        """Return the worker of a job of fixed size 1 as soon as it has uploaded its outputs, else "".

        Its command has succeeded then. The kubelet and the controller need seconds to notice; the step need not wait.
        """
        alive = [each.id for each in job.status.workers if each.phase is not WorkerPhase.GONE]
        single = not job.spec.elastic and job.spec.gpus == job.spec.worker_gpus
        return alive[0] if single and len(alive) == 1 and alive[0] in self._delivered else ""

    def watch_run(self, ended: Callable[[str], None]) -> None:
        """Call `ended` from another thread, with the reason, when the run is over."""
        if name := step_pod.workflow(self._own):
            calls = Calls(self._client.calls.connection, retry_for_s=0.0)
            self._watch = RunWatch(calls, self._client.namespace, name, lambda: ended(self.timeout() or _RUN_IS_OVER))
            self._watch.start()

    def timeout(self) -> str:
        """Return that the step has reached KFP's time limit, or ""."""
        if not step_pod.timed_out(self._own, time.time()):
            return ""
        limit_s = step_pod.timeout_s(self._own)
        return f"the step has reached its timeout of {limit_s:g} s, which KFP counts from its pod's start"

    def prepare_next_attempt(self) -> bool:
        """Return whether another attempt of the step will follow; then this pod is deleted at once.

        Argo retries a step whose pod was deleted, but not one whose pod it has seen in phase Failed. A pod that is
        deleted gracefully, or whose node shuts down, is Failed for a moment first; one deleted with grace period 0 is
        not.
        """
        calls = Calls(self._client.calls.connection, retry_for_s=0.0)  # there is no time for more attempts
        if self._run_is_over(calls):
            return False
        with contextlib.suppress(GpuQuotaError):  # without permission to delete it, Argo may see it Failed
            calls.delete(self._own_path(), gracePeriodSeconds=0, preconditions={"uid": self._uid})
        return True

    def publish_state(self, state: str, progress: tuple[int, int] | None) -> None:
        """Write the job's state to an annotation of the step's pod and the progress to Argo's file; best effort."""
        if progress is not None and (file := os.environ.get(_PROGRESS_FILE)):
            with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as written:  # noqa: PTH123
                written.write(f"{progress[0]}/{progress[1]}\n")
        if state and state != self._shown:
            self._shown = state
            with contextlib.suppress(GpuQuotaError):
                self._client.calls.patch(
                    self._own_path(), {"metadata": {"annotations": {**DO_NOT_EVICT, STATE: state}}}
                )

    def close(self) -> None:
        """Stop the watch. The relay ends with the process: an orderly shutdown would take half a second."""
        if self._watch:
            self._watch.close()

    def _note_outputs(self, job: Job, worker: str) -> None:
        """Annotate the job with the pod to which the worker has uploaded its outputs. Raises GpuQuotaError.

        The main thread receives the change through the launcher's watch of its job.
        """
        if worker not in {f"{job.spec.name}-{index}" for index in (worker.rpartition("-")[2],) if index.isdecimal()}:
            raise UsageError(f"{worker!r} is not a worker of job {job.spec.name!r}")
        self._delivered.add(worker)
        calls = Calls(self._client.calls.connection, retry_for_s=0.0)  # the worker repeats its upload
        path = paths.job(job.spec.project, job.spec.name)
        calls.patch(path, {"metadata": {"annotations": {_outputs_annotation(worker): self._uid}}})

    def _run_is_over(self, calls: Calls) -> bool:
        if self._watch is None or self._watch.over.is_set():
            return self._watch is not None
        try:
            found = calls.get(workflows.path(self._client.namespace, step_pod.workflow(self._own)))
            return workflows.is_over(workflows.read(found))
        except GpuQuotaError:
            return False

    def _own_path(self) -> str:
        return join("/api/v1/namespaces", self._client.namespace, "pods", self._own["metadata"]["name"])


def own_pod(client: KubernetesClient) -> Json:
    """Return the pod in which this launcher runs. Raises UsageError if it may not be read, ClusterUnavailableError."""
    name, namespace = os.environ.get(POD_NAME) or os.environ.get("HOSTNAME", ""), client.namespace
    try:
        return client.calls.get(join("/api/v1/namespaces", namespace, "pods", name))
    except ClusterUnavailableError:
        raise
    except GpuQuotaError as error:
        raise UsageError(
            f"this step runs on Kubernetes, but its own pod {name!r} in namespace {namespace!r} cannot be read "
            f"({error.message}); its service account needs the role gpuquota-launcher"
        ) from error


def template_of(own: Json, step: Step, job: str) -> Json:
    """Return the pod template of the workers of a job of this step. Raises UsageError where they lack their program."""
    if not Path(PROGRAM).exists():
        raise UsageError(
            f"the image of the step's pod has no {PROGRAM}, which its workers need: route the pipeline with a "
            "launcher image (--launcher-image), or copy the file from the launcher's image into this one"
        )
    return worker_template(
        own,
        step.image,
        secret_name(job),
        resources=step.worker_resources,
        volumes=step.volumes,
        environment=os.environ,
        folders=worker.folders_of(step.executor_input),
    )


def address_of(own: Json) -> str:
    """Return the address of the step's own pod, where its workers find the relay. Raises UsageError."""
    if address := own.get("status", {}).get("podIP"):
        return str(address)
    raise UsageError("the step's pod has no IP address yet, which its workers need; try again")


def publish(calls: Calls, relay: Relay, namespace: str, job: str, owner: Json) -> None:
    """Write the relay's address, token and certificate authority to the Secret that the job's workers mount."""
    path, name = join("/api/v1/namespaces", namespace, "secrets"), secret_name(job)
    content = {"url": relay.url, "token": relay.token, "ca.crt": relay.authority}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "ownerReferences": [owner]},
        "stringData": content,
    }
    try:
        calls.create(path, secret)
    except AlreadyExistsError:
        calls.patch(join(path, name), {"stringData": content, "metadata": {"ownerReferences": [owner]}})


def _outputs_annotation(worker: str) -> str:
    """Return the name of the job's annotation with the UID of the pod to which this worker has uploaded its outputs."""
    return f"outputs.{labels.GROUP}/{worker.rpartition('-')[2]}"


def secret_name(job: str) -> str:
    """Return the name of the Secret with the address, the token and the certificate authority of a job's relay."""
    return f"{job}-relay"
