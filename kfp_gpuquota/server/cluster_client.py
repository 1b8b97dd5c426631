"""What a program may ask of a cluster, whichever it is: the embedded one over HTTP, or Kubernetes.

`server.client.Client` and `cluster.kubernetes.client.KubernetesClient` are the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.api import Job, JobSpec, Project
    from kfp_gpuquota.api.policy import WorkloadPolicy
    from kfp_gpuquota.api.queue import Queued
    from kfp_gpuquota.api.wire import EventList, Health, JobList, Lease, LogChunk, NodeView, ProjectView


LONG_POLL_S: Final = 25.0


class ClusterClient(Protocol):
    """Every call has a time limit, is repeated while nobody answers, and raises the errors of `kfp_gpuquota.errors`."""

    def health(self) -> Health:
        """Who answers."""

    def list_projects(self) -> tuple[ProjectView, ...]:
        """All projects, by name."""

    def get_project(self, name: str) -> ProjectView:
        """One project; NotFoundError."""

    def create_project(self, project: Project) -> ProjectView:
        """Make it; AlreadyExistsError."""

    def set_project(self, project: Project, *, expected: Project | None = None) -> ProjectView:
        """Make it, or change its quota to what is given; ConflictError where it is not as `expected` any more."""

    def quota_gap(self, name: str) -> str:
        """What the project's quota does not reach yet, and what would change that; "" where it reaches everything."""

    def delete_project(self, name: str) -> None:
        """Remove an empty project; ConflictError while it has jobs."""

    def list_policies(self) -> tuple[WorkloadPolicy, ...]:
        """All policies, by name."""

    def set_policy(self, policy: WorkloadPolicy) -> WorkloadPolicy:
        """Make it, or change it."""

    def delete_policy(self, name: str) -> None:
        """Remove it; NotFoundError."""

    def list_nodes(self) -> tuple[NodeView, ...]:
        """All nodes and who holds their devices."""

    def submit(self, spec: JobSpec, *, lease: Lease | None = None, request_id: str = "") -> Job:
        """Queue a job, once for each request id."""

    def list_jobs(
        self, project: str = "", *, name: str = "", after: int | None = None, timeout_s: float = 0.0
    ) -> JobList:
        """All jobs, a project's, or its job of that `name` alone; with `after` once one of them has changed since that
        revision, or the time is over.
        """

    def job_pages(self, project: str, size: int) -> Iterator[JobList]:
        """All jobs, or a project's, in lists of about `size`, where the cluster lists in pieces."""

    def queue(self, project: str) -> tuple[Queued, ...]:
        """What waits for its turn in the project, in no order."""

    def get_job(self, project: str, name: str) -> Job:
        """One job; NotFoundError."""

    def delete_job(self, project: str, name: str) -> None:
        """Stop it, then forget it."""

    def cancel_job(self, project: str, name: str) -> Job:
        """Stop it; it stays listed."""

    def suspend_job(self, project: str, name: str) -> Job:
        """Stop it, and keep it out of the queue."""

    def resume_job(self, project: str, name: str) -> Job:
        """Put it back into the queue, with its age."""

    def renew_lease(self, project: str, name: str, lease: Lease) -> None:
        """Keep it alive; ConflictError when another holder took it over."""

    def watch_jobs(self, project: str = "") -> Iterator[JobList]:
        """The list now, and again after each change, for ever."""

    def events(self, *, after: int = 0, timeout_s: float = 0.0) -> EventList:
        """The cluster's history after a revision."""

    def read_log(
        self, project: str, name: str, *, worker: str = "", offset: int = 0, timeout_s: float = 0.0
    ) -> LogChunk:
        """A piece of a worker's log."""

    def follow_log(self, project: str, name: str, *, worker: str = "", offset: int = 0) -> Iterator[bytes]:
        """A worker's log from byte `offset` as it grows, until the worker has ended."""

    def stop_cluster(self) -> None:
        """Stop what answers; what runs goes on."""


def follow_log(client: ClusterClient, project: str, name: str, worker: str, offset: int) -> Iterator[bytes]:
    """A worker's log from byte `offset` in the pieces that `read_log` gives, until the worker has ended."""
    more = True
    while more:
        chunk = client.read_log(project, name, worker=worker, offset=offset, timeout_s=LONG_POLL_S)
        offset, more = chunk.next_offset, chunk.more
        if chunk.text:
            yield chunk.text
