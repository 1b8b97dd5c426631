"""`gpuquota list`, `get` and `events`: lists of jobs, projects, nodes and of what happened."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kfp_gpuquota.api.label_selector import parse_selector, selects
from kfp_gpuquota.cli.arguments.names import resource
from kfp_gpuquota.cli.arguments.options import (
    OutputOption,
    ProjectOption,
    WatchOption,
    by_name,
    client,
    listed_project_or_error,
    named_nodes,
    named_projects,
    on_kubernetes,
)
from kfp_gpuquota.cli.display.output import Format, rendered, show, terminal_width
from kfp_gpuquota.cli.display.output import watch as watch_pictures
from kfp_gpuquota.cli.display.tables import event_table, job_table, node_table
from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.wire import Event
    from kfp_gpuquota.server.cluster_client import ClusterClient


class What(StrEnum):
    """The kinds of objects that can be listed."""

    JOBS = "jobs"
    PROJECTS = "projects"
    NODES = "nodes"


@dataclass(frozen=True)
class Look:
    """How a list is shown."""

    output: Format
    headers: bool
    labels: bool

    def table(self, jobs: Sequence[Job], *, headers: bool) -> str:
        """Return the table of jobs, cut to the terminal."""
        return job_table(jobs, self.output, width=terminal_width(), headers=headers, labels=self.labels)


PAGE: Final = 500
"""Jobs of one request where a table of all is printed: the first lines appear while the rest is fetched."""

SHOWN_EVENTS: Final = 50
_ALIASES: Final = {
    "job": What.JOBS, "jobs": What.JOBS, "ej": What.JOBS, "project": What.PROJECTS, "projects": What.PROJECTS,
    "node": What.NODES, "nodes": What.NODES, "no": What.NODES,
}  # fmt: skip

AllOption = Annotated[bool, typer.Option("--all-projects", "-A", "--all-namespaces", help="Jobs of every project.")]
SelectorOption = Annotated[
    str,
    typer.Option(
        "--selector",
        "-l",
        metavar="K=V,...",
        help="Only jobs with these labels; also K!=V, K, !K, K in (V,V), K notin (V,V).",
    ),
]
LabelsOption = Annotated[bool, typer.Option("--show-labels", help="A column with the labels of jobs.")]
NoHeadersOption = Annotated[bool, typer.Option("--no-headers", help="Leave out the first line of the table.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("list", short_help="List jobs, projects or nodes.")(list_things)
    app.command("get", short_help="The same as list, in kubectl's words.")(get)
    app.command("events", short_help="Show what happened.")(events)


def list_things(
    what: Annotated[What, typer.Argument(help="What to list.")] = What.JOBS,
    project: ProjectOption = "",
    *,
    all_projects: AllOption = False,
    selector: SelectorOption = "",
    watch: WatchOption = False,
    no_headers: NoHeadersOption = False,
    show_labels: LabelsOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """List jobs (of the project, or of all), projects, or nodes.

    On a terminal, lines are cut to its width; `-o wide`, `describe` and `explain` show whole sentences.

    Examples:
      gpuquota list
      gpuquota list jobs -A -o wide
      gpuquota list -l team=vision -o name
      gpuquota list nodes
      gpuquota list -w
    """
    reached, look = client(), Look(output, headers=not no_headers, labels=show_labels)
    chosen = "" if all_projects or what is not What.JOBS else listed_project_or_error(reached, project)
    if watch:  # quotas and nodes change in what they hold when jobs do
        watch_pictures(
            _listed(reached, what, _chosen(seen.jobs, selector), look) for seen in reached.watch_jobs(chosen)
        )
    if what is What.JOBS and output in {Format.TABLE, Format.NAME}:
        _print_pages(reached, chosen, selector, look)
        return
    jobs = _chosen(reached.list_jobs(chosen).jobs, selector) if what is What.JOBS else ()
    echo(_listed(reached, what, jobs, look))


def get(
    what: Annotated[str, typer.Argument(metavar="jobs|projects|nodes|events", help="Or job/NAME.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help="Only these.")] = None,
    project: ProjectOption = "",
    *,
    all_projects: AllOption = False,
    selector: SelectorOption = "",
    watch: WatchOption = False,
    no_headers: NoHeadersOption = False,
    show_labels: LabelsOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """List jobs, projects, nodes or events, or some of them by name.

    Examples:
      gpuquota get jobs -A
      gpuquota get job train1 -o yaml
      gpuquota get job/train1 -o name
      gpuquota get nodes --no-headers
      gpuquota get events
    """
    kind, slash, name = what.partition("/")
    if kind in {"event", "events", "ev"}:
        events(project=project, all_projects=all_projects, watch=watch, no_headers=no_headers, output=output)
        return
    if kind not in _ALIASES:
        raise UsageError(f"there are no {kind!r}; get jobs, projects, nodes or events")
    wanted = [resource(each, kind) for each in [*([name] if slash else []), *(names or [])]]
    if not wanted:
        list_things(
            _ALIASES[kind],
            project,
            all_projects=all_projects,
            selector=selector,
            watch=watch,
            no_headers=no_headers,
            show_labels=show_labels,
            output=output,
        )
        return
    _get_named(_ALIASES[kind], wanted, project, Look(output, headers=not no_headers, labels=show_labels))


def events(
    job: Annotated[str, typer.Argument(metavar="[JOB]", help="Only of this job.")] = "",
    project: ProjectOption = "",
    *,
    all_projects: AllOption = False,
    last: Annotated[int, typer.Option("--last", min=1, metavar="N", help="The last N events.")] = SHOWN_EVENTS,
    watch: WatchOption = False,
    no_headers: NoHeadersOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show what happened to jobs and projects, oldest first: starts, changes of size, moves, evictions, ends.

    Examples:
      gpuquota events
      gpuquota events train1
      gpuquota events -A --last 200 -o json
    """
    if on_kubernetes():
        raise UsageError("on Kubernetes the events are the cluster's own; see them with: kubectl get events")
    reached = client()
    chosen = "" if all_projects else listed_project_or_error(reached, project)
    name = resource(job, "job") if job else ""
    found: list[Event] = []
    for more in _histories(reached, watch=watch):
        new = [event for event in more if chosen in ("", event.project) and name in ("", event.job)]
        found = new[-last:]
        if found or not watch:
            _show_events(tuple(found), output, headers=not no_headers)
            no_headers = True


