"""What the server needs of the embedded cluster beside the calls that all clusters have: answers that wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kfp_gpuquota.server.cluster_api import ClusterCalls

if TYPE_CHECKING:
    from kfp_gpuquota.api import Job, Project
    from kfp_gpuquota.api.history import GpuHours
    from kfp_gpuquota.api.wire import (
        EventList,
        JobList,
        LogChunk,
        ProjectView,
        SubmitJob,
    )
    from kfp_gpuquota.scheduler.dump import StateDump


class Backend(ClusterCalls, Protocol):
    """A change is durable when the method returns."""

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

    def gpu_hours(self, since_s: float) -> tuple[GpuHours, ...]:
        """Return the projects' GPU-hours of the last `since_s` seconds, the most first."""

    def debug_state(self) -> StateDump:
        """Return what the planner sees, and the plan that it makes of it."""

    async def events(self, after: int, timeout_s: float) -> EventList:
        """Return the history after a revision."""

    async def read_log(self, project: str, name: str, worker: str, offset: int, timeout_s: float) -> LogChunk:
        """Return a part of a worker's log."""
