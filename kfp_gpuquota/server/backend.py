"""What the server needs of a cluster. The embedded one and Kubernetes each implement it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kfp_gpuquota.api import Job, Project
    from kfp_gpuquota.api.policy import WorkloadPolicy
    from kfp_gpuquota.api.wire import (
        EventList,
        JobList,
        JobUpdate,
        Lease,
        LogChunk,
        NodeView,
        Outlook,
        ProjectView,
        SubmitJob,
        Supposition,
    )


class Backend(Protocol):
    """Every method raises errors of `kfp_gpuquota.errors`; what it has answered is durable."""

    def list_projects(self) -> tuple[ProjectView, ...]:
        """All projects, by name."""

    def get_project(self, name: str) -> ProjectView:
        """One project."""

    def create_project(self, project: Project) -> ProjectView:
        """Make it."""

    def set_project(self, project: Project, *, if_match: str = "") -> ProjectView:
        """Make it, or change it to what is given, where its version is still `if_match` ("": whatever it is)."""

    def delete_project(self, name: str) -> None:
        """Remove it while it is empty."""

    def list_policies(self) -> tuple[WorkloadPolicy, ...]:
        """All policies, by name."""

    def set_policy(self, policy: WorkloadPolicy) -> WorkloadPolicy:
        """Make it, or change it to what is given."""

    def delete_policy(self, name: str) -> None:
        """Remove it."""

    def list_nodes(self) -> tuple[NodeView, ...]:
        """All nodes and who holds their devices."""

    def submit(self, request: SubmitJob) -> Job:
        """Queue a job, once for each request id."""

    async def list_jobs(
        self, project: str, after: int | None, timeout_s: float, *, limit: int | None = None, page: str = ""
    ) -> JobList:
        """All jobs, or a project's; with `after` once the revision is another, or the time is over.

        With `limit` at most so many, those of the `page` that the list before named.
        """

    def get_job(self, project: str, name: str) -> Job:
        """One job."""

    def cancel_job(self, project: str, name: str) -> Job:
        """Stop it; it stays listed."""

    def delete_job(self, project: str, name: str) -> None:
        """Stop it and forget it."""

    def suspend_job(self, project: str, name: str) -> Job:
        """Stop it and keep it out of the queue."""

    def resume_job(self, project: str, name: str) -> Job:
        """Put it back into the queue."""

    def update_job(self, project: str, name: str, changed: JobUpdate) -> Job:
        """Change its size bounds or its priority."""

    def metrics(self) -> str:
        """Figures of the cluster, in Prometheus's text format."""

    def renew_lease(self, project: str, name: str, lease: Lease) -> None:
        """Keep it alive."""

    def what_if(self, supposed: Supposition) -> Outlook:
        """What would happen, without doing it."""

    async def events(self, after: int, timeout_s: float) -> EventList:
        """The history after a revision."""

    async def read_log(self, project: str, name: str, worker: str, offset: int, timeout_s: float) -> LogChunk:
        """A piece of a worker's log."""