def _show_events(found: tuple[Event, ...], output: Format, *, headers: bool) -> None:
    show(found, output, event_table(found, width=terminal_width(), headers=headers))


def _histories(reached: ClusterClient, *, watch: bool) -> Iterator[tuple[Event, ...]]:
    """All events so far; with `watch`, then those that follow, as they come."""
    known: list[Event] = []
    after = 0
    while (listed := reached.events(after=after)).events:
        known += listed.events
        after = listed.revision
    yield tuple(known)
    while watch:
        listed = reached.events(after=after, timeout_s=25.0)
        after = listed.revision
        if listed.events:
            yield listed.events


def _get_named(what: What, names: list[str], project: str, look: Look) -> None:
    reached, output, headers = client(), look.output, look.headers
    if what is What.JOBS:
        chosen = listed_project_or_error(reached, project)
        known = {job.spec.name: job for job in reached.list_jobs(chosen).jobs}
        jobs = by_name("job", names, known)
        picture = job_table(jobs, output, headers=headers, labels=look.labels)
        show(jobs[0] if len(jobs) == 1 else jobs, output, picture)
    elif what is What.NODES:
        views = named_nodes(reached, names)
        show(views[0] if len(views) == 1 else views, output, node_table(views, headers=headers))
    else:
        from kfp_gpuquota.cli.display.project_table import project_table  # noqa: PLC0415 (other lists do without it)

        projects = tuple(named_projects(reached, names))
        picture = project_table(projects, wide=output is Format.WIDE, headers=headers)
        show(projects[0] if len(projects) == 1 else projects, output, picture)


def _chosen(jobs: Sequence[Job], selector: str) -> tuple[Job, ...]:
    wanted = parse_selector(selector)
    return tuple(job for job in jobs if selects(wanted, job.spec.labels))


def _listed(reached: ClusterClient, what: What, jobs: Sequence[Job], look: Look) -> str:
    if what is What.PROJECTS:
        from kfp_gpuquota.cli.display.project_table import project_table  # noqa: PLC0415 (other lists do without it)

        views = reached.list_projects()
        picture = project_table(views, wide=look.output is Format.WIDE, headers=look.headers)
        return rendered(views, look.output, picture)
    if what is What.NODES:
        nodes = reached.list_nodes()
        return rendered(nodes, look.output, node_table(nodes, headers=look.headers))
    return rendered(jobs, look.output, look.table(jobs, headers=look.headers))


def _print_pages(reached: ClusterClient, project: str, selector: str, look: Look) -> None:
    """Print jobs as they come, a page at a time: columns are as wide as those of the page."""
    headers = look.headers
    for listed in reached.job_pages(project, PAGE):
        jobs = _chosen(listed.jobs, selector)
        if jobs or headers:
            picture = "" if look.output is Format.NAME else look.table(jobs, headers=headers)
            if text := rendered(jobs, look.output, picture):
                echo(text)
        headers = False
