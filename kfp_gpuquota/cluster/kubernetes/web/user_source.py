"""What one user is shown, and does: the objects of the namespaces in which the user may list jobs.

Quotas of other teams are left out, although users may read them, so that the page has one rule. Nodes are shown to
everybody with the use of each GPU, but of other teams' pods not the names: their GPUs are "used by others".
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kfp_gpuquota.api.job_sentences import name_taken, over
from kfp_gpuquota.api.project import check_run_time, version_of
from kfp_gpuquota.api.quantity import as_number
from kfp_gpuquota.api.wire import Event, EventKind, Lease, StopAction
from kfp_gpuquota.cluster.kubernetes.client.http.async_client import JSON, MERGE_PATCH, ApiError
from kfp_gpuquota.cluster.kubernetes.objects import paths
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import ElasticJob, GpuQuota
from kfp_gpuquota.cluster.kubernetes.objects.job_fields import updated_fields
from kfp_gpuquota.cluster.kubernetes.objects.what_if import MAX_GPUS, MAX_VISIBLE, Question
from kfp_gpuquota.cluster.kubernetes.user_client import views
from kfp_gpuquota.cluster.kubernetes.user_client.calls import strictly, unknown_fields
from kfp_gpuquota.cluster.kubernetes.user_client.views import is_over
from kfp_gpuquota.cluster.kubernetes.web.rights import DENIAL_KEPT_S, KEPT_S, Asked
from kfp_gpuquota.errors import (
    AlreadyExistsError,
    ClusterUnavailableError,
    ConflictError,
    GpuQuotaError,
    InvalidFieldError,
    NotFoundError,
    UnauthorizedError,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kfp_gpuquota.api import Job, JobSpec, Project
    from kfp_gpuquota.api.history import HeldHours, Report, Usage, UsePoint
    from kfp_gpuquota.api.wire import JobUpdate, LogChunk, NodeView, Outlook, ProjectView, ResourceView, Supposition
    from kfp_gpuquota.cluster.kubernetes.client.http.async_client import Connection
    from kfp_gpuquota.cluster.kubernetes.web.gpu_meter import GpuMeter
    from kfp_gpuquota.cluster.kubernetes.web.kube_events import KubeEvents
    from kfp_gpuquota.cluster.kubernetes.web.objects import Objects
    from kfp_gpuquota.cluster.kubernetes.web.planner import Planner
    from kfp_gpuquota.cluster.kubernetes.web.pod_logs import PodLogs
    from kfp_gpuquota.cluster.kubernetes.web.rights import Identity, Rights
    from kfp_gpuquota.web.source import Notice, RunStep

Json = dict[str, Any]

log = logging.getLogger(__name__)

SHOWN_WITHIN_S: Final = 5.0
"""How long a submission waits until the watch has reported the new job, so that its page exists."""
_REFUSED: Final = {403: UnauthorizedError, 404: NotFoundError, 409: ConflictError}


class ForbiddenError(UsageError):
    """The user lacks a right on the object."""

    http_status = 403
    code = "forbidden"


class UserSource:
    """`web.source.Source` for one user. `refresh` has to be awaited before it is read."""

    def __init__(
        self,
        user: Identity,
        objects: Objects,
        rights: Rights,
        logs: PodLogs,
        events: KubeEvents,
        planner: Planner,
        connection: Connection,
        meter: GpuMeter,
    ) -> None:
        self._meter = meter
        self._user, self._objects, self._rights = user, objects, rights
        self._logs, self._events, self._planner, self._connection = logs, events, planner, connection
        self._reads_events: frozenset[str] = frozenset()  # in which namespaces, as of the last `look_up` of each
        self._reads_pods: frozenset[str] = frozenset()  # the same of the last `look_up_runs`
        self._asking = False
        self._visible: frozenset[str] | None = frozenset()
        self._valid_until = 0.0
        self._jobs: tuple[object, tuple[Job, ...]] = (None, ())
        self._nodes: tuple[object, tuple[NodeView, ...]] = (None, ())

    @property
    def sees_nothing(self) -> bool:
        """Return whether the user may list the jobs of no namespace."""
        return self._visible is not None and not self._visible

    async def refresh(self) -> None:
        """Look again which namespaces the user may see; the answers of reviews are kept by `Rights`."""
        if time.monotonic() >= self._valid_until:
            self._visible = await self._rights.visible(self._user)
            self._valid_until = time.monotonic() + DENIAL_KEPT_S

    # Reads

    def revision(self) -> int:
        """Return the revision of all objects."""
        return self._objects.revision

    def now(self) -> float:
        """Return this machine's time."""
        return time.time()

    async def changed(self, after: int, timeout_s: float) -> None:
        """Wait for a change; at least once a minute the user's rights are asked for again, also for open streams."""
        await self._objects.changed(after, min(timeout_s, KEPT_S))
        await self.refresh()

    def projects(self) -> tuple[ProjectView, ...]:
        """Return the visible quotas; all of them, with the departments, to one who sees all namespaces."""
        return tuple(view for view in self._objects.projects() if self._sees(view.project.name))

    def jobs(self) -> tuple[Job, ...]:
        """Return the visible jobs."""
        state = self._objects.revision, self._visible
        if self._jobs[0] != state:
            self._jobs = state, tuple(job for job in self._objects.jobs() if self._sees(job.spec.project))
        return self._jobs[1]

    def job(self, project: str, name: str) -> Job:
        """Return one job. Raises NotFoundError also for one that the user may not see."""
        found = self._objects.job(project, name) if self._sees(project) else None
        if found is None:
            raise NotFoundError(f"project {project!r} has no job {name!r}, or you may not see it")
        return found

    def nodes(self) -> tuple[NodeView, ...]:
        """Return all nodes, without the names of pods that the user may not see."""
        everything = self._objects.nodes()
        if self._visible is None:
            return everything
        state = everything, self._visible
        if self._nodes[0] is None or self._nodes[0] != state:
            self._nodes = state, tuple(map(self._without_others, everything))
        return self._nodes[1]

    def memory_of(self, worker: str, device: int) -> tuple[tuple[float, int], ...]:
        """Return nothing: nodes' agents report to Prometheus."""
        del worker, device
        return ()

    def gpu_use(self, node: str, device: int) -> tuple[UsePoint, ...]:
        """Return the use of a device; everybody sees nodes with the use of each of their GPUs."""
        return self._meter.of(node, device)

    def problem(self) -> str:
        """Return "": whether the controller serves is in its own metrics and alerts."""
        return ""

    def idle_since(self) -> dict[tuple[str, int], float]:
        """Return when the last pod left each device, of those that a pod left since the page's process runs."""
        return self._objects.idle_since

    def events_of(self, uid: str) -> tuple[Event, ...]:
        """Return the events in the job's status, oldest first."""
        stored = self._objects.stored(uid)
        if stored is None or not self._sees(stored.metadata.namespace):
            return ()
        job = self._objects.job(stored.metadata.namespace, stored.metadata.name)
        return () if job is None else tuple(sorted(_events(job), key=lambda event: event.at))

    def run_steps(self) -> tuple[RunStep, ...]:
        """Return the steps in namespaces whose pods the user may list."""
        seen = self._reads_pods
        return tuple(step for step in self._objects.run_steps() if step.project in seen and self._sees(step.project))

    async def look_up_runs(self) -> None:
        """Ask in which of the namespaces with steps the user may list pods."""
        names = {step.project for step in self._objects.run_steps()}
        seen = sorted(name for name in names if self._sees(name))
        answers = await asyncio.gather(*map(self._may_list_pods, seen))
        self._reads_pods = frozenset(name for name, allowed in zip(seen, answers, strict=True) if allowed)

    async def _may_list_pods(self, namespace: str) -> bool:
        with suppress(ApiError, ClusterUnavailableError):
            return await self._rights.may(Asked(self._user, "list", "pods", namespace, group=""))
        return False

    def notices_of(self, uid: str) -> tuple[Notice, ...]:
        """Return the Kubernetes Events of the job and its workers' pods, for a user who may list Events there."""
        stored = self._objects.stored(uid)
        if stored is None or stored.metadata.namespace not in self._reads_events:
            return ()
        found = self._objects.job(stored.metadata.namespace, stored.metadata.name)
        return () if found is None or not self._sees(found.spec.project) else self._events.of(found)

    async def look_up(self, project: str, name: str) -> None:
        """Read the namespace's Events, if the user may list them."""
        if not self._sees(project) or self._objects.job(project, name) is None:
            return
        try:
            allowed = await self._rights.may(Asked(self._user, "list", "events", project, group=""))
        except (ApiError, ClusterUnavailableError) as error:
            log.warning("whether %s may list events in %s is not known: %s", self._user.name, project, error)
            allowed = False
        if allowed:
            await self._events.look_up(project)
        self._reads_events = self._reads_events | {project} if allowed else self._reads_events - {project}

    def sizes_of(self, job: Job) -> list[tuple[float, float]]:
        """Return the sizes that the status has kept: the last ones of a job that has changed often."""
        return list(_sizes(job))

    def reports_of(self, uid: str) -> tuple[Report, ...]:
        """Return the training's reports since the page's process runs."""
        stored = self._objects.stored(uid)
        return self._objects.reports_of(uid) if stored is not None and self._sees(stored.metadata.namespace) else ()

    def usage(self, width_s: int, since: float) -> Sequence[Usage]:
        """Return what the visible teams held since the page's process runs."""
        history, now = self._objects.usage, self.now()
        return [one for view in self.projects() for one in history.of(view.project.name, width_s, since, now)]

    def held_hours(self, since_s: float) -> Sequence[HeldHours]:
        """Return nothing: a Prometheus has them (`gpuquota report --by user`)."""
        del since_s
        return ()

    async def what_if(self, supposed: Supposition) -> Outlook:
        """Return what the leading controller answers about one job; it names no job that the user may not see.

        Raises NotFoundError and ForbiddenError for a namespace in which the user may not create jobs, ConflictError
        while the same user waits for another answer, and what `Planner.ask` raises.
        """
        (spec,) = supposed.submit
        if spec.shared:
            raise InvalidFieldError("gpus", spec.asks, "what-ifs on Kubernetes are about whole GPUs")
        if not self._sees(spec.project) or spec.project not in {view.project.name for view in self._objects.projects()}:
            raise NotFoundError(f"project {spec.project!r} does not exist, or you may not see it")
        if not await self._rights.may(Asked(self._user, "create", namespace=spec.project)):
            raise ForbiddenError(f"{self._user.name} may not create ElasticJobs in namespace {spec.project!r}")
        if spec.gpus > MAX_GPUS:
            raise InvalidFieldError("gpus", spec.gpus, f"it must be at most {MAX_GPUS}")
        if self._asking:
            raise ConflictError("your last question is still being answered; ask again in a moment")
        question = Question(
            namespace=spec.project,
            gpus=spec.gpus,
            min_gpus=spec.min_gpus,
            kind=spec.kind,
            visible=None if self._visible is None else tuple(sorted(self._visible)[:MAX_VISIBLE]),
        )
        self._asking = True
        try:
            return await self._planner.ask(question)
        finally:
            self._asking = False

    async def read_log(self, project: str, name: str, worker: str, offset: int, timeout_s: float) -> LogChunk:
        """Return a piece of a log (offsets are those of `PodLogs`). Raises ForbiddenError."""
        await self.refresh()  # a log may be followed for days
        job = self.job(project, name)
        asked = Asked(self._user, "get", "pods", project, subresource="log", group="")
        if not await self._rights.may(asked):
            raise ForbiddenError(f"{self._user.name} may not read logs in namespace {project!r}")
        return await self._logs.read(job, worker, offset, timeout_s)

    # Actions

    async def submit(self, spec: JobSpec, request_id: str, *, like: Job | None, image: str) -> Job:
        """Create the job, if the user has the right now. Raises ForbiddenError, and what the API server refuses."""
        if not self._sees(spec.project):
            raise NotFoundError(f"project {spec.project!r} does not exist, or you may not see it")
        await self._require(Asked(self._user, "create", namespace=spec.project), "create ElasticJobs")
        stored = None if like is None else self._objects.stored(like.uid)
        if stored is None:
            template = views.pod_template(spec, image)
            wanted = views.elastic_job(spec, template, request_id=request_id, lease=None, now=self.now())
        else:
            wanted = views.elastic_job_like(stored, spec, image, request_id=request_id, now=self.now())
        if (run_time := wanted["spec"].get("maxRuntimeSeconds")) is not None:
            for view in self.projects():
                if view.project.name == spec.project:
                    check_run_time("max_runtime_s", run_time, view.project)
        made = await self._created(spec, wanted, request_id)
        await self._objects.shown(made.metadata.uid, SHOWN_WITHIN_S)
        return views.job_of(made)

    async def _created(self, spec: JobSpec, wanted: Json, request_id: str) -> ElasticJob:
        """Create the object, once per request id. Raises AlreadyExistsError for a name in use."""
        try:
            answer = await self._call("POST", paths.jobs_of(spec.project), wanted, spec.name)
        except ConflictError:
            answer = await self._call("GET", paths.job(spec.project, spec.name), None, spec.name)
            found = msgspec.json.decode(answer, type=ElasticJob)
            if (found.metadata.annotations or {}).get(views.REQUEST_ID) != request_id:
                raise AlreadyExistsError(name_taken(spec.project, spec.name)) from None
        return msgspec.json.decode(answer, type=ElasticJob)

    async def stop_jobs(self, project: str, names: Sequence[str], action: StopAction) -> None:
        """Stop the jobs, one after the other; nothing is done if the user may not stop one of them.

        The others are stopped if one is refused. Raises UsageError, which says how many.
        """
        jobs = [self.job(project, name) for name in names]
        for job in jobs:
            await self._check("delete" if action is StopAction.DELETE else "patch", job)
        refused = list[GpuQuotaError]()
        for job in jobs:
            try:
                await self._stop(job, action)
            except GpuQuotaError as error:
                refused.append(error)
        if refused and len(jobs) == 1:
            raise refused[0]
        if refused:
            why = "; ".join(error.message for error in refused)
            raise UsageError(f"{why}. Of the other jobs of {project!r}: {len(jobs) - len(refused)} stopped")

    async def _stop(self, job: Job, action: StopAction) -> None:
        """Stop one job; do nothing if it is gone, and is to be deleted, or has ended, and is to be cancelled."""
        if action is StopAction.DELETE:
            body = {"preconditions": {"uid": job.uid}}
            with suppress(NotFoundError):
                await self._call("DELETE", paths.job(job.spec.project, job.spec.name), body, job.spec.name)
        elif action is StopAction.SUSPEND:
            await self._patch(job, {"suspend": True})
        elif not job.status.phase.final:
            lease = Lease(holder=views.CANCELLED, duration_s=0.0)
            await self._patch(job, {"lease": views.job_lease(lease, self.now())})

    async def resume(self, project: str, name: str) -> None:
        """Resume the job."""
        job = self.job(project, name)
        await self._check("patch", job)
        await self._patch(job, {"suspend": False})

    async def update(self, project: str, name: str, changed: JobUpdate) -> None:
        """Change the priority; the API server refuses other size bounds than the job's own."""
        job = self.job(project, name)
        await self._check("patch", job)
        await self._patch(job, updated_fields(job.spec, changed))

    async def fixed_quota(self, project: str) -> str:
        """Return that the project's Profile defines its quota, or that the user may not change GpuQuotas."""
        stored = self._quota(project)
        if found := views.profile_of(stored):
            return found
        if await self._rights.may(self._to_change(project)):
            return ""
        return f"{self._user.name} may not patch GpuQuota {project!r}: an administrator changes it."

    async def set_project(self, project: Project, if_match: str) -> None:
        """Patch the quota in the version that is shown, if the user has the right now."""
        stored = self._quota(project.name)
        patch = views.quota_patch(stored, project)
        await self._require(self._to_change(project.name), f"patch GpuQuota {project.name!r}")
        if if_match and if_match != version_of(views.project_view(stored).project):
            raise ConflictError(f"the quota of {project.name!r} was changed in the meantime; look at it and try again")
        version = {"metadata": {"resourceVersion": stored.metadata.resource_version}}
        answer = await self._call("PATCH", paths.quota(project.name), {**patch, **version}, project.name)
        self._objects.put_quota(msgspec.json.decode(answer, type=GpuQuota))

    def _quota(self, project: str) -> GpuQuota:
        found = self._objects.quota(project) if self._sees(project) else None
        if found is None:
            raise NotFoundError(f"project {project!r} does not exist, or you may not see it")
        return found

    def _to_change(self, project: str) -> Asked:
        return Asked(self._user, "patch", "gpuquotas", name=project)

    async def _patch(self, job: Job, spec: Json) -> None:
        """Change the job that is shown, and no other of its name. Raises ConflictError after its end."""
        name = job.spec.name
        if (stored := self._objects.stored(job.uid)) is not None and is_over(stored):
            raise ConflictError(over(name, job.status.phase))
        path, body = paths.job(job.spec.project, name), {"metadata": {"uid": job.uid}, "spec": spec}
        answer = await self._call("PATCH", path, body, name)
        self._objects.note_job(msgspec.json.decode(answer, type=ElasticJob))

    async def _check(self, verb: str, job: Job) -> None:
        """Raise ForbiddenError unless the user has the right now."""
        asked = Asked(self._user, verb, namespace=job.spec.project, name=job.spec.name)
        await self._require(asked, f"{verb} ElasticJob {job.spec.name!r}")

    async def _require(self, asked: Asked, what: str) -> None:
        """Raise ForbiddenError unless the user has the right now."""
        if not await self._rights.may_now(asked):
            where = f" in namespace {asked.namespace!r}" if asked.namespace else ""
            raise ForbiddenError(f"{asked.user.name} may not {what}{where}")

    async def _call(self, verb: str, path: str, body: Json | None, name: str) -> bytes:
        """Return the API server's answer; `name` is that of the object that is written."""
        try:
            content_type, params = MERGE_PATCH if verb == "PATCH" else JSON, {} if verb == "GET" else strictly(path)
            return await self._connection.call(verb, path, body, content_type=content_type, params=params)
        except ApiError as error:
            if error.status == 422:
                raise InvalidFieldError("the change", name, error.message) from None
            raise _REFUSED.get(error.status, UsageError)(unknown_fields(error.message) or error.message) from None

    def _sees(self, namespace: str) -> bool:
        return self._visible is None or namespace in self._visible

    def _without_others(self, view: NodeView) -> NodeView:
        held = {
            device: tuple(holder for holder in holders if self._sees(holder.partition("/")[0]))
            for device, holders in view.held.items()
        }
        shares = tuple(share for share in view.shares if self._sees(share.project))
        resources = tuple(self._without_other_holders(one) for one in view.resources)
        return msgspec.structs.replace(view, held=held, shares=shares, resources=resources)

    def _without_other_holders(self, resource: ResourceView) -> ResourceView:
        """Return the resource with what pods of other teams hold under no name."""
        held: dict[str, float] = {}
        for holder, amount in resource.held.items():
            shown = holder if self._sees(holder.partition("/")[0]) else ""
            if shown or amount:
                held[shown] = held.get(shown, 0) + amount
        return msgspec.structs.replace(resource, held=held)


