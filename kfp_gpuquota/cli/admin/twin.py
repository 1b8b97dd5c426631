"""`gpuquota twin`: the cluster's own history, replayed with other quotas or nodes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kfp_gpuquota.cli.admin.simulate import PictureOption, draw, summary, times
from kfp_gpuquota.cli.arguments.options import OutputOption, client
from kfp_gpuquota.cli.arguments.parsers import seconds_back
from kfp_gpuquota.cli.arguments.suppositions import (
    GuaranteedOption,
    LimitOption,
    NewNodeOption,
    NodeOption,
    changed_projects,
    new_node,
)
from kfp_gpuquota.cli.display.output import Format, show, table
from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kfp_gpuquota.api import Job, Node, Project
    from kfp_gpuquota.api.wire import NewNode
    from kfp_gpuquota.simulator import History, Result, SimulationOptions, Twin

app = typer.Typer()


@app.command("twin", short_help="Replay this cluster's history with other quotas.")
def twin(
    since: Annotated[str, typer.Option("--since", metavar="TIME", help="How far back: 12h, 30d, 4w.")] = "30d",
    guaranteed: GuaranteedOption = None,
    limit: LimitOption = None,
    without_node: NodeOption = None,
    with_node: NewNodeOption = None,
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
      gpuquota twin --with-node 8 --picture bigger.png
      gpuquota twin --without-node gpu-7
      gpuquota twin --static -o json
    """
    from kfp_gpuquota.simulator import SimulationOptions, Twin  # noqa: PLC0415

    cluster = client()
    projects = [view.project for view in cluster.list_projects()]
    changes = {project.name: project for project in changed_projects(cluster, guaranteed or [], limit or [])}
    changed = [changes.get(project.name, project) for project in projects]
    nodes = [msgspec.structs.replace(view.node, ready=True) for view in cluster.list_nodes()]
    other_nodes = [*_without(nodes, without_node or []), *_added(nodes, list(map(new_node, with_node or [])))]
    options = SimulationOptions(clock=time.perf_counter)
    past = _history(cluster.list_jobs("").jobs, nodes, projects, seconds_back(since), options)
    results = [_replayed("today", past, nodes, replace(options, projects=tuple(projects)))]
    if static or (changed, other_nodes) != (projects, nodes):
        other = replace(options, projects=tuple(changed))
        results.append(_replayed("static" if static else "changed", past, other_nodes, other, static=static))
    if picture is not None:
        draw(results, picture)
    found = Twin(past.queued, past.evicted, tuple(results), past.never_ran, past.of_deleted_projects)
    show(found, output, f"{summary(results)}\n\n{_by_project(found)}")
    _say_left_out(past)


def _history(
    jobs: Sequence[Job], nodes: Sequence[Node], projects: Sequence[Project], back_s: float, options: SimulationOptions
) -> History:
    from kfp_gpuquota.simulator import history  # noqa: PLC0415

    now = time.time()
    names = {project.name for project in projects}
    found = history(jobs, nodes, names, since=now - back_s, now=now, throughput=options.throughput)
    if not found.jobs:
        raise NotFoundError("no job of this time has run yet; look further back with --since")
    return found


def _replayed(
    name: str, past: History, nodes: Sequence[Node], options: SimulationOptions, *, static: bool = False
) -> Result:
    from kfp_gpuquota.simulator import POLICIES, simulate, trace_node  # noqa: PLC0415

    policy = replace(POLICIES["static" if static else "gpuquota"], name=name)
    return simulate([trace_node(node) for node in nodes], past.jobs, policy, options)


def _without(nodes: Sequence[Node], names: Sequence[str]) -> list[Node]:
    unknown = sorted({*names} - {node.name for node in nodes})
    if unknown:
        raise NotFoundError(f"node {unknown[0]!r} does not exist; see: gpuquota list nodes")
    return [node for node in nodes if node.name not in names]


def _added(nodes: Sequence[Node], added: Sequence[NewNode]) -> Iterator[Node]:
    memory_mib = min((node.gpu_memory_mib for node in nodes if node.gpu_memory_mib), default=0)
    for number, new in enumerate(added, start=1):
        yield new.node(f"added-{number}", (node.labels for node in nodes if node.pool == new.pool), memory_mib)


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
