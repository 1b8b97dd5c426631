"""The synchronous client, for the command line, the launcher and notebooks.

It speaks HTTP with the standard library: importing aiohttp costs a command a quarter of a second, and a step's
launcher runs in images that we do not choose.
"""

from __future__ import annotations

import http.client
import os
import time
import uuid
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec

from kfp_gpuquota import errors
from kfp_gpuquota.api import Job, JobSpec, Project
from kfp_gpuquota.api.history import DeviceUse, GpuHours, HeldHours
from kfp_gpuquota.api.policy import WorkloadPolicy
from kfp_gpuquota.api.project import version_of
from kfp_gpuquota.api.queue import Queued, queued
from kfp_gpuquota.api.request_paths import join, with_query
from kfp_gpuquota.api.wire import (
    ErrorAnswer,
    EventList,
    Health,
    JobList,
    JobUpdate,
    Lease,
    LogChunk,
    MembersChange,
    NodeView,
    Outlook,
    PageAddress,
    PageLink,
    ProjectView,
    StopAction,
    StopJobs,
    SubmitJob,
    Supposition,
)
from kfp_gpuquota.backoff import Backoff
from kfp_gpuquota.server.response_decoding import decoded
from kfp_gpuquota.server.transport.unix_sockets import UnixConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

T = TypeVar("T")

REQUEST_TIMEOUT_S: Final = 10.0
RETRY_FOR_S: Final = 30.0
START: Final = "start it with: gpuquota cluster start"
_NO_ROUTE: Final = (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.METHOD_NOT_ALLOWED)
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0


