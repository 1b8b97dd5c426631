"""`gpuquota describe` and `explain`: all about one job, project or node."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kfp_gpuquota.api import Order, Phase
from kfp_gpuquota.api.durations import text_of
from kfp_gpuquota.api.job_sentences import place_of, preemption_of, request_of, show_field
from kfp_gpuquota.api.quantity import show_gpus
from kfp_gpuquota.api.queue import ahead_of, has_places, queued
from kfp_gpuquota.api.time_spent import time_spent
from kfp_gpuquota.api.wire import JobName, Supposition
from kfp_gpuquota.cli.arguments.completion import complete_job, complete_named
from kfp_gpuquota.cli.arguments.names import job_name, kind_and_name
from kfp_gpuquota.cli.arguments.options import (
    OutputOption,
    ProjectOption,
    client,
    named_nodes,
    named_projects,
    project_or_configured,
)
from kfp_gpuquota.cli.display.descriptions import described_node, described_project
from kfp_gpuquota.cli.display.gpus import gibibytes
from kfp_gpuquota.cli.display.output import Format, age, duration, is_tabular, show, table
from kfp_gpuquota.cli.display.tables import expected_start_text, output_hint, phase_text, progress_text
from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.cli.jobs.arrays import one_job
from kfp_gpuquota.cli.jobs.logs import last_lines
from kfp_gpuquota.errors import GpuQuotaError, NotFoundError, UnauthorizedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.api import Job, Occurrence, Reason
    from kfp_gpuquota.api.wire import ShareView
    from kfp_gpuquota.server.cluster_api import ClusterApi

app = typer.Typer()


SHOWN_LINES: Final = 5
"""How many of the last lines that a failed job printed are shown with the reason."""

JobWords = Annotated[list[str], typer.Argument(metavar="[job] JOB", autocompletion=complete_job)]
AnyWords = Annotated[
    list[str], typer.Argument(metavar="[job|project|node] NAME", autocompletion=complete_named, help="Else a job.")
]


@app.command("describe", short_help="Show everything about a job, project or node.")
def describe(what: AnyWords, project: ProjectOption = "", output: OutputOption = Format.TABLE) -> None:
    """Show a job: what it asks for, what it has, its workers, and how its size changed. Or a project, or a node.

    Examples:
      gpuquota describe elastic1
      gpuquota describe elastic1 -o yaml
      gpuquota describe project team-a
      gpuquota describe node/node-0
    """
    kind, name = kind_and_name(what)
    reached = client()
    if kind == "project":
        (view,) = named_projects(reached, [name])
        running = [each for each in reached.list_jobs(name).jobs if not each.status.phase.final]
        above = {each.project.name: each.project for each in reached.list_projects()} if view.project.parent else {}
        show(view, output, described_project(view, running, above.get))
    elif kind == "node":
        (node,) = named_nodes(reached, [name])
        show(node, output, described_node(node))
    else:
        _describe_job(reached, project_or_configured(project), name, output)


def _describe_job(reached: ClusterApi, project: str, name: str, output: str) -> None:
    found = one_job(reached, project, name)
    if not is_tabular(output):
        show(found, output)
        return
    parts = [table(("JOB", found.spec.name), _facts(found, _place_in_queue(reached, found)))]
    if found.status.workers:
        columns = ("WORKER", "RANK", "NODE", "DEVICES", "PHASE", "PID", "EXIT CODE")
        parts.append(table(columns, _worker_rows(found)))
    if shares := _shares(reached, found):
        parts.append(table(("DEVICE", "NODE", "USED", "REQUEST", "LIMIT", "MAY USE NOW"), shares))
    if found.status.resizes:
        parts.append(table(("SIZE CHANGED", "FROM", "TO", "STEP", "PAUSE", "WHY"), _resize_rows(found)))
    if spent := list(_spent_rows(found, time.time())):
        parts.append(table(("TIME SPENT", "FOR", "PART"), spent))
    echo("\n\n".join(parts))


@app.command("explain", short_help="Show why a job waits, does not grow, shrank or was stopped.")
def explain(job: JobWords, project: ProjectOption = "") -> None:
    """Show in one sentence why a job waits, does not grow, shrank or was stopped, and what would change that.

    On Kubernetes also a pod that no ElasticJob has, by its name.

    Example:
      gpuquota explain train1
    """
    reached, project, name = client(), project_or_configured(project), job_name(job)
    try:
        found = one_job(reached, project, name)
    except NotFoundError:
        if not (lines := reached.explain_pod(project, name)):
            raise
        _explain_pod(reached, project, lines)
        return
    status = found.status
    why = f": {status.reason.message}" if status.reason is not None else ""
    holds = "" if status.phase.final else f" with {show_gpus(status.gpus)}"
    echo(f"{found.spec.name} {phase_text(status.phase)}{holds}{why}")
    if hint := output_hint(found):
        for line in last_lines(reached, found, SHOWN_LINES):
            echo(f"  {line}")
        echo(hint)
    for line in _queue_lines(reached, found):
        echo(line)
    if status.gpus and not status.phase.final and _lacks_quota(reached, found.spec.project):
        echo(
            f"project {found.spec.project} has no quota any more: the job keeps its GPUs until another project needs"
            " them, and gets no others"
        )
    if (stopped := status.last_eviction) is not None and stopped.reason != status.reason:
        echo(f"it was last stopped {age(stopped.at)} ago: {stopped.reason.message}")
    for what, happened in (("lost a worker", status.last_failure), ("was moved", status.last_move)):
        if happened is not None and happened.reason != status.reason:
            echo(f"it last {what} {age(happened.at)} ago: {happened.reason.message}")


def _explain_pod(reached: ClusterApi, project: str, lines: tuple[str, ...]) -> None:
    """Show why a pod of another controller, on Kubernetes, holds GPUs or waits."""
    for line in lines:
        echo(line)
    if _lacks_quota(reached, project):
        echo(
            f"project {project} has no quota any more: its pods keep their GPUs until another project needs them, and"
            " no other one starts"
        )


def _why_not_larger(reached: ClusterApi, job: Job) -> Reason | None:
    """Return why an elastic job that runs has less than its maximum; None for others, or if that may not be read."""
    if job.status.phase is not Phase.RUNNING or job.status.gpus >= job.spec.largest:
        return None
    try:
        found = reached.what_if(Supposition(growing=(JobName(project=job.spec.project, name=job.spec.name),)))
    except GpuQuotaError:
        return None
    return found.keeps[0].reason if found.keeps else None


def _lacks_quota(reached: ClusterApi, project: str) -> bool:
    """Return whether the project has no quota, as after its Profile was deleted; False if that may not be read."""
    try:
        reached.get_project(project)
    except NotFoundError:
        return True
    except GpuQuotaError:
        return False
    return False


def _throughput(job: Job) -> str:
    """Both figures with the time that they are means of: they differ where the training speeds up or slows down."""
    progress = job.status.progress
    if progress is None or not progress.throughput:
        return ""
    took = "" if progress.step_ms is None else f"; {progress.step_ms:.3g} ms a step over the last steps"
    rate = progress.throughput
    shown = f"{rate:,.0f}" if rate >= 1000 else f"{rate:.3g}"
    return f"{shown} samples/s since it has this size{took}"


def _stragglers(job: Job) -> str:
    found = job.status.progress.stragglers if job.status.progress else {}
    return ", ".join(f"{worker} takes {times:.1f} times the mean for its part" for worker, times in found.items())


def _place_in_queue(reached: ClusterApi, job: Job) -> str:
    """Return a sentence on the jobs that precede a waiting job in its project; "" if it does not wait."""
    mine = queued(job)
    if mine is None or not has_places(_order_of(reached, job.spec.project), uses_known=reached.runs_here):
        return ""
    waiting = [each for each in reached.queue(job.spec.project) if each.pool == mine.pool]
    return place_of(sorted(waiting, key=lambda each: each.key), len(ahead_of(mine, waiting)))


def _order_of(reached: ClusterApi, project: str) -> Order:
    try:
        return reached.get_project(project).project.order
    except GpuQuotaError:
        return Order.FAIR


def _queue_lines(reached: ClusterApi, job: Job) -> Iterator[str]:
    """Yield a waiting job's place in the queue and its expected start, or why one that runs does not grow."""
    if place := _place_in_queue(reached, job):
        yield place
    if expected := expected_start_text(job):
        yield f"Expected start: {expected}."
    if (reason := _why_not_larger(reached, job)) is not None:
        yield f"it has {show_gpus(job.status.gpus)} of at most {job.spec.largest}: {reason.message}"


