"""`gpuquota report`: GPU-hours of each project, or where the time of its jobs went."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec
import typer

from kfp_gpuquota.api.time_spent import Activity, time_spent
from kfp_gpuquota.cli.arguments.options import PrometheusOption, client
from kfp_gpuquota.cli.arguments.parsers import seconds_back
from kfp_gpuquota.cli.display.output import csv_text, duration, in_json, table
from kfp_gpuquota.cli.display.terminal import echo, echo_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.history import GpuHours

app = typer.Typer()


Row = TypeVar("Row")

_COLUMNS: Final = ("PROJECT", "GUARANTEED", "BORROWED", "GPU-HOURS", "UNUSED")


class ReportFormat(StrEnum):
    """What `-o` takes here."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


@app.command("report", short_help="Show GPU-hours by project.")
def report(
    since: Annotated[str, typer.Option("--since", metavar="TIME", help="How far back: 12h, 30d, 4w.")] = "30d",
    *,
    prometheus: PrometheusOption = "",
    time_spent: Annotated[
        bool,
        typer.Option("--time-spent", help="Instead: where the time of the jobs went that were submitted since then."),
    ] = False,
    output: Annotated[ReportFormat, typer.Option("--output", "-o", help="How to show it.")] = ReportFormat.TABLE,
) -> None:
    """Show how many GPU-hours each project held, within its guarantee and borrowed.

    On Kubernetes the history is that of the Prometheus that scrapes the controller, and GPU-hours that no project held
    are a row as well. If it scrapes NVIDIA's dcgm-exporter, too, UNUSED are the GPU-hours in which a project held GPUs
    that did nothing. The embedded cluster keeps 400 days.

    With --time-spent: how long the projects' jobs waited and for what, started, ran and changed their sizes, of those
    that the cluster still has.

    Examples:
      gpuquota report --since 7d
      gpuquota report --since 7d --time-spent
      kubectl -n monitoring port-forward service/prometheus 9090 &
      gpuquota --context NAME report --since 30d --prometheus http://localhost:9090 -o csv
    """
    if time_spent:
        now = time.time()
        spent = time_rows(client().list_jobs("").jobs, now - seconds_back(since), now)
        _show(spent, output, in_csv=time_csv, in_table=time_table)
        return
    rows = client().gpu_hours(seconds_back(since), prometheus=prometheus)
    _show(rows, output, in_csv=_csv, in_table=_table)


def _show(
    rows: Sequence[Row],
    output: ReportFormat,
    *,
    in_csv: Callable[[Sequence[Row]], str],
    in_table: Callable[[Sequence[Row]], str],
) -> None:
    if output is ReportFormat.JSON:
        echo_data(in_json(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode()))
    elif output is ReportFormat.CSV:
        echo_data(in_csv(rows))
    else:
        echo(in_table(rows))


def _row(row: GpuHours) -> tuple[str, float, float, float, float | None]:
    return row.project, row.guaranteed, row.borrowed, row.total, row.unused


def _table(rows: Sequence[GpuHours]) -> str:
    columns = _COLUMNS if any(row.unused is not None for row in rows) else _COLUMNS[:-1]
    return table(columns, (_row(row)[: len(columns)] for row in rows))


def _csv(rows: Sequence[GpuHours]) -> str:
    columns = ("project", "guaranteed_gpu_hours", "borrowed_gpu_hours", "gpu_hours", "unused_gpu_hours")
    return csv_text(columns, map(_row, rows))


TimeRow = dict[str, str | float]
"""A project, the number of its jobs, and the seconds that these spent on each activity."""


def time_rows(jobs: Iterable[Job], since: float, now: float) -> list[TimeRow]:
    """Return a row for each project, by name, of its jobs that were submitted since then."""
    rows: dict[str, TimeRow] = {}
    sums: dict[str, dict[Activity, float]] = {}
    for job in jobs:
        if job.status.submitted_at < since:
            continue
        of_project = sums.setdefault(job.spec.project, dict.fromkeys(Activity, 0.0))
        for activity, seconds in time_spent(job.status, now).items():
            of_project[activity] += seconds
        row = rows.setdefault(job.spec.project, {"project": job.spec.project, "jobs": 0})
        row["jobs"] = int(row["jobs"]) + 1
    for project, row in rows.items():
        row |= {f"{activity}_s": round(seconds, 3) for activity, seconds in sums[project].items()}
    return [rows[project] for project in sorted(rows)]


def time_table(rows: Sequence[TimeRow]) -> str:
    """Return the rows as a table; activities of no job are left out."""
    shown = [each for each in Activity if any(row[f"{each}_s"] for row in rows)]
    cells = ([row["project"], row["jobs"], *(duration(float(row[f"{each}_s"])) for each in shown)] for row in rows)
    return table(("PROJECT", "JOBS", *(each.label.partition(" (")[0].upper() for each in shown)), cells)


def time_csv(rows: Sequence[TimeRow]) -> str:
    """Return the rows as CSV, with all activities."""
    columns = ("project", "jobs", *(f"{activity}_s" for activity in Activity))
    return csv_text(columns, ([row[column] for column in columns] for row in rows))
