"""The Pipelines page: the steps of each run with their jobs or pods, and how long these waited and ran."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import pipeline_labels
from kfp_gpuquota.web.live import Elements
from kfp_gpuquota.web.rendering import render

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.web.site_config import SiteConfig
    from kfp_gpuquota.web.source import RunStep, Source

RUNS: Final = 100
MOST_OTHERS: Final = 200
MOST_ON_PAGE: Final = 2000
"""How many steps without GPUs of a run are shown, and of all runs: a loop over data may have thousands of them."""


@dataclass(frozen=True)
class Step:
    """One step of a run. `waited_s` and `ran_s` are until now where they go on; None before it ran."""

    task: str
    job: Job
    waited_s: float
    ran_s: float | None


@dataclass(frozen=True)
class Run:
    """A run's steps that are jobs of the cluster, and `others` that use no GPU; the first submitted first."""

    id: str
    steps: tuple[Step, ...]
    others: tuple[RunStep, ...] = ()
    left_out: int = 0

    @property
    def name(self) -> str:
        """Return the pipeline's name, "" if it is not known."""
        named = (step.job.spec.labels.get(pipeline_labels.NAME, "") for step in self.steps)
        return next(filter(None, [*named, *(step.pipeline for step in self.others)]), "")

    @property
    def rows(self) -> list[Step | RunStep]:
        """Return all steps in the order in which they were submitted."""
        submitted = [(step.job.status.submitted_at, step) for step in self.steps]
        both: list[tuple[float, Step | RunStep]] = [*submitted, *((step.submitted_at, step) for step in self.others)]
        return [step for _, step in sorted(both, key=lambda one: one[0])]

    def bounded(self, most: int) -> Run:
        """Return the run with so many of the `others`: without older ones that have succeeded, then older ones."""
        kept = sorted(self.others, key=lambda step: (step.phase == "Succeeded", -step.submitted_at))[:most]
        return replace(self, others=tuple(kept), left_out=len(self.others) - len(kept))

    @property
    def projects(self) -> tuple[str, ...]:
        """Return the projects in which its steps are, that of the first one first."""
        return tuple(dict.fromkeys(step.job.spec.project for step in self.steps))

    @property
    def began(self) -> float:
        """Return when its first step was submitted, in seconds since the epoch."""
        return self.steps[0].job.status.submitted_at


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
    most = min(MOST_OTHERS, MOST_ON_PAGE // max(1, len(shown)))
    counts = render("pipeline_counts.html", shown=len(shown), total=len(found), whole=bool(steps))
    rows = {
        f"run-{run.id}": render(
            "pipeline_run.html", run=run.bounded(most), now=now, base=site.base, addresses=addresses(site, run)
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