def _facts(job: Job, place: str) -> list[tuple[str, object]]:
    spec, status = job.spec, job.status
    metrics = ", ".join(status.progress.metric_texts) if status.progress else ""
    facts: list[tuple[str, object]] = [
        ("project", spec.project),
        ("uid", job.uid),
        ("type", f"{spec.kind.value}, priority {spec.effective_priority}, {preemption_of(spec)}"),
        ("labels", ", ".join(f"{key}={value}" for key, value in spec.labels.items())),
        ("command", shlex.join(spec.command)),
        ("asks for", request_of(spec)),
        ("GPU types", " or ".join(spec.gpu_types)),
        ("maximum run time", "" if spec.max_runtime_s is None else text_of(spec.max_runtime_s)),
        ("policies", ", ".join(_set_by(job, field, policy) for field, policy in status.set_by.items())),
        ("status", f"{status.phase.value} with {show_gpus(status.gpus)}"),
        ("page", status.page),
        ("because", status.reason.message if status.reason else ""),
        ("queue", place),
        ("expected start", expected_start_text(job)),
        ("progress", ", ".join(part for part in (progress_text(job), metrics, _throughput(job)) if part)),
        ("stragglers", _stragglers(job)),
        ("submitted", f"{age(status.submitted_at)} ago"),
        ("ran for", age(status.started_at, status.finished_at)),
        ("restarts", status.restarts or ""),
        ("lost a worker", _occurred(status.last_failure)),
        ("preempted", _times(status.evictions, status.last_eviction)),
        ("moved", _times(status.moves, status.last_move)),
        ("exit code", "" if status.exit_code is None else status.exit_code),
    ]
    return [(name, value) for name, value in facts if value != ""]