def _events(job: Job) -> Iterator[Event]:
    """Yield what a status has of a job's past, in no order."""
    status = job.status

    def event(at: float, kind: EventKind, **more: Any) -> Event:
        return Event(revision=0, at=at, kind=kind, project=job.spec.project, job=job.spec.name, job_uid=job.uid, **more)

    yield event(status.submitted_at, EventKind.JOB_SUBMITTED)
    if status.started_at is not None:
        yield event(status.started_at, EventKind.JOB_STARTED)
    for change in status.resizes:
        more = change.to_gpus - change.from_gpus
        yield event(change.at, EventKind.JOB_RESIZED, gpus=more, reason=change.reason)
    if status.last_eviction is not None:
        yield event(status.last_eviction.at, EventKind.JOB_EVICTED, reason=status.last_eviction.reason)
    if status.finished_at is not None:
        yield event(status.finished_at, EventKind.JOB_ENDED, reason=status.reason)


def _sizes(job: Job) -> Iterator[tuple[float, float]]:
    """Yield (time, GPUs) of the changes in a status, of which it keeps the last.

    The status of an ended job has no GPUs any more: if its size never changed, it held what it asked for. How much of
    a GPU an amount of its memory was is not known any more.
    """
    status = job.status
    if status.started_at is None:
        return
    held = status.gpus if status.finished_at is None else _asked_for(job.spec)
    first = status.resizes[0].from_gpus if status.resizes else held
    if first:
        yield status.started_at, first
    for change in status.resizes:
        yield change.at, change.to_gpus
    if status.finished_at is not None:
        yield status.finished_at, 0.0


def _asked_for(spec: JobSpec) -> float:
    """Return the GPUs that a job asks for; 0 of one that asks for an amount of memory of devices of any size."""
    share = spec.share_of(0)
    return as_number(spec.gpus * share) if isfinite(share) else 0
