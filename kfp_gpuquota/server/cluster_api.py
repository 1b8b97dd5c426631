"""The interface of every kind of cluster for programs: the embedded one over HTTP, or Kubernetes.

`server.client.Client` and `cluster.kubernetes.user_client.client.KubernetesClient` are the two. What one of them
cannot do raises UsageError with a sentence that says what to do instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kfp_gpuquota.api import Job, JobSpec, Project
    from kfp_gpuquota.api.history import DeviceUse, GpuHours, HeldHours
    from kfp_gpuquota.api.policy import WorkloadPolicy
    from kfp_gpuquota.api.queue import Queued
    from kfp_gpuquota.api.wire import (
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
        SubmitJob,
        Supposition,
    )
    from kfp_gpuquota.scheduler.dump import StateDump


LONG_POLL_S: Final = 25.0


class ClusterCalls(Protocol):
    """What the embedded cluster's daemon and both clients do; each call raises the errors of `kfp_gpuquota.errors`."""

    def list_projects(self) -> tuple[ProjectView, ...]:
        """Return all projects, sorted by name."""

    def get_project(self, name: str) -> ProjectView:
        """Return one project. Raises NotFoundError."""

    def create_project(self, project: Project) -> ProjectView:
        """Create a project. Raises AlreadyExistsError."""

    def change_members(self, project: str, change: MembersChange) -> ProjectView:
        """Add and remove members of a project of a cluster that several users share."""

    def delete_project(self, name: str) -> None:
        """Delete an empty project. Raises ConflictError while it has jobs."""

    def list_policies(self) -> tuple[WorkloadPolicy, ...]:
        """Return all policies, sorted by name."""

    def set_policy(self, policy: WorkloadPolicy) -> WorkloadPolicy:
        """Create or replace a policy."""

    def delete_policy(self, name: str) -> None:
        """Delete a policy. Raises NotFoundError."""

    def list_nodes(self) -> tuple[NodeView, ...]:
        """Return all nodes and the workers that hold their devices."""

    def get_job(self, project: str, name: str) -> Job:
        """Return one job. Raises NotFoundError."""

    def delete_job(self, project: str, name: str) -> None:
        """Stop the job and delete its record."""

    def stop_jobs(self, project: str, names: Sequence[str], action: StopAction) -> None:
        """Stop all of these jobs together, so that nothing is decided between one and the next."""

    def cancel_job(self, project: str, name: str) -> Job:
        """Stop the job; it stays listed."""

    def suspend_job(self, project: str, name: str) -> Job:
        """Stop the job and keep it out of the queue."""

    def update_job(self, project: str, name: str, changed: JobUpdate) -> Job:
        """Change the job's size bounds or its priority. Raises ConflictError after its end."""

    def resume_job(self, project: str, name: str) -> Job:
        """Return the job to the queue with its age."""

    def renew_lease(self, project: str, name: str, lease: Lease) -> None:
        """Renew the job's lease. Raises ConflictError if another holder took it over."""

    def what_if(self, supposed: Supposition) -> Outlook:
        """Return the effect of hypothetical changes. Raises NotFoundError for an unknown job or node."""


