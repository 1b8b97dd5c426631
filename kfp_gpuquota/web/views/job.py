"""The page of one job: its size over time and why it changed, its figures, workers, checkpoints and events."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api import Phase, pipeline_labels
from kfp_gpuquota.api.durations import text_of
from kfp_gpuquota.api.job_sentences import preemption_of, request_of
from kfp_gpuquota.api.quantity import show_gpus
from kfp_gpuquota.api.request_paths import join
from kfp_gpuquota.api.time_spent import activity_of, time_spent
from kfp_gpuquota.errors import GpuQuotaError, NotFoundError
from kfp_gpuquota.web import charts
from kfp_gpuquota.web.live import Elements
from kfp_gpuquota.web.rendering import duration, render
from kfp_gpuquota.web.views import logs
from kfp_gpuquota.web.views.figures import Run, figure_charts, use_charts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kfp_gpuquota.api import Job, Worker
    from kfp_gpuquota.api.history import Report
    from kfp_gpuquota.api.wire import Event
    from kfp_gpuquota.web.charts import Chart
    from kfp_gpuquota.web.site_config import SiteConfig
    from kfp_gpuquota.web.source import Notice, Source
    from kfp_gpuquota.web.views.board import Board
    from kfp_gpuquota.web.views.figures import View

SHOWN_EVENTS: Final = 100
SHOWN_CHANGES: Final = 50


@dataclass(frozen=True)
class WorkerLine:
    """One worker; `pace` is how its part of a step compares with the mean, `throughput` its part of the job's."""

    worker: Worker
    pace: str
    throughput: float | None


@dataclass(frozen=True)
class EventLine:
    """One line of the list of events; `at` is in seconds since the epoch."""

    at: float
    what: str
    more: str
    warning: bool = False


def event_lines(events: Iterable[Event], notices: Iterable[Notice]) -> list[EventLine]:
    """Return the history of a job and what was reported about it, newest first."""
    lines = [_line_of_event(event) for event in events] + [_line_of_notice(notice) for notice in notices]
    lines.reverse()
    return sorted(lines, key=lambda line: -line.at)


def _line_of_event(event: Event) -> EventLine:
    worker = f" {event.worker.rpartition('-')[2]}" if event.worker else ""
    gpus = f" ({event.gpus:+g})" if event.gpus else ""
    why = f": {event.reason.message}" if event.reason is not None else ""
    return EventLine(event.at, event.kind.value.replace("-", " "), f"{worker}{gpus}{why}")


def _line_of_notice(notice: Notice) -> EventLine:
    times = f" ({notice.count} times)" if notice.count > 1 else ""
    about = f" {notice.about}" if notice.about else ""
    return EventLine(notice.at, notice.reason, f"{about}{times}: {notice.message}", notice.warning)


class Ending:
    """The last lines that a failed job's worker has printed, read once."""

    def __init__(self, source: Source, project: str, name: str) -> None:
        self._source, self._project, self._name = source, project, name
        self._read: object = None
        self.worker = self.text = ""

    async def look(self) -> None:
        """Read the lines if the job has failed since they were last read."""
        try:
            job = self._source.job(self._project, self._name)
            seen = (job.uid, job.status.finished_at)
            if job.status.phase is Phase.FAILED and self._read != seen:
                self._read, self.worker = seen, _failed_worker(job)
                self.text = await logs.last_lines(self._source, self._project, self._name, self.worker)
        except (GpuQuotaError, OSError):  # no right to read it, or it was removed
            self.text = ""


def elements(board: Board, site: SiteConfig, project: str, name: str, view: View, ending: Ending) -> Elements:
    """Return what the page shows; of a job that was deleted that it was."""
    source = board.source
    try:
        job = source.job(project, name)
    except NotFoundError:
        return Elements({"summary": render("job_deleted.html", name=name)})
    place = board.place(job)
    reports, now = source.reports_of(job.uid), source.now()
    lines = event_lines(source.events_of(job.uid), source.notices_of(job.uid))
    size = size_chart(job, source.sizes_of(job), job.status.finished_at or now)
    runs = [Run(job, reports), *(Run(other, source.reports_of(other.uid)) for other in _others(source, view))]
    figures = list(figure_charts(runs, view))
    shown = {"here": join(site.base, "jobs", project, name), "job": job}
    return Elements(
        {
            "summary": render("job_summary.html", job=job, place=place, base=site.base),
            "ending": render("job_ending.html", **shown, worker=ending.worker, text=ending.text),
            "actions": render("job_actions.html", **shown),
            "facts": render("job_facts.html", job=job, facts=list(facts(job)), base=site.base, **_run(site, job)),
            "size": render("job_size.html", job=job, chart=size, resizes=job.status.resizes[-SHOWN_CHANGES:]),
            "figures": render("job_figures.html", charts=figures, runs=runs, view=view, job=job),
            "gpu-use": render("gpu_use.html", charts=list(use_charts(source, _gpus_of(board, job)))),
            "workers": render("job_workers.html", lines=list(worker_lines(job)), job=job),
            "checkpoints": render("job_checkpoints.html", saved=checkpoints(reports), job=job),
            "events": render("job_events.html", lines=lines[:SHOWN_EVENTS], total=len(lines)),
        }
    )