def _occurred(last: Occurrence | None) -> str:
    return "" if last is None else f"{age(last.at)} ago: {last.reason.message}"


def _times(count: int, last: Occurrence | None) -> str:
    if last is None:
        return ""
    return f"{'once' if count == 1 else f'{count} times'}, {_occurred(last)}"


def _set_by(job: Job, field: str, policy: str) -> str:
    return f"{field} is set to {show_field(getattr(job.spec, field))} by {policy}"


def _shares(reached: ClusterApi, job: Job) -> list[list[object]]:
    """A line for each GPU of which the job holds a share; none where its user may not see nodes."""
    if not job.spec.shared or not job.status.gpus:
        return []
    try:
        nodes = reached.list_nodes()
    except UnauthorizedError:
        return []
    mine = {worker.id for worker in job.status.workers}
    return [_share_row(view.node.name, share) for view in nodes for share in view.shares if share.worker in mine]


def _share_row(node: str, share: ShareView) -> list[object]:
    amounts = (share.used_mib, share.request_mib, share.limit_mib, share.granted_mib)
    return [share.device, node, *map(gibibytes, amounts)]


def _worker_rows(job: Job) -> Iterator[list[object]]:
    for worker in job.status.workers:
        devices = ",".join(str(index) for index in worker.devices)
        yield [worker.index, worker.rank, worker.node, devices, worker.phase.value, worker.pid, worker.exit_code]


def _spent_rows(job: Job, now: float) -> Iterator[list[object]]:
    """Yield where the job's time went, and its parts of the job's life."""
    parts = time_spent(job.status, now)
    life = sum(parts.values())
    for activity, seconds in parts.items():
        yield [activity.label, duration(seconds), f"{seconds / life:.0%}" if life else ""]


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
