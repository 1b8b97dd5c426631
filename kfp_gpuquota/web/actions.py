"""What a person may do on the page: submit, stop, resume and change jobs, and change the quotas of projects."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.quantity import whole_number
from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.api.wire import JobUpdate, StopAction
from kfp_gpuquota.errors import ForbiddenError, GpuQuotaError, NotFoundError, UsageError
from kfp_gpuquota.web.views import quota, submission

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kfp_gpuquota.web.site_config import SiteConfig
    from kfp_gpuquota.web.source import Source


STOPPING: Final = frozenset(StopAction)
"""The actions that free what a job holds, disk space included."""


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
                return await self.stop(action, [(project, name)])
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

    async def stop(self, action: str, jobs: Sequence[tuple[str, str]]) -> str:
        """Delete, suspend or cancel jobs: those of a project together. The others go on where a project's are refused.

        Raises UsageError, which says what was refused.
        """
        if action not in STOPPING:
            raise NotFoundError(f"jobs have no action {action!r} that stops them; they have {', '.join(StopAction)}")
        done, refused = 0, list[GpuQuotaError]()
        for project, together in itertools.groupby(sorted(set(jobs)), key=lambda each: each[0]):
            names = [name for _, name in together]
            try:
                await self._source.stop_jobs(project, names, StopAction(action))
                done += len(names)
            except GpuQuotaError as error:
                refused.append(error)
        if len(refused) == 1 and not done:
            raise refused[0]
        if refused:
            why = "; ".join(error.message for error in refused)
            raise UsageError(f"{why}. Of the others {done} are stopped")
        if action == StopAction.DELETE or len(jobs) != 1:
            return f"{self._base}/queue"
        return join(self._base, "jobs", *jobs[0])

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