def _gpus_of(board: Board, job: Job) -> Iterator[tuple[str, str, int, int, float]]:
    """Yield the GPUs that the job's workers hold, each since its worker was started."""
    nodes = {view.node.name: view.node for view in board.nodes()}
    for worker in job.status.workers:
        node = nodes.get(worker.node)
        for device in node.devices if node is not None and worker.finished_at is None else ():
            if device.index in worker.devices:
                title = f"{worker.node} GPU {device.index}"
                yield title, worker.node, device.index, device.memory_mib, worker.started_at


def inputs(board: Board, project: str, name: str, view: View, ending: Ending) -> object:
    """Return what the page depends on but for time; each change of a job is one of its record, too."""
    source = board.source
    try:
        job = source.job(project, name)
    except NotFoundError:
        return None
    return job, board.place(job), source.notices_of(job.uid), ending.text, list(_others(source, view))


def facts(job: Job) -> Iterator[tuple[str, str]]:
    """Yield what the job asks for and where it stands, as (name, value)."""
    spec, status = job.spec, job.status
    yield "Asks for", request_of(spec)
    if spec.max_runtime_s is not None:
        yield "Runs for at most", text_of(spec.max_runtime_s)
    if spec.gpu_types:
        yield "GPU types", " or ".join(spec.gpu_types)
    yield "Holds", show_gpus(status.gpus)
    yield "Type", f"{spec.kind.value}, priority {spec.effective_priority}, {preemption_of(spec)}"
    if status.progress is not None:
        total = f" of {status.progress.total_steps:,}" if status.progress.total_steps else ""
        yield "Step", f"{status.progress.step:,}{total}, epoch {status.progress.epoch:,}"
    if status.started_at is not None and status.finished_at is not None:
        yield "Ran for", duration(status.finished_at - status.started_at)
    if spent := time_spent(status, status.counted_until or 0.0):
        parts = ", ".join(
            f"{activity.label} {duration(seconds)}" for activity, seconds in spent.items() if seconds >= 1
        )
        doing = activity_of(status)
        yield "Time spent", "; ".join(filter(None, [parts, f"now {doing.label}" if doing else ""]))
    for word, count in (("Restarts", status.restarts), ("Preempted", status.evictions), ("Moved", status.moves)):
        if count:
            yield word, "once" if count == 1 else f"{count} times"
    if status.exit_code is not None:
        yield "Exit code", str(status.exit_code)
    yield "Command", shlex.join(spec.command)


def _run(site: SiteConfig, job: Job) -> dict[str, str]:
    """Return the pipeline's run of which the job is a step, and its address in Kubeflow Pipelines."""
    labels = job.spec.labels
    run = labels.get(pipeline_labels.RUN, "")
    address = site.run_address(job.spec.project, run) if run else ""
    pipeline = labels.get(pipeline_labels.NAME, "")
    return {
        "run": run,
        "pipeline": pipeline,
        "task": labels.get(pipeline_labels.TASK) or job.spec.name,
        "run_address": address,
    }


def size_chart(job: Job, points: Sequence[tuple[float, float]], end: float) -> Chart | None:
    """Return the GPUs that the job held over time; `points` are (time, GPUs from then on)."""
    if not points:
        return None
    begin = min(points[0][0], job.status.submitted_at or points[0][0])
    held = show_gpus(job.status.gpus)
    return charts.steps(
        "GPUs held", [(begin, 0.0), *points], begin=begin, end=end, top=max(value for _, value in points), latest=held
    )


def worker_lines(job: Job) -> Iterator[WorkerLine]:
    """Yield the workers, those that run first."""
    progress = job.status.progress
    for worker in sorted(job.status.workers, key=lambda one: (one.phase == "Gone", one.index)):
        slowness = progress.stragglers.get(worker.id) if progress else None
        measured = progress is not None and bool(progress.workers) and worker.phase == "Running"
        pace = f"takes {slowness:.1f} times the mean" if slowness else "in step" if measured else ""
        shared = None
        if measured and progress and progress.throughput and progress.workers:
            shared = progress.throughput / progress.workers
        yield WorkerLine(worker, pace, shared)


def checkpoints(reports: Iterable[Report]) -> list[tuple[float, int]]:
    """Return (time, the first step reported after it) of the last checkpoints, newest first."""
    saved: dict[float, int] = {}
    for report in reports:
        if report.checkpoint_at is not None:
            saved.setdefault(report.checkpoint_at, report.step)
    return sorted(saved.items(), reverse=True)[:10]


def _others(source: Source, view: View) -> Iterator[Job]:
    """Yield the jobs that are compared, as far as they still exist."""
    for project, name in view.others:
        with contextlib.suppress(NotFoundError):
            yield source.job(project, name)


def _failed_worker(job: Job) -> str:
    """Return the index of the worker that failed first; "" if none is listed."""
    failed = [worker for worker in job.status.workers if worker.exit_code]
    first = min(failed, key=lambda worker: worker.finished_at or 0.0, default=None)
    return "" if first is None else str(first.index)
