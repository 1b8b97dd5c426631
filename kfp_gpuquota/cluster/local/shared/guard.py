"""The cluster as one of its users may use it.

| who                    | may                                                                                     |
|------------------------|-----------------------------------------------------------------------------------------|
| who reaches the socket | see projects, policies, nodes, usage, of others' jobs what explains the queue; what-ifs |
| a member of a project  | submit jobs to it                                                                       |
| the owner of a job     | see all of it, read its logs, stop, change and delete it, hold its lease                |
| an administrator       | all of that with every job, and projects, members, policies, the planner's state        |

It implements the whole interface of a cluster, so that no route reaches the cluster without one of these rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api import ReasonCode
from kfp_gpuquota.cluster.local.shared.accounts import ROOT, caller_of
from kfp_gpuquota.errors import ConflictError, ForbiddenError, UnauthorizedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp import web

    from kfp_gpuquota.api import Job, Project, Reason
    from kfp_gpuquota.api.history import DeviceUse, GpuHours, HeldHours
    from kfp_gpuquota.api.policy import WorkloadPolicy
    from kfp_gpuquota.api.wire import (
        Event,
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
    from kfp_gpuquota.cluster.local.cluster import LocalCluster
    from kfp_gpuquota.cluster.local.shared.accounts import Caller
    from kfp_gpuquota.cluster.local.shared.config import SharedConfig
    from kfp_gpuquota.scheduler.dump import StateDump

HIDDEN: Final = ("(hidden)",)
"""The command of another user's job."""

PRIVATE_REASONS: Final = frozenset({
    ReasonCode.USER, ReasonCode.WORKER_FAILED, ReasonCode.WORKER_ENDED, ReasonCode.LEASE_ENDED,
})  # fmt: skip
"""Reasons whose sentences hold words of the job's programs or of its owner; the others are the scheduler's."""


