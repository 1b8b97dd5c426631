"""`gpuquota list`, `get` and `events`: lists of jobs, projects, nodes and of what happened."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from kfp_gpuquota.api import Kind
from kfp_gpuquota.api.label_selector import parse_selector, selects
from kfp_gpuquota.cli.arguments.completion import complete_job, complete_kind, complete_named
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
)
from kfp_gpuquota.cli.display.output import Format, rendered, show, terminal_width
from kfp_gpuquota.cli.display.output import watch as watch_pictures
from kfp_gpuquota.cli.display.tables import event_table, job_table, node_table
from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.errors import UsageError
from kfp_gpuquota.server.cluster_api import watch_jobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.label_selector import Requirement
    from kfp_gpuquota.api.wire import Event, NodeView, ProjectView
    from kfp_gpuquota.server.cluster_api import ClusterApi

app = typer.Typer()


class What(StrEnum):
    """The kinds of objects that can be listed."""

    JOBS = "jobs"
    PROJECTS = "projects"
    NODES = "nodes"


@dataclass(frozen=True)
class Look:
    """How a list is shown."""

    output: str
    headers: bool
    labels: bool
    grouped: bool = True

    def table(self, jobs: Sequence[Job], *, headers: bool) -> str:
        """Return the table of jobs, cut to the terminal."""
        return job_table(
            jobs, self.output, width=terminal_width(), headers=headers, labels=self.labels, grouped=self.grouped
        )


@dataclass(frozen=True)
class Choice:
    """Which jobs are listed: those with the required labels, and of a kind where one is given."""

    required: tuple[Requirement, ...] = ()
    kind: Kind | None = None

    def of(self, jobs: Sequence[Job]) -> tuple[Job, ...]:
        """Return those of the jobs."""
        return tuple(
            job for job in jobs if selects(self.required, job.spec.labels) and self.kind in {None, job.spec.kind}
        )


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
TypeOption = Annotated[
    Kind | None, typer.Option("--type", help="Only trainings (train), or interactive sessions (build).")
]
LabelsOption = Annotated[bool, typer.Option("--show-labels", help="A column with the labels of jobs.")]
NoHeadersOption = Annotated[bool, typer.Option("--no-headers", help="Leave out the first line of the table.")]


@app.command("list", short_help="List jobs, projects or nodes.")
def list_things(
    what: Annotated[What, typer.Argument(help="What to list.")] = What.JOBS,
    project: ProjectOption = "",
    *,
    all_projects: AllOption = False,
    selector: SelectorOption = "",
    kind: TypeOption = None,
    watch: WatchOption = False,
    no_headers: NoHeadersOption = False,
    show_labels: LabelsOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """List jobs (of the project, or of all), projects, or nodes.

    On a terminal, lines are cut to its width; `-o wide`, `describe` and `explain` show whole sentences.
    Jobs of an array that wait or have ended are one line; `-o wide` and `--show-labels` show each.

    Examples:
      gpuquota list
      gpuquota list jobs -A -o wide
      gpuquota list -l team=vision -o name
      gpuquota list --type build
      gpuquota list nodes
      gpuquota list -w
    """
    wanted = Choice(parse_selector(selector), kind)
    if what is not What.JOBS and wanted != Choice():
        _refuse_choice("--type" if kind else "--selector", f"list jobs instead of {what.value}")
    reached, look = client(), Look(output, headers=not no_headers, labels=show_labels)
    chosen = "" if all_projects or what is not What.JOBS else listed_project_or_error(reached, project)
    if watch:  # quotas and nodes change in what they hold when jobs do
        watch_pictures(_listed(reached, what, wanted.of(seen.jobs), look) for seen in watch_jobs(reached, chosen))
    if what is What.JOBS and output in {Format.TABLE, Format.NAME}:
        _print_pages(reached, chosen, wanted, look)
        return
    jobs = wanted.of(reached.list_jobs(chosen).jobs) if what is What.JOBS else ()
    echo(_listed(reached, what, jobs, look))


@app.command("get", short_help="The same as list, in kubectl's words.")
def get(
    what: Annotated[
        str,
        typer.Argument(metavar="jobs|projects|nodes|events", autocompletion=complete_kind, help="Or job/NAME."),
    ],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", autocompletion=complete_named, help="Only these.")
    ] = None,
    project: ProjectOption = "",
    *,
    all_projects: AllOption = False,
    selector: SelectorOption = "",
    watch: WatchOption = False,
    no_headers: NoHeadersOption = False,
    show_labels: LabelsOption = False,
    ignore_not_found: Annotated[
        bool, typer.Option("--ignore-not-found", help="Pass over names that do not exist.")
    ] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """List jobs, projects, nodes or events, or some of them by name.

    Examples:
      gpuquota get jobs -A
      gpuquota get job train1 -o yaml
      gpuquota get job/train1 -o jsonpath='{.status.phase}'
      gpuquota get nodes --no-headers
      gpuquota get events
    """
    kind, slash, name = what.partition("/")
    if selector and (slash or names):
        _refuse_choice("--selector", "leave out the names")
    if kind in {"event", "events", "ev"}:
        if selector:
            _refuse_choice("--selector", "get jobs instead of events")
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
    look = Look(output, headers=not no_headers, labels=show_labels, grouped=False)
    reached = client()
    if watch:
        changes = watch_jobs(reached)
        watch_pictures(
            _named(reached, _ALIASES[kind], wanted, project, look, ignore_not_found=ignore_not_found) for _ in changes
        )
    if found := _named(reached, _ALIASES[kind], wanted, project, look, ignore_not_found=ignore_not_found):
        echo(found)


@app.command("events", short_help="Show what happened.")
def events(
    job: Annotated[str, typer.Argument(metavar="[JOB]", autocompletion=complete_job, help="Only of this job.")] = "",
    project: ProjectOption = "",
    *,
    all_projects: AllOption = False,
    last: Annotated[int, typer.Option("--last", min=1, metavar="N", help="The last N events.")] = SHOWN_EVENTS,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Times (UTC) in the place of ages.")] = False,
    watch: WatchOption = False,
    no_headers: NoHeadersOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show what happened to jobs and projects, oldest first: starts, changes of size, moves, evictions, ends.

    Examples:
      gpuquota events
      gpuquota events train1
      gpuquota events --timestamps
      gpuquota events -A --last 200 -o json
    """
    reached = client()
    chosen = "" if all_projects else listed_project_or_error(reached, project)
    name = resource(job, "job") if job else ""
    found: list[Event] = []
    for more in _histories(reached, watch=watch):
        new = [event for event in more if chosen in ("", event.project) and name in ("", event.job)]
        found = new[-last:]
        if found or not watch:
            picture = event_table(found, width=terminal_width(), headers=not no_headers, timestamps=timestamps)
            show(tuple(found), output, picture)
            no_headers = True