class Client:
    """The client of one cluster. Each call has a time limit, and is repeated with growing delays without an answer.

    `locate` returns (the path of the cluster's socket, token); it is called again after a failed connection, and may
    start the daemon. Raises the errors of `kfp_gpuquota.errors`; after `retry_for_s` without an answer
    `ClusterUnavailableError` with the `remedy`.
    """

    def __init__(
        self, locate: Callable[[], tuple[Path, str]], *, retry_for_s: float = RETRY_FOR_S, remedy: str = START
    ) -> None:
        self._locate, self._remedy = locate, remedy
        self._retry_for_s = retry_for_s
        self._connection: UnixConnection | None = None
        self._token = ""
        self._version = ""  # that the present request is meant for
        self._owner_pid = os.getpid()

    @property
    def runs_here(self) -> bool:
        """Return True: jobs are programs of this machine."""
        return True

    # Projects and nodes

    def health(self) -> Health:
        """Return the version and the identity of the server."""
        return self._call("GET", "/v1/health", Health)

    def list_projects(self) -> tuple[ProjectView, ...]:
        """Return all projects, sorted by name."""
        return self._call("GET", "/v1/projects", tuple[ProjectView, ...])

    def get_project(self, name: str) -> ProjectView:
        """Return one project. Raises NotFoundError."""
        return self._call("GET", join("/v1/projects", name), ProjectView)

    def create_project(self, project: Project) -> ProjectView:
        """Create a project. Raises AlreadyExistsError."""
        return self._call("POST", "/v1/projects", ProjectView, project)

    def set_project(self, project: Project, *, expected: Project | None = None) -> ProjectView:
        """Create or replace a project. Raises ConflictError if it differs from `expected`."""
        version = version_of(expected) if expected else ""
        return self._call("PUT", join("/v1/projects", project.name), ProjectView, project, if_match=version)

    def change_members(self, project: str, change: MembersChange) -> ProjectView:
        """Add and remove members of a project. Raises ConflictError on a cluster that several users do not share."""
        return self._call("POST", join("/v1/projects", project, "members"), ProjectView, change)

    def explain_pod(self, project: str, name: str) -> tuple[str, ...]:
        """Return (): on this cluster there are no pods."""
        del project, name
        return ()

    def quota_gap(self, name: str) -> str:
        """Return "": on this cluster every workload is a project's job."""
        del name
        return ""

    def delete_project(self, name: str) -> None:
        """Delete an empty project. Raises ConflictError while it has jobs."""
        self._call("DELETE", join("/v1/projects", name), None)

    def list_policies(self) -> tuple[WorkloadPolicy, ...]:
        """Return all policies, sorted by name."""
        return self._call("GET", "/v1/policies", tuple[WorkloadPolicy, ...])

    def set_policy(self, policy: WorkloadPolicy) -> WorkloadPolicy:
        """Create or replace a policy; its limits apply to later submissions."""
        return self._call("PUT", join("/v1/policies", policy.name), WorkloadPolicy, policy)

    def delete_policy(self, name: str) -> None:
        """Delete a policy. Raises NotFoundError."""
        self._call("DELETE", join("/v1/policies", name), None)

    def list_nodes(self) -> tuple[NodeView, ...]:
        """Return all nodes and the workers that hold their devices."""
        return self._call("GET", "/v1/nodes", tuple[NodeView, ...])

    # Jobs

    def submit(self, spec: JobSpec, *, lease: Lease | None = None, request_id: str = "", dry_run: bool = False) -> Job:
        """Queue a job, or with `dry_run` only check it. Safe to repeat: the request has a unique id.

        Raises NotFoundError for an unknown project, AlreadyExistsError for a name in use, InvalidFieldError.
        """
        body = SubmitJob(spec=spec, request_id=request_id or uuid.uuid4().hex, lease=lease, dry_run=dry_run)
        return self._call("POST", "/v1/jobs", Job, body)

    def list_jobs(
        self, project: str = "", *, name: str = "", after: int | None = None, timeout_s: float = 0.0
    ) -> JobList:
        """All jobs, a project's, or its job of that `name` alone. With `after`: once the revision is beyond it, or
        `timeout_s` is over.
        """
        path = with_query("/v1/jobs", project=project, after=after, timeout_s=timeout_s)
        listed: JobList = self._call("GET", path, JobList, wait_s=timeout_s)
        if not name:
            return listed
        return JobList(revision=listed.revision, jobs=tuple(job for job in listed.jobs if job.spec.name == name))

    def job_pages(self, project: str, size: int) -> Iterator[JobList]:
        """Yield all jobs, or a project's, in lists of at most `size`."""
        page = ""
        while True:
            path = with_query("/v1/jobs", project=project, limit=size, page=page)
            listed: JobList = self._call("GET", path, JobList)
            yield listed
            page = listed.next_page
            if not page:
                return

    def update_job(self, project: str, name: str, changed: JobUpdate) -> Job:
        """Change a job's size bounds or its priority. Raises ConflictError after its end."""
        return self._call("POST", _job_path(project, name) + "/update", Job, changed)

    def queue(self, project: str) -> tuple[Queued, ...]:
        """Return the waiting jobs of the project, unordered."""
        return tuple(filter(None, map(queued, self.list_jobs(project).jobs)))

    def get_job(self, project: str, name: str) -> Job:
        """Return one job. Raises NotFoundError."""
        return self._call("GET", _job_path(project, name), Job)

    def delete_job(self, project: str, name: str) -> None:
        """Stop the job if it runs, then delete its record, logs and checkpoints."""
        self._call("DELETE", _job_path(project, name), None)

    def stop_jobs(self, project: str, names: Sequence[str], action: StopAction) -> None:
        """Stop all of these jobs in one transaction, before the next plan. Raises NotFoundError, ConflictError."""
        stopped = StopJobs(names=tuple(names), action=action)
        self._call("POST", join("/v1/projects", project, "stop-jobs"), None, stopped)

    def cancel_job(self, project: str, name: str) -> Job:
        """Stop the job; it stays listed as Cancelled."""
        return self._call("POST", _job_path(project, name) + "/cancel", Job)

    def suspend_job(self, project: str, name: str) -> Job:
        """Stop the job after a checkpoint and keep it out of the queue until it is resumed."""
        return self._call("POST", _job_path(project, name) + "/suspend", Job)

    def resume_job(self, project: str, name: str) -> Job:
        """Return a suspended job to the queue with its age."""
        return self._call("POST", _job_path(project, name) + "/resume", Job)

    def renew_lease(self, project: str, name: str, lease: Lease) -> None:
        """Renew the job's lease for `lease.duration_s`. Raises ConflictError if another holder took it over."""
        self._call("POST", _job_path(project, name) + "/lease", None, lease)

    def what_if(self, supposed: Supposition) -> Outlook:
        """Return the effect of hypothetical changes. Raises NotFoundError for an unknown job or node."""
        return self._call("POST", "/v1/what-if", Outlook, supposed)

    def gpu_use(self, since_s: float, *, prometheus: str = "") -> Sequence[DeviceUse]:
        """Return the use of each GPU in the last `since_s` seconds, from the cluster's own memory."""
        del prometheus
        return self._call("GET", with_query("/v1/gpu-use", since_s=since_s), tuple[DeviceUse, ...])

    def gpu_hours(self, since_s: float, *, prometheus: str = "") -> Sequence[GpuHours]:
        """Return the projects' GPU-hours of the last `since_s` seconds, the most first, from the cluster's own file."""
        del prometheus
        return self._call("GET", with_query("/v1/usage", since_s=since_s), tuple[GpuHours, ...])

    def held_hours(self, since_s: float, *, prometheus: str = "") -> Sequence[HeldHours]:
        """Return the same by user and type of GPU."""
        del prometheus
        return self._call("GET", with_query("/v1/usage/holders", since_s=since_s), tuple[HeldHours, ...])

    def debug_state(self) -> bytes:
        """Return what the planner sees as JSON, for `gpuquota simulate --state`."""
        return bytes(self._call("GET", "/v1/debug/state", msgspec.Raw))

    def events(self, *, after: int = 0, timeout_s: float = 0.0) -> EventList:
        """Return the cluster's history after a revision; wait up to `timeout_s` for at least one entry."""
        path = with_query("/v1/events", after=after, timeout_s=timeout_s)
        return self._call("GET", path, EventList, wait_s=timeout_s)

    def read_log(
        self, project: str, name: str, *, worker: str = "", offset: int = 0, timeout_s: float = 0.0
    ) -> LogChunk:
        """Return a part of a worker's log from byte `offset`, of the job's first worker unless another is named.

        Waits up to `timeout_s` for something new.
        """
        path = join(_job_path(project, name), "logs")
        path = with_query(path, worker=worker, offset=offset, timeout_s=timeout_s)
        return self._call("GET", path, LogChunk, wait_s=timeout_s)

    def open_page(self, address: PageAddress | None = None, *, log_out: bool = False) -> PageLink:
        """Make the daemon serve the web page, and return a link that opens it once.

        With an address the page is served for it from now on; with `log_out` no browser's cookie is valid any more.
        """
        at = {} if address is None else {"origin": address.origin, "base_path": address.base_path or "/"}
        path = with_query("/v1/page", **at, log_out="true" if log_out else "")
        return self._call("POST", path, PageLink)

    def stop_cluster(self) -> None:
        """Stop the daemon. Running jobs continue under their shims and are adopted by the next daemon."""
        self._call("POST", "/v1/shutdown", None)

    # Transport

    def _call(
        self,
        method: str,
        path: str,
        answer: type[T] | Any,
        body: object = None,
        *,
        wait_s: float = 0.0,
        if_match: str = "",
    ) -> T:
        encoded = b"" if body is None else msgspec.json.encode(body)
        self._version = if_match
        response, raw = self._request(method, path, encoded, wait_s)
        if response.status >= 300:
            raise _error(response.status, raw, f"{method} {path.partition('?')[0]}")
        return cast("T", None) if answer is None else cast("T", decoded(raw, answer))

    def _request(self, method: str, path: str, body: bytes, wait_s: float) -> tuple[http.client.HTTPResponse, bytes]:
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, limit_s=self._retry_for_s + wait_s)
        while True:
            try:
                response, raw = self._attempt(method, path, body, REQUEST_TIMEOUT_S + wait_s)
            except (OSError, http.client.HTTPException) as failure:
                self._forget_connection()
                if backoff.exhausted:
                    message = f"the cluster does not answer ({failure}); {self._remedy}"
                    raise errors.ClusterUnavailableError(message) from failure
            else:
                if response.status != 503 or backoff.exhausted:
                    return response, raw
            time.sleep(backoff.next_s())

    def _attempt(self, method: str, path: str, body: bytes, timeout_s: float) -> tuple[http.client.HTTPResponse, bytes]:
        connection = self._connect(timeout_s)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        if self._version:
            headers["If-Match"] = self._version
        connection.request(method, path, body=body or None, headers=headers)
        with connection.getresponse() as response:
            # Otherwise garbage collection would close it in Python code whose exceptions are dropped: also
            # the one by which a signal's handler ends the program.
            return response, response.read()

    def _connect(self, timeout_s: float) -> UnixConnection:
        if self._connection is None or self._owner_pid != os.getpid():
            path, self._token = self._locate()
            self._connection = UnixConnection(path, timeout_s)
            self._owner_pid = os.getpid()
        self._connection.timeout = timeout_s
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        return self._connection

    def _forget_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _job_path(project: str, name: str) -> str:
    return join("/v1/projects", project, "jobs", name)


def _error(status: int, raw: bytes, request: str) -> errors.GpuQuotaError:
    try:
        body = msgspec.json.decode(raw, type=ErrorAnswer).error
    except msgspec.DecodeError:
        return errors.RunError(f"the server answered {status}: {raw[:200].decode(errors='replace')}")
    if status in _NO_ROUTE and body.code == errors.UsageError.code:
        return errors.RunError(
            f"the cluster's daemon does not know {request}: it is of an earlier version than this command; restart it "
            "with gpuquota cluster stop, then gpuquota cluster start (running jobs go on)"
        )
    error = errors.GpuQuotaError.__new__(errors.by_code(body.code))
    error.args = (body.message,)
    if isinstance(error, errors.InvalidFieldError):
        error.field, error.value, error.rule = body.field, None, body.rule
    return error
