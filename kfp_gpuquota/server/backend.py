"""The interface of a cluster for the server. The embedded one and Kubernetes each implement it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfp_gpuquota.api import Job, Project
    from kfp_gpuquota.api.history import GpuHours
    from kfp_gpuquota.api.policy import WorkloadPolicy
    from kfp_gpuquota.api.wire import (
        EventList,
        JobList,
        JobUpdate,
        Lease,
        LogChunk,
        MembersChange,
        NodeView,
        Outlook,
        ProjectView,
        StopAction,
        SubmitJob,
        Supposition,
    )
    from kfp_gpuquota.scheduler.dump import StateDump


class Backend(Protocol):
    """Every method raises errors of `kfp_gpuquota.errors`; a change is durable when the method returns."""

    def list_projects(self) -> tuple[ProjectView, ...]:
        """Return all projects, sorted by name."""

    def get_project(self, name: str) -> ProjectView:
        """Return one project. Raises NotFoundError."""

    def create_project(self, project: Project) -> ProjectView:
        """Create the project."""

    def set_project(self, project: Project, *, if_match: str = "") -> ProjectView:
        """Create or replace the project if its version is still `if_match` ("": any version)."""

    def change_members(self, project: str, change: MembersChange) -> ProjectView:
        """Add and remove members of the project, on a cluster that several users share."""

    def delete_project(self, name: str) -> None:
        """Delete the project, which must be empty."""

    def list_policies(self) -> tuple[WorkloadPolicy, ...]:
        """Return all policies, sorted by name."""

    def set_policy(self, policy: WorkloadPolicy) -> WorkloadPolicy:
        """Create or replace the policy."""

    def delete_policy(self, name: str) -> None:
        """Delete the policy."""

    def list_nodes(self) -> tuple[NodeView, ...]:
        """Return all nodes and the workers that hold their devices."""

    def submit(self, request: SubmitJob) -> Job:
        """Queue a job, once per request id."""

    async def list_jobs(
        self, project: str, after: int | None, timeout_s: float, *, limit: int | None = None, page: str = ""
    ) -> JobList:
        """Return all jobs, or those of a project; with `after` when the revision differs or the time is over.

        With `limit` at most this number, those of the `page` that the previous list named.
        """

    def get_job(self, project: str, name: str) -> Job:
        """Return one job. Raises NotFoundError."""

    def cancel_job(self, project: str, name: str) -> Job:
        """Stop the job; it stays listed."""

    def delete_job(self, project: str, name: str) -> None:
        """Stop the job and delete its record."""

    def stop_jobs(self, project: str, names: Sequence[str], action: StopAction) -> None:
        """Stop all of these jobs in one transaction, before the next plan; of one that cannot be stopped, none."""

    def suspend_job(self, project: str, name: str) -> Job:
        """Stop the job and keep it out of the queue."""

    def resume_job(self, project: str, name: str) -> Job:
        """Return the job to the queue."""

    def update_job(self, project: str, name: str, changed: JobUpdate) -> Job:
        """Change the job's size bounds or its priority."""

    def metrics(self) -> str:
        """Return the cluster's metrics in Prometheus's text format."""

    def renew_lease(self, project: str, name: str, lease: Lease) -> None:
        """Renew the job's lease."""

    def what_if(self, supposed: Supposition) -> Outlook:
        """Return the effect of hypothetical changes."""

    def gpu_hours(self, since_s: float) -> tuple[GpuHours, ...]:
        """Return the projects' GPU-hours of the last `since_s` seconds, the most first."""

    def debug_state(self) -> StateDump:
        """Return what the planner sees, and the plan that it makes of it."""

    async def events(self, after: int, timeout_s: float) -> EventList:
        """Return the history after a revision."""

    async def read_log(self, project: str, name: str, worker: str, offset: int, timeout_s: float) -> LogChunk:
        """Return a part of a worker's log."""
