"""`gpuquota twin`: the cluster's own history, replayed with other quotas or nodes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kfp_gpuquota.api.quantity import gpu_quota, whole_number
from kfp_gpuquota.cli.admin.simulate import PictureOption, draw, summary, times
from kfp_gpuquota.cli.arguments.options import OutputOption, client
from kfp_gpuquota.cli.arguments.parsers import pairs, seconds_back
from kfp_gpuquota.cli.display.output import Format, show, table
from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.errors import InvalidFieldError, NotFoundError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kfp_gpuquota.api import Job, Node, Project
    from kfp_gpuquota.simulator import History, Result, SimulationOptions, Twin

app = typer.Typer()

_LIMIT_RULE = "it is given as PROJECT=N, or PROJECT=none"


@app.command("twin", short_help="Replay this cluster's history with other quotas.")
def twin(
    since: Annotated[str, typer.Option("--since", metavar="TIME", help="How far back: 12h, 30d, 4w.")] = "30d",
    guaranteed: Annotated[
        list[str] | None, typer.Option("--guaranteed", metavar="PROJECT=N", help="Another guarantee; may be repeated.")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option("--limit", metavar="PROJECT=N", help="Another limit, or none; may be repeated."),
    ] = None,
    add_node: Annotated[
        list[str] | None,
        typer.Option(
            "--add-node", metavar="GPUS", help="One more node, as the largest but for its GPUs; may be repeated."
        ),
    ] = None,
    without_node: Annotated[
        list[str] | None, typer.Option("--without-node", metavar="NODE", help="Without this node; may be repeated.")
    ] = None,
    *,
    static: Annotated[bool, typer.Option("--static", help="Each project has its guarantee, and no more.")] = False,
    picture: PictureOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Replay the jobs that this cluster still has, in simulated time: with today's quotas and nodes, and with others.

    RECORDED is the time that the jobs really spent in the queue; how near "today" comes to it shows how far the
    simulation can be trusted. Jobs that were deleted, or have never run, are not in it; those that run have done what
    they will do.

    Examples:
      gpuquota twin --since 30d --guaranteed team-b=6
      gpuquota twin --add-node 8 --picture bigger.png
      gpuquota twin --without-node gpu-7
      gpuquota twin --static -o json
    """
    from kfp_gpuquota.simulator import SimulationOptions, Twin  # noqa: PLC0415

    cluster = client()
    projects = [view.project for view in cluster.list_projects()]
    changed = _limited(_guaranteed(projects, guaranteed or []), limit or [])
    nodes = [msgspec.structs.replace(view.node, ready=True) for view in cluster.list_nodes()]
    other_nodes = _with_nodes(_without(nodes, without_node or []), add_node or [])
    past = _history(cluster.list_jobs("").jobs, nodes, projects, seconds_back(since))
    options = SimulationOptions(clock=time.perf_counter)
    results = [_replayed("today", past, nodes, replace(options, projects=tuple(projects)))]
    if static or (changed, other_nodes) != (projects, nodes):
        other = replace(options, projects=tuple(changed))
        results.append(_replayed("static" if static else "changed", past, other_nodes, other, static=static))
    if picture is not None:
        draw(results, picture)
    found = Twin(past.queued, past.evicted, tuple(results), past.never_ran, past.of_deleted_projects)
    show(found, output, f"{summary(results)}\n\n{_by_project(found)}")
    _say_left_out(past)


def _history(jobs: Sequence[Job], nodes: Sequence[Node], projects: Sequence[Project], back_s: float) -> History:
    from kfp_gpuquota.simulator import SimulationOptions, history  # noqa: PLC0415

    now = time.time()
    names = {project.name for project in projects}
    throughput = SimulationOptions(clock=time.perf_counter).throughput
    found = history(jobs, nodes, names, since=now - back_s, now=now, throughput=throughput)
    if not found.jobs:
        raise NotFoundError("no job of this time has run yet; look further back with --since")
    return found


def _replayed(
    name: str, past: History, nodes: Sequence[Node], options: SimulationOptions, *, static: bool = False
) -> Result:
    from kfp_gpuquota.simulator import POLICIES, simulate, trace_node  # noqa: PLC0415

    policy = replace(POLICIES["static" if static else "gpuquota"], name=name)
    return simulate([trace_node(node) for node in nodes], past.jobs, policy, options)


def _guaranteed(projects: Sequence[Project], given: list[str]) -> list[Project]:
    changes = {
        name: gpu_quota("guaranteed", text)
        for name, text in pairs("guaranteed", given, "it is given as PROJECT=N").items()
    }
    return _changed(projects, "guaranteed", changes)


def _limited(projects: Sequence[Project], given: list[str]) -> list[Project]:
    texts = pairs("limit", given, _LIMIT_RULE)
    return _changed(
        projects, "limit", {name: None if text == "none" else gpu_quota("limit", text) for name, text in texts.items()}
    )


def _changed(projects: Sequence[Project], field: str, changes: Mapping[str, float | None]) -> list[Project]:
    unknown = sorted(changes.keys() - {project.name for project in projects})
    if unknown:
        raise NotFoundError(f"project {unknown[0]!r} does not exist; see: gpuquota list projects")
    return [
        msgspec.structs.replace(project, **{field: changes[project.name]}) if project.name in changes else project
        for project in projects
    ]


def _without(nodes: Sequence[Node], names: Sequence[str]) -> list[Node]:
    unknown = sorted({*names} - {node.name for node in nodes})
    if unknown:
        raise NotFoundError(f"node {unknown[0]!r} does not exist; see: gpuquota list nodes")
    return [node for node in nodes if node.name not in names]


def _with_nodes(nodes: Sequence[Node], added: Sequence[str]) -> list[Node]:
    """Add nodes as the largest one, each with its number of GPUs."""
    if added and not nodes:
        raise UsageError("--add-node needs a node of the cluster that the new one is like")
    largest = max(nodes, key=lambda node: len(node.devices), default=None)
    made = list(nodes)
    for number, text in enumerate(added, start=1):
        assert largest is not None
        count = whole_number("add_node", text)
        if count < 1:
            raise InvalidFieldError("add_node", text, "it must be at least 1 GPU")
        first = largest.devices[0]
        devices = tuple(msgspec.structs.replace(first, index=i, uuid="") for i in range(count))
        made.append(msgspec.structs.replace(largest, name=f"added-{number}", devices=devices))
    return made


def _by_project(found: Twin) -> str:
    columns = ("PROJECT", "JOBS", "QUEUED RECORDED", *(f"{one.policy.upper()} MEAN (P95)" for one in found.results))
    columns += ("EVICTIONS RECORDED", *(one.policy.upper() for one in found.results))
    rows = [
        (
            *(name, recorded.count, times(recorded), *(_queued(one, name, recorded.count) for one in found.results)),
            *(found.evicted[name], *(one.evicted[name] for one in found.results)),
        )
        for name, recorded in found.queued.items()
    ]
    return table(columns, rows)


def _queued(result: Result, project: str, jobs: int) -> str:
    """Return the time in the queue of the jobs that start: "3m (1.5h), 2 never start"."""
    never = jobs - result.queued[project].count
    return f"{times(result.queued[project])}{f', {never} never start' if never else ''}"


def _say_left_out(past: History) -> None:
    for count, why in (
        (past.never_ran, "have never run"),
        (past.of_deleted_projects, "are of projects that do not exist"),
    ):
        if count:
            echo(f"{count} jobs are left out, which {why}", err=True)