class GuardedCluster:
    """Implements `server.cluster_api.Backend`. `admin`: the caller is an administrator.

    Others may have `jobs_per_user` that have not ended. `begin` is called between the check of a right and the change.
    """

    def __init__(
        self, cluster: LocalCluster, caller: Caller, begin: Callable[[], None], *, admin: bool, jobs_per_user: int
    ) -> None:
        self._cluster, self._caller, self._begin, self._admin = cluster, caller, begin, admin
        self._jobs_per_user = jobs_per_user

    # For everybody

    def list_projects(self) -> tuple[ProjectView, ...]:
        """Return all projects, with their members."""
        return self._cluster.list_projects()

    def get_project(self, name: str) -> ProjectView:
        """Return one project. Raises NotFoundError."""
        return self._cluster.get_project(name)

    def list_policies(self) -> tuple[WorkloadPolicy, ...]:
        """Return all policies."""
        return self._cluster.list_policies()

    def list_nodes(self) -> tuple[NodeView, ...]:
        """Return all nodes and the workers that hold their devices."""
        return self._cluster.list_nodes()

    def metrics(self) -> str:
        """Return the cluster's metrics, in which no job is named."""
        return self._cluster.metrics()

    def gpu_use(self, since_s: float) -> tuple[DeviceUse, ...]:
        """Return the use of each GPU."""
        return self._cluster.gpu_use(since_s)

    def gpu_hours(self, since_s: float) -> tuple[GpuHours, ...]:
        """Return the projects' GPU-hours."""
        return self._cluster.gpu_hours(since_s)

    def held_hours(self, since_s: float) -> tuple[HeldHours, ...]:
        """Return the same by user and type of GPU."""
        return self._cluster.held_hours(since_s)

    def what_if(self, supposed: Supposition) -> Outlook:
        """Return the effect of hypothetical changes."""
        return self._cluster.what_if(supposed)

    async def list_jobs(
        self, project: str, after: int | None, timeout_s: float, *, limit: int | None = None, page: str = ""
    ) -> JobList:
        """Return the jobs, those of others without what is private."""
        listed = await self._cluster.list_jobs(project, after, timeout_s, limit=limit, page=page)
        return msgspec.structs.replace(listed, jobs=tuple(map(self._shown, listed.jobs)))

    def get_job(self, project: str, name: str) -> Job:
        """Return one job, that of another user without what is private. Raises NotFoundError."""
        return self._shown(self._cluster.get_job(project, name))

    async def events(self, after: int, timeout_s: float) -> EventList:
        """Return the history, without private reasons of others' jobs."""
        listed = await self._cluster.events(after, timeout_s)
        return msgspec.structs.replace(listed, events=tuple(map(self._shown_event, listed.events)))

    # For members

    def submit(self, request: SubmitJob) -> Job:
        """Queue a job that runs as the caller. Raises ForbiddenError for one that is no member, ConflictError."""
        project = request.spec.project
        if not self._admin and not self._caller.is_among(self._cluster.members_of(project)):
            name = self._caller.name
            raise ForbiddenError(
                f"{name} is not a member of project {project!r}; ask an administrator for: gpuquota project set "
                f"{project} --member {name}"
            )
        if not self._admin and self._cluster.unfinished_of(self._caller.uid) >= self._jobs_per_user:
            raise ConflictError(
                f"{self._caller.name} has {self._jobs_per_user} jobs that have not ended, the most that a user of this "
                "cluster may have; wait until some have ended, or delete them"
            )
        owner = self._caller.owner()
        self._begin()
        own = f"{self._caller.uid}/{request.request_id}" if request.request_id else ""  # no other user's answer
        return self._cluster.submit(msgspec.structs.replace(request, request_id=own), owner)

    # For the owner of a job

    def cancel_job(self, project: str, name: str) -> Job:
        """Stop the job; it stays listed."""
        self._require_owner(project, name, what="stop it")
        return self._cluster.cancel_job(project, name)

    def delete_job(self, project: str, name: str) -> None:
        """Stop the job and delete its record."""
        self._require_owner(project, name, what="delete it")
        self._cluster.delete_job(project, name)

    def stop_jobs(self, project: str, names: Sequence[str], action: StopAction) -> None:
        """Stop all of these jobs, or none if one of them is another user's."""
        self._require_owner(project, *names, what=f"{action.value} it")
        self._cluster.stop_jobs(project, names, action)

    def suspend_job(self, project: str, name: str) -> Job:
        """Stop the job and keep it out of the queue."""
        self._require_owner(project, name, what="suspend it")
        return self._cluster.suspend_job(project, name)

    def resume_job(self, project: str, name: str) -> Job:
        """Return the job to the queue."""
        self._require_owner(project, name, what="resume it")
        return self._cluster.resume_job(project, name)

    def update_job(self, project: str, name: str, changed: JobUpdate) -> Job:
        """Change the job's size bounds or its priority."""
        self._require_owner(project, name, what="change it")
        return self._cluster.update_job(project, name, changed)

    def renew_lease(self, project: str, name: str, lease: Lease) -> None:
        """Renew the job's lease."""
        self._require_owner(project, name, what="hold its lease")
        self._cluster.renew_lease(project, name, lease)

    async def read_log(self, project: str, name: str, worker: str, offset: int, timeout_s: float) -> LogChunk:
        """Return a part of a worker's log."""
        self._require_owner(project, name, what="read its log")
        return await self._cluster.read_log(project, name, worker, offset, timeout_s)

    # For administrators

    def create_project(self, project: Project) -> ProjectView:
        """Create the project, without members."""
        self.require_admin("create projects")
        return self._cluster.create_project(project)

    def set_project(self, project: Project, *, if_match: str = "") -> ProjectView:
        """Create or replace the project."""
        self.require_admin("change projects")
        return self._cluster.set_project(project, if_match=if_match)

    def change_members(self, project: str, change: MembersChange) -> ProjectView:
        """Add and remove members of the project."""
        self.require_admin("change the members of projects")
        return self._cluster.change_members(project, change)

    def delete_project(self, name: str) -> None:
        """Delete the project and its list of members."""
        self.require_admin("delete projects")
        self._cluster.delete_project(name)

    def set_policy(self, policy: WorkloadPolicy) -> WorkloadPolicy:
        """Create or replace the policy."""
        self.require_admin("change policies")
        return self._cluster.set_policy(policy)

    def delete_policy(self, name: str) -> None:
        """Delete the policy."""
        self.require_admin("delete policies")
        self._cluster.delete_policy(name)

    def debug_state(self) -> StateDump:
        """Return what the planner sees."""
        self.require_admin("read the planner's state")
        return self._cluster.debug_state()

    def require_admin(self, what: str) -> None:
        """Raise ForbiddenError for a caller that is no administrator; `what` completes "only they may"."""
        if not self._admin:
            raise ForbiddenError(f"only administrators of this cluster may {what}; ask one of them, or root")
        self._begin()

    # Inside

    def _require_owner(self, project: str, *names: str, what: str) -> None:
        for name in names:
            job = self._cluster.get_job(project, name)
            if not self._may_see(job.uid):
                owner = job.owner or "root"
                raise ForbiddenError(f"job {name!r} is one of {owner}; only {owner} and administrators may {what}")
        self._begin()

    def _may_see(self, uid: str) -> bool:
        """Return whether the job is the caller's. One that was deleted is nobody's."""
        return self._admin or self._cluster.owner_of(uid, ROOT) == self._caller.uid

    def _shown(self, job: Job) -> Job:
        return job if self._may_see(job.uid) else without_private_parts(job)

    def _shown_event(self, event: Event) -> Event:
        if event.job_uid and not self._may_see(event.job_uid):
            return msgspec.structs.replace(event, reason=_public(event.reason))
        return event


class UserAccess:
    """`server.app.Access`: identifies callers by their socket. No token is needed: the kernel vouches for the user."""

    def __init__(self, cluster: LocalCluster, config: SharedConfig) -> None:
        self._cluster, self._config = cluster, config

    def cluster_for(self, request: web.Request, begin: Callable[[], None]) -> GuardedCluster:
        """Return the cluster as the request's sender may use it. Raises UnauthorizedError if the sender has left."""
        connected = request.transport.get_extra_info("socket") if request.transport else None
        if connected is None:
            raise UnauthorizedError("the connection has ended, and the user who sent the request cannot be determined")
        caller = caller_of(connected)
        group = self._config.admin_group
        admin = caller.uid == ROOT or (group != "" and caller.is_in(group))
        return GuardedCluster(self._cluster, caller, begin, admin=admin, jobs_per_user=self._config.jobs_per_user)


def without_private_parts(job: Job) -> Job:
    """Return the job with what explains the queue alone: names, sizes, phase, places, and reasons of the scheduler."""
    spec = msgspec.structs.replace(
        job.spec, command=HIDDEN, environment={}, working_directory="", labels={}, runtime_env={}
    )
    status = msgspec.structs.replace(
        job.status,
        reason=_public(job.status.reason),
        progress=None,
        resizes=(),
        last_failure=None,
        exit_code=None,
        result_worker=None,
        page="",
        workers=tuple(msgspec.structs.replace(worker, pid=None, exit_code=None) for worker in job.status.workers),
    )
    return msgspec.structs.replace(job, spec=spec, status=status)


def _public(reason: Reason | None) -> Reason | None:
    return None if reason is None or reason.code in PRIVATE_REASONS else reason
