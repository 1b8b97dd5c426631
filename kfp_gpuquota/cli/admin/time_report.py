"""Where the time of each project's jobs went, for `gpuquota report --time-spent`. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.api.time_spent import Activity, time_spent
from kfp_gpuquota.cli.display.output import csv_text, duration, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kfp_gpuquota.api import Job

Row = dict[str, str | float]
"""A project, the number of its jobs, and the seconds that these spent on each activity."""


def time_rows(jobs: Iterable[Job], since: float, now: float) -> list[Row]:
    """Return a row for each project, by name, of its jobs that were submitted since then."""
    rows: dict[str, Row] = {}
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


def as_table(rows: Sequence[Row]) -> str:
    """Return the rows as a table; activities of no job are left out."""
    shown = [each for each in Activity if any(row[f"{each}_s"] for row in rows)]
    cells = ([row["project"], row["jobs"], *(duration(float(row[f"{each}_s"])) for each in shown)] for row in rows)
    return table(("PROJECT", "JOBS", *(each.label.partition(" (")[0].upper() for each in shown)), cells)


def as_csv(rows: Sequence[Row]) -> str:
    """Return the rows as CSV, with all activities."""
    columns = ("project", "jobs", *(f"{activity}_s" for activity in Activity))
    return csv_text(columns, ([row[column] for column in columns] for row in rows))
