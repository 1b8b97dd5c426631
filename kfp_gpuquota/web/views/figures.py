"""What trainings report, as charts: of one job, or of several over one another."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from kfp_gpuquota.api.history import UsePoint
from kfp_gpuquota.errors import NotFoundError
from kfp_gpuquota.web import charts
from kfp_gpuquota.web.query import Choices, Query

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.history import Report
    from kfp_gpuquota.web.charts import Chart
    from kfp_gpuquota.web.source import Source

MAX_FIGURES: Final = 8
MAX_COMPARED: Final = 4
MAX_GPUS: Final = 16
AXES: Final = {"time": "time since its first report", "step": "step"}
SCALES: Final = {"linear": "linear", "log": "logarithmic"}
SMOOTHINGS: Final = {"0": "none", "0.6": "0.6", "0.9": "0.9", "0.99": "0.99"}
"""Weights of what came before each value."""


@dataclass(frozen=True, kw_only=True)
class View(Choices):
    """How charts are drawn: over time or steps, on which scale, how smooth, with which jobs ("project/name")."""

    KEYS: ClassVar = ("compare", "x", "scale", "smooth")

    compare: str = ""
    x: str = "time"
    scale: str = "linear"
    smooth: str = "0"
    others: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, str], project: str, source: Source) -> View:
        """Return the view of a query string on the page of a job in this project. A name alone is in that project."""
        query = Query(given)
        asked = [name.strip() for name in query.text("compare").split(",") if name.strip()]
        pairs = [(owner or project, name) for owner, _, name in (one.rpartition("/") for one in asked)]
        others = []
        for owner, name in dict.fromkeys(pairs):
            try:
                source.job(owner, name)
            except NotFoundError as error:
                query.problems.append(error.message.partition(";")[0])
                continue
            others.append((owner, name))
        if len(others) > MAX_COMPARED:
            query.problems.append(f"compare has {len(others)} jobs; the first {MAX_COMPARED} of them are shown")
        return cls(
            compare=query.text("compare"),
            x=query.choice("x", AXES, "step" if others else "time"),
            scale=query.choice("scale", SCALES, "linear"),
            smooth=query.choice("smooth", SMOOTHINGS, "0"),
            others=tuple(others[:MAX_COMPARED]),
            problems=tuple(query.problems),
        )


@dataclass(frozen=True)
class Run:
    """One job with its reports."""

    job: Job
    reports: Sequence[Report]

    def points(self, value_of: Callable[[Report], float | None], axis: str) -> list[tuple[float, float]]:
        """Return (seconds since the first report, or step; value); from its first value on, NaN where there is none."""
        begin = self.reports[0].at if self.reports else 0.0
        found = [
            (report.at - begin if axis == "time" else float(report.step), value_of(report)) for report in self.reports
        ]
        first = next((i for i, (_, value) in enumerate(found) if value is not None), len(found))
        return [(x, math.nan if value is None else value) for x, value in found[first:]]


def figure_charts(runs: Sequence[Run], view: View) -> Iterator[Chart]:
    """Yield a chart for each figure that the first job reports, then those of the others, its steps and throughput."""
    runs = [run for run in runs if run.reports]
    if not runs:
        return
    begin, end = _ends(runs, view.x)
    first = runs[0].reports[0].at
    marks = [change.at - first for change in runs[0].job.status.resizes] if view.x == "time" else []
    names = dict.fromkeys(name for run in runs for report in run.reports for name in report.figures)
    figures: list[tuple[str, Callable[[Report], float | None]]] = [(name, _metric(name)) for name in names]
    figures[MAX_FIGURES:] = []
    if view.x == "time":
        figures.append(("step", lambda report: float(report.step)))
    figures.append(("samples/s", lambda report: report.throughput or None))
    figures.append(("noise scale (samples)", lambda report: report.noise_scale))
    for title, value_of in figures:
        lines = [(f"{run.job.spec.project}/{run.job.spec.name}", run.points(value_of, view.x)) for run in runs]
        drawn = charts.curves(
            title, lines, begin=begin, end=end, marks=marks, logarithmic=view.scale == "log",
            smoothing=0.0 if title == "step" else float(view.smooth),
        )  # fmt: skip
        if drawn is not None:
            yield drawn


def use_charts(source: Source, held: Iterable[tuple[str, str, int, int, float]]) -> Iterator[Chart]:
    """Yield a chart for each GPU (title, node, index, memory in MiB, since when) that was measured.

    Both of its lines are in percent: of the time that a kernel ran, and of the memory.
    """
    end = source.now()
    for title, node, index, memory_mib, since in itertools.islice(held, MAX_GPUS):
        points = [point for point in source.gpu_use(node, index) if point.until > since]
        points = [point for point in points if point.at >= since] or points  # the first one may be another job's, too
        if not points:
            continue
        begin, last = points[0].at, points[-1]
        points.append(UsePoint(max(end, last.at), last.percent, last.used_mib))  # it goes on until now
        lines = [("used", [(point.at - begin, point.percent) for point in points])]
        if memory_mib:
            known = [(point.at - begin, point.used_mib) for point in points if point.used_mib is not None]
            lines.append(("memory", [(at, min(100.0, round(100 * mib / memory_mib, 1))) for at, mib in known]))
        drawn = charts.curves(title, lines, begin=0.0, end=max(1.0, end - begin), span=(0.0, 100.0))
        if drawn is not None:
            yield drawn


def _metric(name: str) -> Callable[[Report], float | None]:
    return lambda report: report.figures.get(name)


def _ends(runs: Sequence[Run], axis: str) -> tuple[float, float]:
    if axis == "time":
        return 0.0, max(run.reports[-1].at - run.reports[0].at for run in runs) + 1.0
    found = [float(report.step) for run in runs for report in run.reports]
    return min(0.0, *found), max(found)