def _histories(reached: ClusterApi, *, watch: bool) -> Iterator[tuple[Event, ...]]:
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


def _refuse_choice(option: str, otherwise: str) -> NoReturn:
    raise UsageError(f"{option} chooses among all jobs; leave it out, or {otherwise}")


def _named(
    reached: ClusterApi, what: What, names: list[str], project: str, look: Look, *, ignore_not_found: bool
) -> str:
    """Return the objects with these names as text; "" if there are none and they may be missing."""
    found: Sequence[Job | NodeView | ProjectView]
    if what is What.JOBS:
        listed = reached.list_jobs(listed_project_or_error(reached, project)).jobs
        known = {job.spec.name: job for job in listed}
        found = by_name("job", [name for name in names if name in known or not ignore_not_found], known)
    elif what is What.NODES:
        found = named_nodes(reached, names, ignore_not_found=ignore_not_found)
        _note_left_out(reached)
    else:
        found = named_projects(reached, names, ignore_not_found=ignore_not_found)
    content = found[0] if found and len(names) == 1 else found
    return rendered(content, look.output, _table(what, found, look)) if found else ""


def _table(what: What, found: Sequence[Any], look: Look) -> str:
    if what is What.JOBS:
        return look.table(found, headers=look.headers)
    if what is What.NODES:
        return node_table(found, headers=look.headers)
    from kfp_gpuquota.cli.display.project_table import project_table  # noqa: PLC0415 (other lists do without it)

    return project_table(tuple(found), wide=look.output is Format.WIDE, headers=look.headers)


def _listed(reached: ClusterApi, what: What, jobs: Sequence[Job], look: Look) -> str:
    if what is What.PROJECTS:
        found: Sequence[Job | NodeView | ProjectView] = reached.list_projects()
    else:
        found = reached.list_nodes() if what is What.NODES else jobs
        _note_left_out(reached)
    return rendered(found, look.output, _table(what, found, look))


def _note_left_out(reached: ClusterApi) -> None:
    """Print what the list of nodes lacks for want of a right, which only a cluster of Kubernetes has."""
    if left_out := getattr(reached, "left_out", ""):
        echo(f"note: {left_out}", err=True)


def _print_pages(reached: ClusterApi, project: str, wanted: Choice, look: Look) -> None:
    """Print jobs as they come, a page at a time: columns are as wide as those of the page.

    The jobs of an array are of one page, so that they are counted in one line.
    """
    headers = look.headers
    later: tuple[Job, ...] = ()
    for listed in reached.job_pages(project, PAGE):
        jobs = (*later, *wanted.of(listed.jobs))
        later = _last_array(jobs) if listed.next_page else ()
        jobs = jobs[: len(jobs) - len(later)]
        if jobs or (headers and not listed.next_page):
            picture = "" if look.output is Format.NAME else look.table(jobs, headers=headers)
            if text := rendered(jobs, look.output, picture):
                echo(text)
            headers = False


def _last_array(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """Return the last jobs that are of one array; of the next page there may be more."""
    if not jobs or (last := jobs[-1].spec.array) is None:
        return ()
    one = itertools.takewhile(
        lambda job: (
            job.spec.array is not None and (job.spec.project, job.spec.array.name) == (jobs[-1].spec.project, last.name)
        ),
        reversed(jobs),
    )
    return tuple(one)[::-1]
