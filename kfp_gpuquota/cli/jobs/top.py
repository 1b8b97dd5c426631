"""`gpuquota top`: projects, nodes and running jobs with what they use, and the memory of shared GPUs."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path  # noqa: TC003 (typer reads annotations at run time)
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kfp_gpuquota.api.durations import UNITS_S, text_of
from kfp_gpuquota.api.history import GPU_USE_KEPT_S
from kfp_gpuquota.cli.arguments.options import (
    OutputOption,
    PrometheusOption,
    WatchOption,
    client,
    project_or_configured,
)
from kfp_gpuquota.cli.arguments.parsers import seconds as parse_seconds
from kfp_gpuquota.cli.display.output import Format, is_tabular, show, terminal_width
from kfp_gpuquota.cli.display.output import watch as watch_pictures
from kfp_gpuquota.cli.display.project_table import project_table
from kfp_gpuquota.cli.display.tables import job_table, node_table
from kfp_gpuquota.cli.display.terminal import echo
from kfp_gpuquota.errors import InvalidFieldError, UnauthorizedError, UsageError
from kfp_gpuquota.server.cluster_api import watch_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.server.cluster_api import ClusterApi

app = typer.Typer()


GPU_REFRESH_S: Final = 0.5
DAY_S: Final = UNITS_S["d"]


@app.command("top", short_help="Show the use of GPUs.")
def top(
    *,
    watch: WatchOption = False,
    gpus: Annotated[
        bool, typer.Option("--gpus", help="Each GPU in use, with its jobs and the memory of shared ones.")
    ] = False,
    since: Annotated[
        str,
        typer.Option(
            "--since",
            help="With --gpus: the use of each over the last time, such as 1h (2h at most, 1d of a Prometheus).",
        ),
    ] = "",
    prometheus: PrometheusOption = "",
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
      gpuquota top --gpus --since 1h -o json
      gpuquota --context NAME top --gpus --since 6h --prometheus http://localhost:9090
      gpuquota top --gpus --plot memory.png --seconds 120
    """
    if since and (not gpus or watch or plot is not None):
        raise UsageError("--since is the time of --gpus, without --watch and --plot: gpuquota top --gpus --since 1h")
    since_s = _since_s(since, DAY_S if prometheus else GPU_USE_KEPT_S) if since else 0.0
    reached = client()
    if plot is not None:
        echo(_plot_memory(reached, plot, seconds))
        return
    if since:
        from kfp_gpuquota.cli.display.gpus import use_table  # noqa: PLC0415

        used = reached.gpu_use(since_s, prometheus=prometheus)
        show(list(used), output, use_table(used))
        return
    if gpus and is_tabular(output):
        watch_pictures(_gpu_pictures(reached, once=not watch))
        return
    if not is_tabular(output):
        jobs = reached.list_jobs().jobs
        show({"projects": reached.list_projects(), "nodes": reached.list_nodes(), "jobs": jobs}, output)
        return
    project = _visible_project(reached)
    if watch:
        watch_pictures(_overview(reached, project) for _ in watch_jobs(reached, project))
    echo(_overview(reached, project))


def _since_s(text: str, most_s: float) -> float:
    """Return the seconds of --since. Raises InvalidFieldError."""
    found = parse_seconds("since", text)
    if not 0 < found <= most_s:
        why = "no more is kept" if most_s == GPU_USE_KEPT_S else "each 30 s are a point"
        raise InvalidFieldError("since", text, f"it must be more than 0 and at most {text_of(most_s)}: {why}")
    return found


def _overview(reached: ClusterApi, project: str) -> str:
    """Projects, nodes and running jobs, one below the other; in the place of what its user may not see, a sentence."""
    parts = (
        _if_allowed("quotas", lambda: project_table(reached.list_projects())),
        _if_allowed("nodes", lambda: node_table(reached.list_nodes())),
        job_table(_running(reached, project), width=terminal_width()),
    )
    return "\n\n".join(parts)


def _running(reached: ClusterApi, project: str) -> list[Job]:
    return [job for job in reached.list_jobs(project).jobs if not job.status.phase.final]


def _if_allowed(what: str, picture: Callable[[], str]) -> str:
    try:
        return picture()
    except UnauthorizedError:
        return f"({what} are not shown: your account may not see them)"


def _visible_project(reached: ClusterApi) -> str:
    """All, or on Kubernetes the one namespace in which a team's user may see jobs."""
    try:
        reached.list_jobs()
    except UnauthorizedError:
        return project_or_configured("")
    return ""


def _gpu_pictures(reached: ClusterApi, *, once: bool) -> Iterator[str]:
    """Memory changes without anything else changing, so it is asked for again and again."""
    from kfp_gpuquota.cli.display.gpus import gpu_table  # noqa: PLC0415

    project = _visible_project(reached)
    yield gpu_table(reached.list_nodes(), reached.list_jobs(project).jobs)
    while not once:
        time.sleep(GPU_REFRESH_S)
        yield gpu_table(reached.list_nodes(), reached.list_jobs(project).jobs)


def _plot_memory(reached: ClusterApi, path: Path, seconds: float) -> str:
    """Sample until the time is over or an interrupt, then draw; return a sentence about the picture."""
    try:
        from kfp_gpuquota.cli.display.memory_plot import Look, draw  # noqa: PLC0415
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
