"""What a person may do on the page: submit, stop, resume and change jobs, and change the quotas of projects."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final, NamedTuple

from kfp_gpuquota.api.quantity import whole_number
from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.api.wire import JobUpdate, StopAction
from kfp_gpuquota.errors import ConflictError, ForbiddenError, GpuQuotaError, NotFoundError, UsageError
from kfp_gpuquota.web.views import quota, submission

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kfp_gpuquota.web.site_config import SiteConfig
    from kfp_gpuquota.web.source import Source


STOPPING: Final = frozenset(StopAction)
"""The actions that free what a job holds, disk space included."""


class Chosen(NamedTuple):
    """A job as a form names it; `uid` "" for any one of that name."""

    project: str
    name: str
    uid: str = ""

    @classmethod
    def of(cls, text: str) -> Chosen:
        """Return the job of PROJECT/NAME or PROJECT/NAME/UID."""
        project, name, uid = (*text.split("/", 2), "", "")[:3]
        return cls(project, name, uid)


class Actions:
    """The actions of one cluster. Each returns the address where its effect shows, and raises what the cluster does."""

    def __init__(self, source: Source, site: SiteConfig) -> None:
        self._source, self._site, self._base = source, site, site.base

    async def do(self, action: str, project: str, name: str, form: Mapping[str, str]) -> str:
        """Carry out an action on one job."""
        match action:
            case "resume":
                await self._source.resume(project, name)
            case "update":
                await self._source.update(project, name, _changes(form))
            case _ if action in STOPPING:
                return await self.stop(action, [Chosen(project, name)])
            case _:
                raise NotFoundError(
                    f"a job has no action {action!r}; it has suspend, resume, cancel, update and delete"
                )
        return join(self._base, "jobs", project, name)

    async def submit(self, form: Mapping[str, str]) -> str:
        """Submit the job of a form."""
        if not self._site.submits:
            raise ForbiddenError("jobs are not submitted on this page; submit it with: gpuquota submit")
        asked = submission.Asked.of(form)
        like = asked.original(self._source)
        spec = asked.spec(None if like is None else like.spec)
        job = await self._source.submit(spec, asked.request_id(form), like=like, image=asked.image)
        return join(self._base, "jobs", job.spec.project, job.spec.name)

    async def stop(self, action: str, jobs: Sequence[Chosen]) -> str:
        """Delete, suspend or cancel jobs: those of a project together. Others are stopped if a project's are refused.

        Raises UsageError, which says what was refused.
        """
        if action not in STOPPING:
            raise NotFoundError(f"jobs have no action {action!r} that stops them; they have {', '.join(StopAction)}")
        stop, done, refused = StopAction(action), 0, list[GpuQuotaError]()
        for project, together in itertools.groupby(sorted(set(jobs)), key=lambda each: each.project):
            try:
                names = self._stopped_by(stop, [*together], alone=len(jobs) == 1)
                if names:
                    await self._source.stop_jobs(project, names, stop)
                done += len(names)
            except GpuQuotaError as error:
                refused.append(error)
        if len(refused) == 1 and not done:
            raise refused[0]
        if refused:
            why = "; ".join(error.message for error in refused)
            raise UsageError(f"{why}. In other projects: {done} stopped")
        if action == StopAction.DELETE or len(jobs) != 1:
            return f"{self._base}/queue"
        return join(self._base, "jobs", jobs[0].project, jobs[0].name)

    def _stopped_by(self, action: StopAction, jobs: Sequence[Chosen], *, alone: bool) -> list[str]:
        """Return the names of the jobs on which the action has an effect, as the confirmation says.

        Raises NotFoundError, and ConflictError for a job of that name that is not the one that was confirmed.
        """
        names = []
        for chosen in jobs:
            try:
                job = self._source.job(chosen.project, chosen.name)
            except NotFoundError:
                if action is StopAction.DELETE and chosen.uid:  # sent twice
                    continue
                raise
            if chosen.uid not in {"", job.uid}:
                raise ConflictError(
                    f"job {chosen.name!r} of project {chosen.project!r} is another one than the page showed, submitted "
                    "after that was deleted; look at it and try again"
                )
            if alone or action is StopAction.DELETE or not job.status.phase.final:
                names.append(chosen.name)
        return names

    async def change_quota(self, project: str, form: Mapping[str, str]) -> str:
        """Change the quota of a project, or whether its jobs start."""
        if not self._site.quotas:
            raise ForbiddenError(f"quotas are not changed on this page; use: gpuquota project set {project}")
        before = quota.project_of(self._source, project)
        await self._source.set_project(quota.changed(before, form), form.get("version", ""))
        return join(self._base, "teams", project)


def _changes(form: Mapping[str, str]) -> JobUpdate:
    """Return the fields that were filled in. Raises InvalidFieldError for what is no number."""
    units = {"min_gpus": "GPUs", "max_gpus": "GPUs", "priority": ""}
    given = {field: text for field in units if (text := form.get(field, "").strip())}
    return JobUpdate(**{field: whole_number(field, text, units[field]) for field, text in given.items()})
