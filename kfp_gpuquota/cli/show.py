"""`gpuquota list`, `describe`, `explain` and `top`: looking without touching."""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from enum import StrEnum
from pathlib import Path  # noqa: TC003 (typer reads annotations at run time)
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kfp_gpuquota.api import Phase
from kfp_gpuquota.api.quantity import as_number
from kfp_gpuquota.api.queue import ahead_of, queued
from kfp_gpuquota.cli.options import (
    JobArgument,
    OutputOption,
    ProjectOption,
    WatchOption,
    client,
    project_or_all,
    project_or_configured,
)
from kfp_gpuquota.cli.output import Format, age, rendered, show, table
from kfp_gpuquota.cli.output import watch as watch_pictures
from kfp_gpuquota.cli.projects import project_table
from kfp_gpuquota.cli.terminal import say
from kfp_gpuquota.errors import InvalidFieldError, UnauthorizedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.wire import NodeView
    from kfp_gpuquota.server.cluster_client import ClusterClient


class What(StrEnum):
    """What can be listed."""

    JOBS = "jobs"
    PROJECTS = "projects"
    NODES = "nodes"


GPU_REFRESH_S: Final = 0.5
NAMED_BEFORE: Final = 3

AllOption = Annotated[bool, typer.Option("--all-projects", "-A", help="Jobs of every project.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("list", short_help="List jobs, projects or nodes.")(list_things)
    app.command("describe", short_help="Show everything about a job.")(describe)
    app.command("explain", short_help="Say why a job waits, shrank or was stopped.")(explain)
    app.command("top", short_help="Show who uses what.")(top)


def list_things(
    what: Annotated[What, typer.Argument(help="What to list.")] = What.JOBS,
    project: ProjectOption = "",
    *,
    all_projects: AllOption = False,
    watch: WatchOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """List jobs (of the project, or of all), projects, or nodes.

    Examples:
      gpuquota list
      gpuquota list jobs -A -o wide
      gpuquota list nodes
      gpuquota list -w
    """
    reached = client()
    chosen = "" if all_projects or what is not What.JOBS else project_or_all(project)
    if chosen:
        reached.get_project(chosen)
    if watch:  # quotas and nodes change in what they hold when jobs do
        watch_pictures(_listed(reached, what, output, seen.jobs) for seen in reached.watch_jobs(chosen))
    say(_listed(reached, what, output, reached.list_jobs(chosen).jobs if what is What.JOBS else ()))


def _listed(reached: ClusterClient, what: What, output: Format, jobs: Sequence[Job]) -> str:
    if what is What.PROJECTS:
        views = reached.list_projects()
        return rendered(views, output, project_table(views, wide=output is Format.WIDE))
    if what is What.NODES:
        nodes = reached.list_nodes()
        return rendered(nodes, output, _node_table(nodes))
    return rendered(jobs, output, _job_table(jobs, output))


def describe(job: JobArgument, project: ProjectOption = "", output: OutputOption = Format.TABLE) -> None:
    """Show a job: what it asks for, what it has, its workers, and how its size changed.

    Examples:
      gpuquota describe elastic1
      gpuquota describe elastic1 -o yaml
    """
    reached = client()
    found = reached.get_job(project_or_configured(project), job)
    if output in {Format.JSON, Format.YAML}:
        show(found, output)
        return
    parts = [table(("JOB", found.spec.name), _facts(found, _place_in_queue(reached, found)))]
    if found.status.workers:
        columns = ("WORKER", "RANK", "NODE", "GPUS", "PHASE", "PID", "EXIT CODE")
        parts.append(table(columns, _worker_rows(found)))
    if found.status.resizes:
        parts.append(table(("SIZE CHANGED", "FROM", "TO", "STEP", "PAUSE", "WHY"), _resize_rows(found)))
    say("\n\n".join(parts))


def explain(job: JobArgument, project: ProjectOption = "") -> None:
    """Say in one sentence why a job waits, shrank or was stopped, and what would change that.

    Example:
      gpuquota explain train1
    """
    reached = client()
    found = reached.get_job(project_or_configured(project), job)
    status = found.status
    why = f": {status.reason.message}" if status.reason is not None else ""
    say(f"{found.spec.name} is {status.phase.value.lower()} with {_gpus(status.gpus)}{why}")
    if place := _place_in_queue(reached, found):
        say(place)
    if (stopped := status.last_eviction) is not None and stopped.reason != status.reason:
        say(f"it was last stopped {age(stopped.at)} ago: {stopped.reason.message}")


def top(
    *,
    watch: WatchOption = False,
    gpus: Annotated[bool, typer.Option("--gpus", help="The memory of GPUs that several jobs share.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="With --gpus: draw it over time, until Ctrl-C.")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="With --plot: for so long at most.")] = 60.0,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show projects, nodes and running jobs with what they use.

    Examples:
      gpuquota top
      gpuquota top -w
      gpuquota top -o json
      gpuquota top --gpus -w
      gpuquota top --gpus --plot memory.png --seconds 120
    """
    reached = client()
    if plot is not None:
        say(_plot_memory(reached, plot, seconds))
        return
    if gpus:
        watch_pictures(_gpu_pictures(reached, once=not watch))
        return
    if output in {Format.JSON, Format.YAML}:
        jobs = reached.list_jobs().jobs
        show({"projects": reached.list_projects(), "nodes": reached.list_nodes(), "jobs": jobs}, output)
        return
    project = _visible_project(reached)
    if watch:
        watch_pictures(_overview(reached, project) for _ in reached.watch_jobs(project))
    say(_overview(reached, project))


def _job_table(jobs: Sequence[Job], output: Format = Format.TABLE) -> str:
    wide = output is Format.WIDE
    columns = ["JOB", "PROJECT", "TYPE", "STATUS", "GPUS", "REQUESTED", "PROGRESS", "AGE", "REASON"]
    more = ["MIN", "MAX", "PRIORITY", "NODES", "UID"] if wide else []
    return table(columns + more, ([*_job_row(job), *(_wide_row(job) if wide else [])] for job in jobs))


def _job_row(job: Job) -> list[object]:
    spec, status = job.spec, job.status
    return [
        spec.name,
        spec.project,
        spec.kind.value,
        status.phase.value,
        status.gpus,
        spec.asks if spec.shared else spec.gpus,
        _progress(job),
        age(status.submitted_at),
        status.reason.message if status.reason is not None and status.phase is not Phase.RUNNING else "",
    ]


def _wide_row(job: Job) -> list[object]:
    nodes = sorted({worker.node for worker in job.status.workers if worker.phase != "Gone"})
    return [job.spec.smallest, job.spec.largest, job.spec.effective_priority, ",".join(nodes), job.uid]


def _progress(job: Job) -> str:
    progress = job.status.progress
    if progress is None:
        return ""
    total = f"/{progress.total_steps}" if progress.total_steps else ""
    return f"step {progress.step}{total}"


def _throughput(job: Job) -> str:
    progress = job.status.progress
    if progress is None or not progress.throughput:
        return ""
    took = "" if progress.step_ms is None else f", {progress.step_ms:.3g} ms a step"
    return f"{progress.throughput:.3g} samples/s{took}"


def _stragglers(job: Job) -> str:
    found = job.status.progress.stragglers if job.status.progress else {}
    return ", ".join(f"{worker} takes {times:.1f} times the mean for its part" for worker, times in found.items())


def _place_in_queue(reached: ClusterClient, job: Job) -> str:
    """What comes before a job that waits, by its project's own order; "" where it does not, or nothing else does."""
    mine = queued(job)
    if mine is None:
        return ""
    waiting = [each for each in reached.queue(job.spec.project) if each.pool == mine.pool]
    before, where = ahead_of(mine, waiting), f"in project {job.spec.project}"
    if not before:
        return f"it is the first of {len(waiting)} that wait {where}" if len(waiting) > 1 else ""
    names = ", ".join(each.name for each in before[:NAMED_BEFORE])
    more = f" and {len(before) - NAMED_BEFORE} more" if len(before) > NAMED_BEFORE else ""
    verb = "comes" if len(before) == 1 else "come"
    return f"{len(before)} of {len(waiting)} that wait {where} {verb} before it: {names}{more}"


def _facts(job: Job, place: str) -> list[tuple[str, object]]:
    spec, status = job.spec, job.status
    metrics = (
        ", ".join(f"{name} {value:.4g}" for name, value in status.progress.metrics.items()) if status.progress else ""
    )
    facts: list[tuple[str, object]] = [
        ("project", spec.project),
        ("uid", job.uid),
        ("type", f"{spec.kind.value}, priority {spec.effective_priority}, {_preemptible(job)}"),
        ("command", shlex.join(spec.command)),
        ("asks for", _asks(job)),
        ("policies", ", ".join(f"{field} is set by {policy}" for field, policy in status.set_by.items())),
        ("status", f"{status.phase.value} with {_gpus(status.gpus)}"),
        ("because", status.reason.message if status.reason else ""),
        ("queue", place),
        ("progress", ", ".join(part for part in (_progress(job), metrics, _throughput(job)) if part)),
        ("stragglers", _stragglers(job)),
        ("submitted", f"{age(status.submitted_at)} ago"),
        ("ran for", age(status.started_at, status.finished_at)),
        ("restarts", status.restarts or ""),
        ("preempted", _evictions(job)),
        ("exit code", "" if status.exit_code is None else status.exit_code),
    ]
    return [(name, value) for name, value in facts if value != ""]


def _preemptible(job: Job) -> str:
    return "preemptible" if job.spec.may_be_preempted else "not preemptible"


def _evictions(job: Job) -> str:
    last = job.status.last_eviction
    if last is None:
        return ""
    times = "once" if job.status.evictions == 1 else f"{job.status.evictions} times"
    return f"{times}, {age(last.at)} ago: {last.reason.message}"


def _asks(job: Job) -> str:
    spec = job.spec
    if spec.shared:
        return f"{spec.asks} of {'a GPU' if spec.gpus == 1 else 'GPUs'}"
    if not spec.elastic:
        return _gpus(spec.gpus)
    return f"{_gpus(spec.gpus)}, elastic from {spec.smallest} to {spec.largest}"


def _worker_rows(job: Job) -> Iterator[list[object]]:
    for worker in job.status.workers:
        devices = ",".join(str(index) for index in worker.devices)
        yield [worker.index, worker.rank, worker.node, devices, worker.phase.value, worker.pid, worker.exit_code]


def _resize_rows(job: Job) -> Iterator[list[object]]:
    for change in job.status.resizes:
        pause = "" if change.pause_ms is None else f"{change.pause_ms:.0f} ms"
        yield [
            f"{age(change.at)} ago",
            change.from_gpus,
            change.to_gpus,
            change.step or "",
            pause,
            change.reason.message,
        ]


def _node_table(nodes: Sequence[NodeView]) -> str:
    pooled = any(view.node.pool for view in nodes)
    rows = (
        [
            view.node.name,
            "ready" if view.node.ready else "not ready",
            len(view.node.devices),
            as_number(sum(view.used.values())),
            len(view.node.devices) - len(view.held),
            ", ".join(sorted({device.model for device in view.node.devices})),
            *([view.node.pool] if pooled else []),
        ]
        for view in nodes
    )
    return table(("NODE", "STATUS", "GPUS", "IN USE", "IDLE", "MODEL", *(["POOL"] if pooled else [])), rows)


def _overview(reached: ClusterClient, project: str) -> str:
    """Projects, nodes and running jobs, one below the other; in the place of what its user may not see, a sentence."""
    parts = (
        _if_allowed("quotas", lambda: project_table(reached.list_projects())),
        _if_allowed("nodes", lambda: _node_table(reached.list_nodes())),
        _job_table(_running(reached, project)),
    )
    return "\n\n".join(parts)


def _running(reached: ClusterClient, project: str) -> list[Job]:
    return [job for job in reached.list_jobs(project).jobs if not job.status.phase.final]


def _if_allowed(what: str, picture: Callable[[], str]) -> str:
    try:
        return picture()
    except UnauthorizedError:
        return f"({what} are not shown: your account may not see them)"


def _visible_project(reached: ClusterClient) -> str:
    """All, or on Kubernetes the one namespace in which a team's user may see jobs."""
    try:
        reached.list_jobs()
    except UnauthorizedError:
        return project_or_configured("")
    return ""


def _gpu_pictures(reached: ClusterClient, *, once: bool) -> Iterator[str]:
    """Memory changes without anything else changing, so it is asked for again and again."""
    from kfp_gpuquota.cli.gpus import gpu_table  # noqa: PLC0415

    yield gpu_table(reached.list_nodes())
    while not once:
        time.sleep(GPU_REFRESH_S)
        yield gpu_table(reached.list_nodes())


def _plot_memory(reached: ClusterClient, path: Path, seconds: float) -> str:
    """Look until the time is over or somebody interrupts, then draw; a sentence about the picture."""
    try:
        from kfp_gpuquota.cli.memory_plot import Look, draw  # noqa: PLC0415
    except ImportError as error:
        raise UsageError("pictures need matplotlib; install it with: pip install 'kfp-gpuquota[plots]'") from error
    if not path.parent.is_dir():
        raise InvalidFieldError("plot", str(path), "its directory does not exist")
    looks: list[Look] = []
    began = time.monotonic()
    with suppress(KeyboardInterrupt):
        while (at := time.monotonic() - began) <= seconds or not looks:
            looks.append(Look(at, reached.list_nodes()))
            time.sleep(GPU_REFRESH_S)
    drawn = draw(looks, path)
    return f"{path}: {drawn} workloads, {len(looks)} looks in {looks[-1].at if looks else 0.0:.0f} s"


def _gpus(count: float) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
