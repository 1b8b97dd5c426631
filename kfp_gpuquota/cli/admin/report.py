"""`gpuquota report`: GPU-hours of each project, user or type of GPU, what they cost, or where the time of jobs went."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec
import typer

from kfp_gpuquota.api.prices import Prices
from kfp_gpuquota.api.time_spent import Activity, time_spent
from kfp_gpuquota.cli.arguments.options import PrometheusOption, client
from kfp_gpuquota.cli.arguments.parsers import seconds_back
from kfp_gpuquota.cli.display.output import csv_text, duration, in_json, table
from kfp_gpuquota.cli.display.terminal import echo, echo_data
from kfp_gpuquota.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.history import GpuHours, HeldHours

app = typer.Typer()


Row = TypeVar("Row")

_COLUMNS: Final = ("PROJECT", "GUARANTEED", "BORROWED", "GPU-HOURS", "UNUSED")


class ReportFormat(StrEnum):
    """What `-o` takes here."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


class Part(StrEnum):
    """By what the GPU-hours of a project are divided."""

    USER = "user"
    GPU_TYPE = "gpu-type"


@app.command("report", short_help="Show GPU-hours by project.")
def report(
    since: Annotated[str, typer.Option("--since", metavar="TIME", help="How far back: 12h, 30d, 4w.")] = "30d",
    *,
    prometheus: PrometheusOption = "",
    by: Annotated[
        list[Part] | None, typer.Option("--by", help="Divide them by user or type of GPU, or both; may be repeated.")
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="[TYPE=]PRICE",
            help="Show what they cost: the price of a GPU-hour, of a type or of all others; may be repeated.",
        ),
    ] = None,
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

    With --by and --price: GPU-hours by user (as their jobs name them with label gpuquota.dev/user, or as whom they run)
    and type of GPU (as nodes name it with label nvidia.com/gpu.product), and their cost.

    With --time-spent: how long the projects' jobs waited and for what, started, ran and changed their sizes, of those
    that the cluster still has.

    Examples:
      gpuquota report --since 7d
      gpuquota report --since 7d --by user --price 1.20 --price NVIDIA-H100-80GB-HBM3=4.10
      gpuquota report --since 7d --time-spent
      kubectl -n monitoring port-forward service/prometheus 9090 &
      gpuquota --context NAME report --since 30d --prometheus http://localhost:9090 -o csv
    """
    if time_spent and (by or price):
        raise UsageError("--time-spent is about the time of jobs: leave out --by and --price, or ask twice")
    if time_spent:
        now = time.time()
        spent = time_rows(client().list_jobs("").jobs, now - seconds_back(since), now)
        _show(spent, output, in_csv=time_csv, in_table=time_table)
        return
    if by or price:
        prices = Prices.parse(price or ())
        held = client().held_hours(seconds_back(since), prometheus=prometheus)
        if unknown := prices.unknown(held):
            types = ", ".join(sorted({row.gpu_type for row in held if row.gpu_type})) or "none has a label for its type"
            echo(f"No GPU of type {', '.join(unknown)} was held; those that were held: {types}.", err=True)
        _show(held_rows(held, by or (), prices), output, in_csv=_held_csv, in_table=_held_table)
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


HeldRow = dict[str, str | float | None]
"""Names of what the GPU-hours are divided by, `gpu_hours`, and `cost` where there are prices."""


def held_rows(held: Iterable[HeldHours], by: Sequence[Part], prices: Prices) -> list[HeldRow]:
    """Return a row for each project and part of it, the most GPU-hours first; a cost is None if a price is missing."""
    rows: dict[tuple[str, ...], HeldRow] = {}
    for one in held:
        key = {"project": one.project}
        if Part.USER in by:
            key["user"] = one.user
        if Part.GPU_TYPE in by:
            key["gpu_type"] = one.gpu_type
        row = rows.setdefault(tuple(key.values()), {**key, "gpu_hours": 0.0, **({"cost": 0.0} if prices else {})})
        row["gpu_hours"] = float(row["gpu_hours"] or 0.0) + one.gpu_hours
        if prices:
            before, more = row["cost"], prices.cost(one)
            row["cost"] = None if before is None or more is None else float(before) + more
    for row in rows.values():
        row |= {name: round(value, 2) for name, value in row.items() if isinstance(value, float)}
    return [rows[key] for key in sorted(rows, key=lambda key: (-float(rows[key]["gpu_hours"] or 0.0), key))]


def _held_table(rows: Sequence[HeldRow]) -> str:
    """Return the rows as a table; what has no name or price is a dash."""
    columns = tuple(rows[0]) if rows else ("project", "gpu_hours")
    headings = [name.replace("gpu_hours", "gpu-hours").replace("_", " ").upper() for name in columns]
    return table(headings, (["-" if value in {"", None} else value for value in row.values()] for row in rows))


def _held_csv(rows: Sequence[HeldRow]) -> str:
    """Return the rows as CSV."""
    return csv_text(tuple(rows[0]) if rows else ("project", "gpu_hours"), (tuple(row.values()) for row in rows))


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
