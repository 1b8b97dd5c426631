"""Kubernetes cluster for users: the same calls as the local cluster's, with the user's own credentials.

It calls the API server directly: RBAC decides what its user may do.
"""

from __future__ import annotations

import base64
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api import Phase
from kfp_gpuquota.api.job_sentences import name_taken, over
from kfp_gpuquota.api.project import check_run_time
from kfp_gpuquota.api.queue import Queued, queued
from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.api.wire import (
    EventList,
    Health,
    JobList,
    JobUpdate,
    Lease,
    LogChunk,
    Outlook,
    PageAddress,
    PageLink,
    StopAction,
    Supposition,
)
from kfp_gpuquota.cluster.kubernetes.objects import core_types, custom_types, labels, paths
from kfp_gpuquota.cluster.kubernetes.objects.job_fields import updated_fields
from kfp_gpuquota.cluster.kubernetes.user_client import debug_state, pod_explanation, views
from kfp_gpuquota.cluster.kubernetes.user_client.calls import RETRY_FOR_S, Calls
from kfp_gpuquota.cluster.kubernetes.user_client.pod_log import POLL_S, PodLog
from kfp_gpuquota.cluster.kubernetes.user_client.projects import ProjectCalls
from kfp_gpuquota.cluster.kubernetes.user_client.prometheus import gpu_hours_from, gpu_use_from, held_hours_from
from kfp_gpuquota.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidFieldError,
    NotFoundError,
    RunError,
    UnauthorizedError,
    UsageError,
)
from kfp_gpuquota.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kfp_gpuquota.api import Job, JobSpec
    from kfp_gpuquota.api.history import DeviceUse, GpuHours, HeldHours
    from kfp_gpuquota.cluster.kubernetes.user_client.connection import Connection

Json = dict[str, Any]

_TAKE_OVERS: Final = 10


