"""The Pipelines page: the steps of each run with their jobs, and how long these waited and ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import pipeline_labels
from kfp_gpuquota.web.live import Elements
from kfp_gpuquota.web.rendering import render

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.web.site_config import SiteConfig
    from kfp_gpuquota.web.source import Source

RUNS: Final = 100


@dataclass(frozen=True)
class Step:
    """One step of a run. `waited_s` and `ran_s` are until now where they go on; None before it ran."""

    task: str
    job: Job
    waited_s: float
    ran_s: float | None


@dataclass(frozen=True)
class Run:
    """A run's steps that are jobs of the cluster, the first submitted first."""

    id: str
    project: str
    steps: tuple[Step, ...]

    @property
    def began(self) -> float:
        """Return when its first step was submitted, in seconds since the epoch."""
        return self.steps[0].job.status.submitted_at


def runs(jobs: Iterable[Job], project: str, now: float) -> list[Run]:
    """Return the runs of a project, or of all (""), the newest first; `jobs` are oldest first.

    A run in two projects is two of them.
    """
    found: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        run = job.spec.labels.get(pipeline_labels.RUN)
        if run and (not project or job.spec.project == project):
            found.setdefault((job.spec.project, run), []).append(job)
    return [Run(run, owner, tuple(_step(job, now) for job in steps)) for (owner, run), steps in reversed(found.items())]


def elements(source: Source, site: SiteConfig, project: str) -> Elements:
    """Return what the page shows: the newest `RUNS` runs."""
    found = runs(source.jobs(), project, source.now())
    counts = render("pipeline_counts.html", shown=min(len(found), RUNS), total=len(found))
    rows = {
        f"run-{run.project}-{run.id}": render(
            "pipeline_run.html", run=run, base=site.base, address=site.run_address(run.project, run.id)
        )
        for run in found[:RUNS]
    }
    return Elements({"counts": counts}, {"runs": rows})


def _step(job: Job, now: float) -> Step:
    status = job.status
    end = status.finished_at or now
    return Step(
        task=job.spec.labels.get(pipeline_labels.TASK) or job.spec.name,
        job=job,
        waited_s=(status.started_at or end) - status.submitted_at,
        ran_s=None if status.started_at is None else end - status.started_at,
    )