class ClusterApi(ClusterCalls, Protocol):
    """Every call has a time limit, and is repeated without an answer."""

    @property
    def runs_here(self) -> bool:
        """Return whether jobs are programs of this machine, which have its files, environment and ports."""

    def health(self) -> Health:
        """Return the version and the identity of the server."""

    def set_project(self, project: Project, *, expected: Project | None = None) -> ProjectView:
        """Create or replace a project. Raises ConflictError if it differs from `expected`."""

    def explain_pod(self, project: str, name: str) -> tuple[str, ...]:
        """Return what a pod that belongs to no job holds or waits for, in lines; () if there is none."""

    def quota_gap(self, name: str) -> str:
        """Return what the project's quota does not cover yet, and the remedy; "" if it covers everything."""

    def submit(self, spec: JobSpec, *, lease: Lease | None = None, request_id: str = "", dry_run: bool = False) -> Job:
        """Queue a job, once per request id; with `dry_run` check it, and return it as it would be."""

    def list_jobs(
        self, project: str = "", *, name: str = "", after: int | None = None, timeout_s: float = 0.0
    ) -> JobList:
        """All jobs, a project's, or its job of that `name` alone; with `after` once one of them has changed since that
        revision, or the time is over.
        """

    def job_pages(self, project: str, size: int) -> Iterator[JobList]:
        """Yield all jobs, or a project's, in lists of about `size` if the cluster supports pages."""

    def queue(self, project: str) -> tuple[Queued, ...]:
        """Return the waiting jobs and pods of the project, unordered."""

    def events(self, *, after: int = 0, timeout_s: float = 0.0) -> EventList:
        """Return the cluster's history after a revision."""

    def gpu_use(self, since_s: float, *, prometheus: str = "") -> Sequence[DeviceUse]:
        """Return the use of each measured GPU in the last `since_s` seconds, from where it is stored."""

    def gpu_hours(self, since_s: float, *, prometheus: str = "") -> Sequence[GpuHours]:
        """Return the projects' GPU-hours of the last `since_s` seconds, the most first, from where they are stored."""

    def held_hours(self, since_s: float, *, prometheus: str = "") -> Sequence[HeldHours]:
        """Return the same by user and type of GPU."""

    def debug_state(self) -> bytes:
        """Return what the planner sees as JSON, for `gpuquota simulate --state`."""

    def open_page(self, address: PageAddress | None = None, *, log_out: bool = False) -> PageLink:
        """Return a link that opens the web page once; see `Client.open_page`."""

    def read_log(
        self, project: str, name: str, *, worker: str = "", offset: int = 0, timeout_s: float = 0.0
    ) -> LogChunk:
        """Return a part of a worker's log behind `offset`: 0, or the `next_offset` of another part."""

    def stop_cluster(self) -> None:
        """Stop the server; running jobs continue."""


class Backend(ClusterCalls, Protocol):
    """What the server calls of the embedded cluster: answers that wait are awaited. A change is durable on return."""

    def set_project(self, project: Project, *, if_match: str = "") -> ProjectView:
        """Create or replace the project if its version is still `if_match` ("": any version)."""

    def submit(self, request: SubmitJob) -> Job:
        """Queue a job, once per request id."""

    async def list_jobs(
        self, project: str, after: int | None, timeout_s: float, *, limit: int | None = None, page: str = ""
    ) -> JobList:
        """Return all jobs, or those of a project; with `after` when the revision differs or the time is over.

        With `limit` at most this number, those of the `page` that the previous list named.
        """

    def metrics(self) -> str:
        """Return the cluster's metrics in Prometheus's text format."""

    def gpu_use(self, since_s: float) -> tuple[DeviceUse, ...]:
        """Return the use of each GPU that the cluster measures, of the last `since_s` seconds."""

    def gpu_hours(self, since_s: float) -> tuple[GpuHours, ...]:
        """Return the projects' GPU-hours of the last `since_s` seconds, the most first."""

    def held_hours(self, since_s: float) -> tuple[HeldHours, ...]:
        """Return the same by user and type of GPU."""

    def debug_state(self) -> StateDump:
        """Return what the planner sees, and the plan that it makes of it."""

    async def events(self, after: int, timeout_s: float) -> EventList:
        """Return the history after a revision."""

    async def read_log(self, project: str, name: str, worker: str, offset: int, timeout_s: float) -> LogChunk:
        """Return a part of a worker's log."""


def log_so_far(client: ClusterApi, project: str, name: str, worker: str, offset: int = 0) -> Iterator[bytes]:
    """Yield a worker's log behind `offset` to its present end, in the pieces that `read_log` returns."""
    while (chunk := client.read_log(project, name, worker=worker, offset=offset)).text:
        yield chunk.text
        offset = chunk.next_offset


def follow_log(client: ClusterApi, project: str, name: str, worker: str = "", offset: int = 0) -> Iterator[bytes]:
    """Yield a worker's log behind `offset` in the pieces that `read_log` returns, until the worker has ended."""
    more = True
    while more:
        chunk = client.read_log(project, name, worker=worker, offset=offset, timeout_s=LONG_POLL_S)
        offset, more = chunk.next_offset, chunk.more
        if chunk.text:
            yield chunk.text


def watch_jobs(client: ClusterApi, project: str = "") -> Iterator[JobList]:
    """Yield the list now and after each change, without end, also over restarts of the server."""
    after: int | None = None
    while True:
        listed = client.list_jobs(project, after=after, timeout_s=0.0 if after is None else LONG_POLL_S)
        if listed.revision != after:
            after = listed.revision
            yield listed