class KubernetesClient(ProjectCalls):
    """The jobs and quotas of one API server. A project is a namespace. Raises the errors of `kfp_gpuquota.errors`."""

    def __init__(
        self, connection: Connection, *, image: str = "", context: str = "", retry_for_s: float = RETRY_FOR_S
    ) -> None:
        super().__init__(Calls(connection, retry_for_s=retry_for_s))
        self._image, self._context = image, context
        self._logs: dict[tuple[str, str], PodLog] = {}

    @property
    def runs_here(self) -> bool:
        """Return False: jobs run in pods."""
        return False

    @property
    def namespace(self) -> str:
        """Return the context's namespace, which is the default project."""
        return self.calls.connection.namespace

    def health(self) -> Health:
        """Return the version and the API server's URL."""
        return Health(version=__version__, pid=0, home=self.calls.connection.server, started_at=0.0)

    # Jobs

    def submit(
        self,
        spec: JobSpec,
        *,
        lease: Lease | None = None,
        request_id: str = "",
        dry_run: bool = False,
        template: Json | None = None,
        checkpoint: str = "",
        ttl_s: float | None = None,
        metadata: Json | None = None,
    ) -> Job:
        """Create an ElasticJob. Safe to repeat: the object carries the request's id. `checkpoint` names a volume claim.

        It is deleted `ttl_s` after its end; `metadata` are annotations and owner references of it. With `dry_run` the
        API server checks it, and stores nothing.

        Raises UsageError where neither a pod template nor an image is given, NotFoundError for the namespace,
        AlreadyExistsError for a name in use, InvalidFieldError for a longer run time than its project allows.
        """
        if spec.max_runtime_s is not None:
            with suppress(NotFoundError, UnauthorizedError):  # the controller checks it as well
                check_run_time("max_runtime_s", spec.max_runtime_s, self.get_project(spec.project).project)
        template = template or views.pod_template(spec, self._image)
        request_id = request_id or uuid.uuid4().hex
        wanted = views.elastic_job(
            spec,
            template,
            request_id=request_id,
            lease=lease,
            now=time.time(),
        )
        if checkpoint:
            wanted["spec"]["checkpoint"] = {"claimName": checkpoint}
        if ttl_s is not None:
            wanted["spec"]["ttlSecondsAfterFinished"] = ttl_s
        given = metadata or {}
        wanted["metadata"]["annotations"] |= given.get("annotations", {})
        wanted["metadata"]["ownerReferences"] = given.get("ownerReferences", [])
        try:
            made = self.calls.create(paths.jobs_of(spec.project), wanted, dry_run=dry_run)
        except AlreadyExistsError:
            made = self.calls.get(paths.job(spec.project, spec.name))
            if (made["metadata"].get("annotations") or {}).get(views.REQUEST_ID) != request_id:
                raise AlreadyExistsError(name_taken(spec.project, spec.name)) from None
        return views.job_of(msgspec.json.decode(msgspec.json.encode(made), type=custom_types.ElasticJob))

    def list_jobs(
        self, project: str = "", *, name: str = "", after: int | None = None, timeout_s: float = 0.0
    ) -> JobList:
        """Return all jobs, those of a project, or only its job `name`. With `after`: when one of them has changed since
        that revision, or after `timeout_s`.

        With a name the API server sends and watches only that job: otherwise each launcher of a project would read all
        its jobs after each change, at a cost of the square of their number.
        """
        if after is not None and timeout_s > 0:
            self._await_change(project, name, after, timeout_s)
        listed = self.calls.read(paths.jobs_of(project), core_types.Page[custom_types.ElasticJob], **_named(name))
        found = listed.items or []
        pods = self._pods(project, name) if found else {}
        jobs = []
        for each in found:
            with suppress(InvalidFieldError):
                jobs.append(views.job_of(each, pods.get((each.metadata.namespace, each.metadata.name), ())))
        return JobList(revision=int(listed.metadata.resource_version), jobs=tuple(jobs))

    def job_pages(self, project: str, size: int) -> Iterator[JobList]:
        """Yield all jobs, or those of a project, in one list, which the API server answers from its cache."""
        del size
        yield self.list_jobs(project)

    def queue(self, project: str) -> tuple[Queued, ...]:
        """Return the project's waiting jobs: ElasticJobs, and gated pods by their owners."""
        waiting = []
        for stored in self._items(paths.jobs_of(project), custom_types.ElasticJob):
            with suppress(InvalidFieldError):
                waiting.append(queued(views.job_of(stored)))
        path = join("/api/v1/namespaces", project, "pods")
        pods = self._items(path, core_types.Pod, fieldSelector="spec.nodeName=")
        return (*filter(None, waiting), *views.queued_pods(pods))

    def get_job(self, project: str, name: str) -> Job:
        """Return a job. Raises NotFoundError."""
        stored = self._found(project, name)
        return views.job_of(stored, self._pods(project, name).get((project, name), ()))

    def explain_pod(self, project: str, name: str) -> tuple[str, ...]:
        """Return what a pod that is no ElasticJob's holds or waits for, in lines; () if there is none."""
        return pod_explanation.explained(self.calls, project, name)

    def delete_job(self, project: str, name: str) -> None:
        """Stop and delete a job."""
        self._found(project, name)
        self.calls.delete(paths.job(project, name))

    def stop_jobs(self, project: str, names: Sequence[str], action: StopAction) -> None:
        """Stop all of these jobs; the API server has no transaction for several objects."""
        stop = {
            StopAction.DELETE: self.delete_job,
            StopAction.SUSPEND: self.suspend_job,
            StopAction.CANCEL: self.cancel_job,
        }[action]
        for name in names:
            stop(project, name)

    def cancel_job(self, project: str, name: str) -> Job:
        """Stop a job; it stays listed as Cancelled."""
        lease = views.job_lease(Lease(holder=views.CANCELLED, duration_s=0.0), time.time())
        self._found(project, name)
        self.calls.patch(paths.job(project, name), {"spec": {"lease": lease}})
        return self.get_job(project, name)

    def suspend_job(self, project: str, name: str) -> Job:
        """Stop a job after a checkpoint, and do not queue it again until it is resumed."""
        return self._set_suspended(project, name, suspended=True)

    def resume_job(self, project: str, name: str) -> Job:
        """Queue a suspended job again; it keeps its age."""
        return self._set_suspended(project, name, suspended=False)

    def renew_lease(self, project: str, name: str, lease: Lease) -> None:
        """Renew the job's lease. Raises ConflictError if another holder has acquired it, or the job is stopping."""
        if lease.take_over:
            self._take_over(project, name, lease)
            return
        renewed = views.job_lease(lease, time.time())
        try:
            self.calls.patch(
                paths.job(project, name),
                [
                    {"op": "test", "path": "/spec/lease/holder", "value": lease.holder},
                    {"op": "replace", "path": "/spec/lease", "value": renewed},
                ],
            )
        except UsageError as error:  # the test failed, or there is no lease
            if isinstance(error, NotFoundError):
                raise
            raise ConflictError(f"job {name!r} is not held by {lease.holder!r}: {error}") from None

    def _take_over(self, project: str, name: str, lease: Lease) -> None:
        """Acquire the lease in the version that was read; of two concurrent attempts only one succeeds."""
        for _ in range(_TAKE_OVERS):
            stored = self._found(project, name)
            if views.is_over(stored):
                raise ConflictError(f"job {name!r} is being stopped, and cannot be taken over; submit it again instead")
            version = {"op": "test", "path": "/metadata/resourceVersion", "value": stored.metadata.resource_version}
            change = {"op": "add", "path": "/spec/lease", "value": views.job_lease(lease, time.time())}
            try:
                self.calls.patch(paths.job(project, name), [version, change])
            except NotFoundError:
                raise
            except (ConflictError, UsageError):  # it has changed since it was read
                continue
            return
        raise ConflictError(
            f"job {name!r} was changed {_TAKE_OVERS} times during the attempt to take it over; try again"
        )

    def update_job(self, project: str, name: str, changed: JobUpdate) -> Job:
        """Change a job's priority; the API server refuses other size bounds than the job's own."""
        fields = updated_fields(views.job_of(self._not_over(project, name)).spec, changed)
        self.calls.patch(paths.job(project, name), {"spec": fields})
        return self.get_job(project, name)

    def what_if(self, supposed: Supposition) -> Outlook:
        """Return the effect of hypothetical changes on what the leading controller sees."""
        from kfp_gpuquota.cluster.whatif import outlook  # noqa: PLC0415 (a launcher plans nothing)
        from kfp_gpuquota.scheduler.dump import decode_dump, load_state  # noqa: PLC0415

        dump = decode_dump(self.debug_state())
        return outlook(load_state(dump), supposed, dump.at)

    def gpu_use(self, since_s: float, *, prometheus: str = "") -> Sequence[DeviceUse]:
        """Return the use of each GPU from the Prometheus that scrapes dcgm-exporter."""
        return gpu_use_from(_given(prometheus), since_s)

    def gpu_hours(self, since_s: float, *, prometheus: str = "") -> Sequence[GpuHours]:
        """Return the projects' GPU-hours from the Prometheus that scrapes the controller."""
        return gpu_hours_from(_given(prometheus), since_s)

    def held_hours(self, since_s: float, *, prometheus: str = "") -> Sequence[HeldHours]:
        """Return the same by user and type of GPU."""
        return held_hours_from(_given(prometheus), since_s)

    def debug_state(self) -> bytes:
        """Return what the leading controller sees. Raises UnauthorizedError without the rights."""
        return debug_state.read(self.calls, self._context)

    def open_page(self, address: PageAddress | None = None, *, log_out: bool = False) -> PageLink:
        """Raise UsageError: the page of a Kubernetes cluster is served there."""
        del address, log_out
        raise UsageError("the web page is one of the embedded cluster; leave out the context")

    def events(self, *, after: int = 0, timeout_s: float = 0.0) -> EventList:
        """Raise UsageError: Kubernetes has its own events, see `kubectl get events`."""
        del after, timeout_s
        raise UsageError("on Kubernetes events are objects; see: kubectl get events -n NAMESPACE")

    def secret_value(self, project: str, name: str, key: str) -> str:
        """Return a value of a Secret; "" if it does not exist."""
        try:
            found = self.calls.get(join("/api/v1/namespaces", project, "secrets", name))
        except NotFoundError:
            return ""
        return base64.b64decode(found.get("data", {}).get(key, "")).decode()

    # Logs

    def read_log(
        self, project: str, name: str, *, worker: str = "", offset: int = 0, timeout_s: float = 0.0
    ) -> LogChunk:
        """Return a part of a worker's log, by default of the first one; offsets are those of `objects.log_lines`."""
        pod = worker or self._first_worker(project, name)
        if not pod:
            time.sleep(min(POLL_S, timeout_s))
            over = self.get_job(project, name).status.phase.final
            return LogChunk(text=b"", next_offset=offset, more=not over)
        log = self._logs.get((project, pod))
        if log is None or log.offset != offset:
            if log is not None:
                log.close()
            log = self._logs[project, pod] = PodLog(self.calls, project, pod, offset)
        text, more = log.read(timeout_s)
        if not more:
            del self._logs[project, pod]
        return LogChunk(text=text, next_offset=log.offset, more=more)

    def stop_cluster(self) -> None:
        """Raise UsageError: a Kubernetes cluster cannot be stopped by this client."""
        raise UsageError("this command cannot stop a Kubernetes cluster; remove the controller with: kubectl delete -k")

    # Requests

    def _found(self, project: str, name: str) -> custom_types.ElasticJob:
        try:
            return self.calls.read(paths.job(project, name), custom_types.ElasticJob)
        except NotFoundError:
            raise NotFoundError(f"project {project!r} has no job {name!r}; see: gpuquota list -p {project}") from None

    def _set_suspended(self, project: str, name: str, *, suspended: bool) -> Job:
        self._not_over(project, name)
        why = {} if suspended else {"metadata": {"annotations": {labels.SUSPENDED: None}}}
        self.calls.patch(paths.job(project, name), {**why, "spec": {"suspend": suspended}})
        return self.get_job(project, name)

    def _not_over(self, project: str, name: str) -> custom_types.ElasticJob:
        stored = self._found(project, name)
        if views.is_over(stored):
            raise ConflictError(over(name, Phase(stored.status.phase)))
        return stored

    def _pods(self, project: str, name: str = "") -> dict[tuple[str, str], list[core_types.Pod]]:
        path = join("/api/v1/namespaces", project, "pods") if project else "/api/v1/pods"
        found: dict[tuple[str, str], list[core_types.Pod]] = {}
        for pod in self._items(path, core_types.Pod, labelSelector=f"{labels.JOB}={name}" if name else labels.JOB):
            found.setdefault((pod.metadata.namespace, pod.metadata.labels[labels.JOB]), []).append(pod)
        return found

    def _first_worker(self, project: str, name: str) -> str:
        job = self.get_job(project, name)
        return job.status.result_worker or next((worker.id for worker in job.status.workers), "")

    def _await_change(self, project: str, name: str, after: int, timeout_s: float) -> None:
        """Wait until one of the jobs has changed. A revision that is too old counts as a change."""
        query = {"watch": "true", "resourceVersion": after, "timeoutSeconds": int(timeout_s) or 1, **_named(name)}
        with suppress(RunError, UsageError), self.calls.open(paths.jobs_of(project), timeout_s + 5, **query) as stream:
            next(stream.lines(), None)


def _given(prometheus: str) -> str:
    if not prometheus:
        raise UsageError(
            "the history is in Prometheus; name it with --prometheus URL or GPUQUOTA_PROMETHEUS, for example "
            "after: kubectl -n monitoring port-forward service/prometheus 9090"
        )
    return prometheus


def _named(name: str) -> dict[str, str]:
    """Return the query that selects only the object with this name."""
    return {"fieldSelector": f"metadata.name={name}"} if name else {}
