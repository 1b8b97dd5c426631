"""The requests of users to the embedded cluster: each one is checked, then committed as one change."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api import Job, JobStatus, Project, Reason, ReasonCode
from kfp_gpuquota.api.annotations import with_limit_variable
from kfp_gpuquota.api.job import USER_LABEL
from kfp_gpuquota.api.job_sentences import name_taken, over
from kfp_gpuquota.api.policy import WorkloadPolicy, admit
from kfp_gpuquota.api.project import check_parents, path_of, version_of, with_run_time
from kfp_gpuquota.api.quantity import as_number, show_gpus
from kfp_gpuquota.api.start_conditions import parse_after
from kfp_gpuquota.api.validation import check_job_labels
from kfp_gpuquota.api.wire import (
    Event,
    EventKind,
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
from kfp_gpuquota.cluster.admission import check_fits
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.local.gpu_meter import GpuMeter
from kfp_gpuquota.cluster.local.metrics import metrics_text
from kfp_gpuquota.cluster.local.shared.members import Members
from kfp_gpuquota.cluster.local.storage import retention
from kfp_gpuquota.cluster.local.storage.history import SAMPLE_S, MemoryHistory, UsageHistory, gpu_hours, held_hours
from kfp_gpuquota.cluster.local.worker_logs import WorkerLogs
from kfp_gpuquota.cluster.whatif import outlook
from kfp_gpuquota.engine import requests
from kfp_gpuquota.engine.expected_starts import run_times
from kfp_gpuquota.engine.records import Intent, JobRecord, Owner
from kfp_gpuquota.errors import AlreadyExistsError, ConflictError, NotFoundError, StateFileError
from kfp_gpuquota.scheduler.dump import take_dump
from kfp_gpuquota.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kfp_gpuquota.api.history import DeviceUse, GpuHours, HeldHours
    from kfp_gpuquota.cluster.local.driver import Driver
    from kfp_gpuquota.cluster.local.home import Home
    from kfp_gpuquota.cluster.local.storage.state import ClusterState
    from kfp_gpuquota.cluster.local.storage.store import Store
    from kfp_gpuquota.scheduler.dump import StateDump

_STOPS: Final = {
    StopAction.DELETE: (Intent.DELETE, requests.DELETED),
    StopAction.SUSPEND: (Intent.SUSPEND, requests.SUSPENDED),
    StopAction.CANCEL: (Intent.CANCEL, requests.CANCELLED),
}

log = logging.getLogger(__name__)


class LocalCluster:
    """The embedded cluster's answer to `server.cluster_api.Backend`."""

    def __init__(
        self,
        home: Home,
        store: Store,
        state: ClusterState,
        driver: Driver,
        config: ClusterConfig | None = None,
        *,
        meter: GpuMeter | None = None,
        new_uid: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._new_uid = new_uid
        self._home = home
        self._config = config or ClusterConfig()
        self._store = store
        self._members = Members(store)
        self._state = state
        self._driver = driver
        self.logs = WorkerLogs(state, driver.runtime)
        self._usage, self.memory = UsageHistory(store), MemoryHistory()
        self.meter = meter or GpuMeter(home, state)
        asyncio.get_running_loop().call_soon(self._delete_outdated)
        asyncio.get_running_loop().call_soon(self._sample_usage)

    # Projects and nodes

    def list_projects(self) -> tuple[ProjectView, ...]:
        """All projects, by name; with their members where several users share the cluster."""
        views = self._state.list_projects()
        return views if self._config.shared is None else self._members.shown(views)

    def get_project(self, name: str) -> ProjectView:
        """One project. Raises NotFoundError."""
        self._state.project(name)
        return next(shown for shown in self.list_projects() if shown.project.name == name)

    def create_project(self, project: Project) -> ProjectView:
        """Make it. Raises AlreadyExistsError."""
        if project.name in self._state.projects:
            raise AlreadyExistsError(
                f"project {project.name!r} already exists; change it with: gpuquota project set {project.name}"
            )
        return self.set_project(project)

    def set_project(self, project: Project, *, if_match: str = "") -> ProjectView:
        """Make it, or change its quota, where its version is still `if_match` ("": whatever it is).

        Raises NotFoundError and InvalidFieldError for its parent, ConflictError when sessions in use no longer fit.
        """
        if if_match and version_of(self._state.project(project.name)) != if_match:
            raise ConflictError(
                f"project {project.name!r} was changed by somebody else in the meantime, and nothing was changed now; "
                "look at it and try again: gpuquota project list"
            )
        if project.parent is not None:
            self._state.project(project.parent)
        changed = {**self._state.projects, project.name: project}
        for each in changed.values():
            check_parents(changed, each)
        self._check_not_below_use(project, changed)
        with self._state.change() as change:
            change.projects[project.name] = project
            change.events.append(
                Event(revision=0, at=self._state.clock(), kind=EventKind.PROJECT_CHANGED, project=project.name)
            )
        return self.get_project(project.name)

    def members_of(self, project: str) -> tuple[str, ...]:
        """Return the users and @groups that may submit jobs to it. Raises NotFoundError."""
        self._state.project(project)
        return self._members.of(project)

    def change_members(self, project: str, change: MembersChange) -> ProjectView:
        """Add and remove members. Raises NotFoundError, ConflictError, InvalidFieldError for one without account."""
        if self._config.shared is None:
            raise ConflictError(
                "this cluster has one user, so that its projects have no members; one for several users is started by "
                "root: gpuquota cluster start --shared"
            )
        self._state.project(project)
        self._members.change(project, change)
        return self.get_project(project)

    def delete_project(self, name: str) -> None:
        """Remove it. Raises NotFoundError, and ConflictError while it has jobs or is a parent."""
        if name not in self._state.projects:
            raise NotFoundError(f"project {name!r} does not exist; see them with: gpuquota project list")
        if jobs := [job.spec.name for job in self._state.jobs.values() if job.spec.project == name]:
            shown = " ".join(jobs[:5]) + (" ..." if len(jobs) > 5 else "")
            count = "1 job" if len(jobs) == 1 else f"{len(jobs)} jobs"
            raise ConflictError(
                f"project {name!r} still has {count}; delete what it has first: gpuquota delete -p {name} {shown}"
            )
        if children := [p.name for p in self._state.projects.values() if p.parent == name]:
            raise ConflictError(f"project {name!r} is the parent of {', '.join(children)}; delete or move these first")
        self._members.forget(name)
        with self._state.change() as change:
            change.projects[name] = None
            change.events.append(
                Event(revision=0, at=self._state.clock(), kind=EventKind.PROJECT_DELETED, project=name)
            )

    # Policies

    def list_policies(self) -> tuple[WorkloadPolicy, ...]:
        """All policies, by name."""
        return tuple(self._store.load_policies())

    def set_policy(self, policy: WorkloadPolicy) -> WorkloadPolicy:
        """Make it, or change it; it holds for what is submitted from then on. Raises NotFoundError for its project."""
        if policy.project is not None:
            self._state.project(policy.project)
        others = [each for each in self._store.load_policies() if each.name != policy.name]
        with self._store.transaction():
            self._store.save_policies([*others, policy])
        return policy

    def delete_policy(self, name: str) -> None:
        """Remove it. Raises NotFoundError."""
        policies = self._store.load_policies()
        if all(policy.name != name for policy in policies):
            raise NotFoundError(f"there is no policy {name!r}; see: gpuquota policy list")
        with self._store.transaction():
            self._store.save_policies(policy for policy in policies if policy.name != name)

    # Nodes

    def list_nodes(self) -> tuple[NodeView, ...]:
        """Return all nodes with the holders of their devices."""
        nodes = self._state.list_nodes()
        return tuple(msgspec.structs.replace(view, shares=self._driver.sharing.views(view.node.name)) for view in nodes)

    # Jobs

    def owner_of(self, uid: str, default: int) -> int | None:
        """Return the user id of a job's owner, `default` for the cluster's own user; None if there is no such job."""
        job = self._state.jobs.get(uid)
        return None if job is None else job.owner.uid if job.owner else default

    def unfinished_of(self, uid: int) -> int:
        """Return the number of a user's jobs that have not ended."""
        jobs = self._state.jobs.values()
        return sum(job.owner is not None and job.owner.uid == uid and not job.over for job in jobs)

    def submit(self, request: SubmitJob, owner: Owner | None = None) -> Job:
        """Queue a job that runs as `owner`; the same request again answers with the same job.

        Raises NotFoundError for the project or a job that it waits for, AlreadyExistsError for the name, and
        InvalidFieldError for what never fits.
        """
        if made := self._state.job_of_request(request.request_id):
            return self._state.view(made.uid)
        check_job_labels(request.spec.labels)
        spec, set_by = admit(with_limit_variable(request.spec), self._store.load_policies())
        self._driver.runtime.check(spec)
        project = self._state.project(spec.project)
        spec = with_run_time(spec, project)
        check_fits(spec, project, tuple(self._state.nodes.values()))
        if self._state.has_name(spec.project, spec.name):
            raise AlreadyExistsError(name_taken(spec.project, spec.name))
        for after in map(parse_after, spec.after):
            self._state.job_named(spec.project, after.name)
        job = self._new_job(msgspec.structs.replace(request, spec=spec), set_by, owner)
        if request.dry_run:
            return Job(uid="", spec=job.spec, status=job.status, owner=owner.name if owner else "")
        with self._driver.decisions.decide() as recorder:
            recorder.change.jobs[job.uid] = job
            recorder.note(job, EventKind.JOB_SUBMITTED)
        self._driver.timers.renewed(job.uid)
        return self._state.view(job.uid)

    async def list_jobs(
        self, project: str, after: int | None, timeout_s: float, *, limit: int | None = None, page: str = ""
    ) -> JobList:
        """All jobs, or a project's; with `after` once something has changed since; with `limit` a page of them."""
        await self._state.wait_for_change(after, timeout_s)
        return self._state.list_jobs(project, limit, page)

    def get_job(self, project: str, name: str) -> Job:
        """One job. Raises NotFoundError."""
        return self._state.view(self._state.job_named(project, name).uid)

    def cancel_job(self, project: str, name: str) -> Job:
        """Stop it; it stays listed. Of a job that has ended: nothing."""
        self.stop_jobs(project, (name,), StopAction.CANCEL)
        return self.get_job(project, name)

    def delete_job(self, project: str, name: str) -> None:
        """Stop it where it runs, then forget it."""
        self.stop_jobs(project, (name,), StopAction.DELETE)

    def stop_jobs(self, project: str, names: Sequence[str], action: StopAction) -> None:
        """Stop all of these jobs in one change, so that the next plan sees none of them; ended ones stay as they are.

        Raises NotFoundError for any of them, ConflictError where one that has ended is to be suspended.
        """
        jobs = [self._state.job_named(project, name) for name in dict.fromkeys(names)]
        if action is StopAction.SUSPEND:
            for job in jobs:
                self._refuse_over(job)
        intent, reason = _STOPS[action]
        with self._driver.decisions.decide() as recorder:
            for job in jobs:
                if _has_effect(action, job):
                    recorder.stop(job, intent, reason)

    def suspend_job(self, project: str, name: str) -> Job:
        """Stop it, and keep it out of the queue. Raises ConflictError for one that has ended."""
        self.stop_jobs(project, (name,), StopAction.SUSPEND)
        return self.get_job(project, name)

    def resume_job(self, project: str, name: str) -> Job:
        """Return a suspended job to the queue with its age; do nothing for another job."""
        job = self._state.job_named(project, name)
        self._refuse_over(job)
        if job.suspended:
            with self._driver.decisions.decide() as recorder:
                recorder.resume(job)
        return self._state.view(job.uid)

    def update_job(self, project: str, name: str, changed: JobUpdate) -> Job:
        """Change its size bounds or its priority; workers beyond a new maximum are asked to leave.

        Raises ConflictError for one that has ended, InvalidFieldError for sizes that it cannot have. A worker keeps
        its number of GPUs while any of the job's run.
        """
        job = self._state.job_named(project, name)
        self._refuse_over(job)
        alive = self._state.alive_of(job.uid)
        given = {field: value for field in changed.__struct_fields__ if (value := getattr(changed, field)) is not None}
        if alive:
            given["gpus_per_worker"] = job.spec.worker_gpus if job.spec.gpus and not job.spec.shared else None
        spec = msgspec.structs.replace(job.spec, **given)
        check_fits(spec, self._state.project(project), tuple(self._state.nodes.values()))
        with self._driver.decisions.decide() as recorder:
            recorder.update(job, spec)
        return self._state.view(job.uid)

    def metrics(self) -> str:
        """Figures of projects, jobs and shared GPUs, in Prometheus's text format."""
        phases = (job.status.phase for job in self._state.jobs.values())
        return metrics_text(self.list_projects(), self.list_nodes(), phases, self._state.accuracy)

    def renew_lease(self, project: str, name: str, lease: Lease) -> None:
        """Keep the job alive.

        Raises ConflictError for a renewal by another one than the holder, and for the take-over of a stopping job.
        """
        job = self._state.job_named(project, name)
        if lease.take_over and job.ending and not job.status.phase.final:
            raise ConflictError(f"job {name!r} is being stopped, and cannot be taken over; submit it again instead")
        if lease.holder != job.lease_holder and not lease.take_over:
            held = f"is held by {job.lease_holder!r}" if job.lease_holder else "has no lease"
            raise ConflictError(
                f"job {name!r} {held}, so {lease.holder!r} cannot renew it; leave it alone, or ask with take_over to "
                "become its holder"
            )
        if (job.lease_holder, job.lease_s) != (lease.holder, lease.duration_s):
            job = msgspec.structs.replace(job, lease_holder=lease.holder, lease_s=lease.duration_s)
            with self._state.change() as change:
                change.jobs[job.uid] = job
        self._driver.timers.renewed(job.uid)

    def what_if(self, supposed: Supposition) -> Outlook:
        """Return the effect of hypothetical changes. Raises NotFoundError for an unknown job or node."""
        now = self._state.clock()
        return outlook(self._state.scheduler, supposed, now, run_times(self._state, now))

    def gpu_use(self, since_s: float) -> tuple[DeviceUse, ...]:
        """Return the use of each GPU that was measured in the last `since_s` seconds."""
        return self.meter.all(self._state.clock() - since_s)

    def gpu_hours(self, since_s: float) -> tuple[GpuHours, ...]:
        """Return the projects' GPU-hours of the last `since_s` seconds, the most first."""
        return gpu_hours(self._store, self._state.clock(), since_s)

    def held_hours(self, since_s: float) -> tuple[HeldHours, ...]:
        """Return the same by user and type of GPU."""
        return held_hours(self._store, self._state.clock(), since_s)

    def debug_state(self) -> StateDump:
        """Return what the planner sees, and the plan that it makes of it."""
        return take_dump(self._state.scheduler, self._state.clock(), __version__)

    # History and logs

    async def events(self, after: int, timeout_s: float) -> EventList:
        """The history after a revision; waits for at least one entry."""
        deadline = time.monotonic() + timeout_s
        while not (found := self._store.load_events(after)) and (left := deadline - time.monotonic()) > 0:
            await self._state.wait_for_change(self._state.revision, left)
        return EventList(revision=found[-1].revision if found else after, events=tuple(found))

    async def read_log(self, project: str, name: str, worker: str, offset: int, timeout_s: float) -> LogChunk:
        """A piece of a worker's log. Raises NotFoundError for a worker that the job does not have."""
        return await self.logs.read(self._state.job_named(project, name), worker, offset, timeout_s)

    # Inside

    def _new_job(self, request: SubmitJob, set_by: dict[str, str], owner: Owner | None) -> JobRecord:
        return JobRecord(
            uid=self._new_uid(),
            spec=request.spec,
            status=JobStatus(submitted_at=self._state.clock(), set_by=set_by),
            request_id=request.request_id,
            lease_holder=request.lease.holder if request.lease else "",
            lease_s=request.lease.duration_s if request.lease else 0.0,
            owner=owner,
            user=request.spec.labels.get(USER_LABEL, ""),
        )

    def _refuse_over(self, job: JobRecord) -> None:
        if job.over:
            raise ConflictError(over(job.spec.name, job.status.phase))

    def _check_not_below_use(self, project: Project, changed: Mapping[str, Project]) -> None:
        """Raise ConflictError if the project, or a department that it is new in, would hold more than it may.

        `changed` has all projects as they would be.
        """
        old = self._state.projects.get(project.name)
        before = set() if old is None else {each.name for each in path_of(old, self._state.projects.get)}
        for each in path_of(project, changed.get):
            if each is project:
                self._check_holds(each, changed, f"project {each.name!r} holds", "new ")
            elif each.name not in before:
                holds = f"with project {project.name!r}, its department {each.name!r} would hold"
                self._check_holds(each, changed, holds)

    def _check_holds(self, project: Project, changed: Mapping[str, Project], holds: str, new: str = "") -> None:
        """Raise ConflictError, which begins with `holds`, if it and the projects below it hold more than it may."""
        fixed, held = defaultdict[str, float](float), defaultdict[str, float](float)  # by node pool
        for uid, job in self._state.jobs.items():
            if project in path_of(changed[job.spec.project], changed.get):
                gpus = sum(record.worker.gpus for record in self._state.alive_of(uid))
                held[job.spec.node_pool] += gpus
                fixed[job.spec.node_pool] += 0 if self._state.exceeds_guarantee(uid) else job.spec.protected_of(gpus)
        for pool in held:
            quota, where = project.quota_in(pool), f" of node pool {pool}" if pool else ""
            if (kept := as_number(fixed[pool])) > quota.guaranteed:
                raise ConflictError(
                    f"{holds} {show_gpus(kept)}{where} in jobs that cannot be preempted, more than the {new}guaranteed "
                    f"{quota.guaranteed}; delete some of them first"
                )
            if quota.limit is not None and (in_use := as_number(held[pool])) > quota.limit:
                raise ConflictError(
                    f"{holds} {show_gpus(in_use)}{where}, more than the {new}limit {quota.limit}; suspend or delete "
                    "some of its jobs first"
                )

    def _delete_outdated(self) -> None:
        """Delete the jobs that ended too long ago, and look again after a while."""
        asyncio.get_running_loop().call_later(retention.INTERVAL_S, self._delete_outdated)
        keep = (self._config.keep_ended_s, self._config.keep_ended_jobs)
        for job in retention.outdated(self._state.jobs.values(), self._state.clock(), *keep):
            log.info("job %s of project %s ended long ago, and is deleted", job.spec.name, job.spec.project)
            try:
                self._driver.decisions.stop(
                    job, Intent.DELETE, Reason(code=ReasonCode.USER, message="it ended long ago")
                )
            except StateFileError as error:
                log.error("job %s is deleted later: %s", job.spec.name, error)
                return

    def _sample_usage(self) -> None:
        """Record what projects hold, and again after a while."""
        asyncio.get_running_loop().call_later(SAMPLE_S, self._sample_usage)
        now = self._state.clock()
        self._usage.sample(self.list_projects(), self._state.scheduler.held_by(), now)
        self.memory.sample(self.list_nodes(), now)


def _has_effect(action: StopAction, job: JobRecord) -> bool:
    """Return whether the action changes anything: not where the job is suspended, or has ended or is about to."""
    match action:
        case StopAction.DELETE:
            return True
        case StopAction.SUSPEND:
            return not job.suspended
        case StopAction.CANCEL:
            return not job.over
