"""The Pipelines page: the steps of each run with their jobs or pods, and how long these waited and ran."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Phase, pipeline_labels
from kfp_gpuquota.web.live import Elements
from kfp_gpuquota.web.rendering import render

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.web.site_config import SiteConfig
    from kfp_gpuquota.web.source import RunStep, Source

RUNS: Final = 100
MOST_OF_RUN: Final = 200
MOST_ON_PAGE: Final = 2000
"""How many steps that are jobs, and as many others, are shown of a run and of all: a loop may have thousands."""


@dataclass(frozen=True)
class Step:
    """One step of a run. `waited_s` and `ran_s` are until now where they go on; None before it ran."""

    task: str
    job: Job
    waited_s: float
    ran_s: float | None

    @property
    def submitted_at(self) -> float:
        """Return when its job was submitted, in seconds since the epoch."""
        return self.job.status.submitted_at


@dataclass(frozen=True)
class Run:
    """A run's steps that are jobs of the cluster, and `others` that use no GPU; the first submitted first.

    At most `most` of each are shown: without older ones that have succeeded, then older ones.
    """

    id: str
    steps: tuple[Step, ...]
    others: tuple[RunStep, ...] = ()
    most: int | None = None

    @property
    def name(self) -> str:
        """Return the pipeline's name, "" if it is not known."""
        named = (step.job.spec.labels.get(pipeline_labels.NAME, "") for step in self.steps)
        return next(filter(None, [*named, *(step.pipeline for step in self.others)]), "")

    @property
    def rows(self) -> list[Step | RunStep]:
        """Return the shown steps in the order in which they were submitted."""
        jobs = sorted(self.steps, key=lambda step: (step.job.status.phase is Phase.SUCCEEDED, -step.submitted_at))
        others = sorted(self.others, key=lambda step: (step.phase == "Succeeded", -step.submitted_at))
        both: list[Step | RunStep] = [*jobs[: self.most], *others[: self.most]]
        return sorted(both, key=lambda step: step.submitted_at)

    @property
    def left_out(self) -> tuple[int, int]:
        """Return how many jobs and other steps are not shown."""
        if self.most is None:
            return 0, 0
        return max(0, len(self.steps) - self.most), max(0, len(self.others) - self.most)

    @property
    def projects(self) -> tuple[str, ...]:
        """Return the projects in which its steps are, that of the first one first."""
        return tuple(dict.fromkeys(step.job.spec.project for step in self.steps))

    @property
    def began(self) -> float:
        """Return when its first step was submitted, in seconds since the epoch."""
        return self.steps[0].submitted_at


def runs(jobs: Iterable[Job], project: str, now: float, pods: Iterable[RunStep] = ()) -> list[Run]:
    """Return the runs with a step in a project, or all (""), the newest first; `jobs` are oldest first.

    A run has its steps in all projects that the user sees: KFP's ids of runs are unique. Of `pods` those are left out
    whose steps are jobs: they only wait for these.
    """
    found: dict[str, list[Job]] = {}
    for job in jobs:
        if run := job.spec.labels.get(pipeline_labels.RUN):
            found.setdefault(run, []).append(job)
    others: dict[str, list[RunStep]] = {}
    for pod in pods:
        tasks = {job.spec.labels.get(pipeline_labels.TASK) for job in found.get(pod.run, ())}
        if pod.run in found and pod.task.rpartition(".")[2] not in tasks:
            others.setdefault(pod.run, []).append(pod)
    made = (
        Run(run, tuple(_step(job, now) for job in steps), tuple(others.get(run, ())))
        for run, steps in reversed(found.items())
    )
    return [run for run in made if not project or project in run.projects]


def elements(source: Source, site: SiteConfig, project: str) -> Elements:
    """Return what the page shows: the newest `RUNS` runs."""
    now = source.now()
    steps = source.run_steps()
    found = runs(source.jobs(), project, now, steps)
    shown = found[:RUNS]
    most = min(MOST_OF_RUN, MOST_ON_PAGE // max(1, len(shown)))
    counts = render("pipeline_counts.html", shown=len(shown), total=len(found), whole=bool(steps))
    rows = {
        f"run-{run.id}": render(
            "pipeline_run.html", run=replace(run, most=most), now=now, base=site.base, addresses=addresses(site, run)
        )
        for run in shown
    }
    return Elements({"counts": counts}, {"runs": rows})


def addresses(site: SiteConfig, run: Run) -> list[tuple[str, str]]:
    """Return (project, address) of the run in Kubeflow Pipelines: it is in the namespace of one of its steps."""
    found = ((project, site.run_address(project, run.id)) for project in run.projects)
    return [(project, address) for project, address in found if address]


def _step(job: Job, now: float) -> Step:
    status = job.status
    end = status.finished_at or now
    return Step(
        task=job.spec.labels.get(pipeline_labels.TASK) or job.spec.name,
        job=job,
        waited_s=(status.started_at or end) - status.submitted_at,
        ran_s=None if status.started_at is None else end - status.started_at,
    )
