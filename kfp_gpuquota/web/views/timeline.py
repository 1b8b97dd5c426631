"""The Timeline page: which job held how many GPUs when, expected starts, GPU-hours by team and user, their cost."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final

from kfp_gpuquota.api.history import gpu_hours_of
from kfp_gpuquota.api.prices import Prices
from kfp_gpuquota.api.quantity import as_number
from kfp_gpuquota.errors import InvalidFieldError
from kfp_gpuquota.web.live import Elements
from kfp_gpuquota.web.query import Choices, Query, Slice
from kfp_gpuquota.web.rendering import render
from kfp_gpuquota.web.views.gpu_map import Projects
from kfp_gpuquota.web.views.teams import SPANS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kfp_gpuquota.api import Job
    from kfp_gpuquota.api.history import HeldHours, Usage
    from kfp_gpuquota.web.views.board import Board

    Sizes = Sequence[tuple[float, float]]

SIZES: Final = (25, 50, 100, 250)
WIDTH: Final = 1000.0
HEIGHT: Final = 20.0
MOST_USERS: Final = 100
AHEAD: Final = 0.25
"""How far the page shows the future, as a part of the span."""
_SECONDS_PER_HOUR: Final = 3600.0


@dataclass(frozen=True, kw_only=True)
class Filter(Choices):
    """Of which project, how far back, and at which prices (as `gpuquota report --price`, with commas between them)."""

    KEYS: ClassVar = ("project", "span", "size", "page", "price")

    project: str = ""
    span: str = "hour"
    size: int = 50
    price: str = ""
    prices: Prices = field(default_factory=Prices, compare=False)

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Filter:
        """Return the filter of a query string."""
        query = Query(given)
        price, prices = query.text("price"), Prices()
        try:
            prices = Prices.parse(part for part in price.split(",") if part.strip())
        except InvalidFieldError as error:
            query.problems.append(error.message)
        return cls(
            price=price,
            prices=prices,
            project=query.project(),
            span=query.choice("span", SPANS, "hour"),
            size=query.number("size", cls.size, max(SIZES)),
            page=query.number("page", 1),
            problems=tuple(query.problems),
        )


@dataclass(frozen=True)
class Row:
    """One job's line. `area` is the path of its GPUs over time; `starts` is where its start is expected (x, width)."""

    job: Job
    gpu_hours: float
    most: int | float
    area: str = ""
    starts: tuple[str, str] | None = None


class Window:
    """The time that is shown: `begin` to `now`, and on to `end`."""

    def __init__(self, now: float, span_s: float) -> None:
        self.begin, self.now, self.end = now - span_s, now, now + AHEAD * span_s

    def x(self, at: float) -> float:
        """Return where a time is drawn."""
        at = min(self.end, max(self.begin, at))
        return round((at - self.begin) / (self.end - self.begin) * WIDTH, 1)

    def pieces(self, sizes: Sizes) -> Iterator[tuple[float, float, float]]:
        """Yield (from, to, GPUs) of the times in the window at which a job held GPUs."""
        for (at, gpus), (end, _) in itertools.pairwise([*sizes, (self.now, 0.0)]):
            if gpus and end > self.begin and at < self.now:
                yield max(at, self.begin), min(end, self.now), gpus


def elements(board: Board, base: str, wanted: Filter) -> Elements:
    """Return what the page shows."""
    source = board.source
    span_s, width_s = SPANS[wanted.span]
    window = Window(source.now(), span_s)
    found = [*held(board, wanted, window), *expected(board, wanted, window)]
    part = Slice.of(wanted, len(found))
    colors = Projects({view.project.name: view.project.guaranteed for view in source.projects()})
    rows = {
        f"line-{row.job.uid}": render(
            "timeline_row.html", row=row, base=base, now=window.x(window.now), kind=colors.of([row.job.spec.project])
        )
        for row in found[part.begin : part.end]
    }
    usage = [one for one in source.usage(width_s, window.begin) if wanted.project in ("", one.project)]
    hours = render("gpu_hours.html", rows=gpu_hours_of(usage), shares=shares(usage), span=wanted.span)
    held_by = [one for one in source.held_hours(span_s) if wanted.project in ("", one.project)]
    users = render("user_hours.html", rows=user_hours(held_by, wanted.prices), priced=bool(wanted.prices))
    pager = render("pager.html", part=part, chosen=wanted, sizes=SIZES, things="jobs")
    counts = render("timeline_counts.html", part=part, span=wanted.span)
    parts = {"counts": counts, "pager": pager, "hours": hours, "user-hours": users}
    return Elements(parts, {"timeline": rows})


def held(board: Board, wanted: Filter, window: Window) -> list[Row]:
    """Return a row for each job that held GPUs in the window, the one with the most GPU-hours first."""
    rows = []
    for job in board.facts.jobs:
        status = job.status
        if not (status.workers or status.started_at) or wanted.project not in ("", job.spec.project):
            continue
        if status.finished_at is not None and status.finished_at < window.begin:
            continue
        pieces = list(window.pieces(board.source.sizes_of(job)))
        if pieces:
            gpu_s = sum((end - begin) * gpus for begin, end, gpus in pieces)
            most = max(gpus for _, _, gpus in pieces)
            rows.append(Row(job, gpu_s / _SECONDS_PER_HOUR, as_number(most), _area(pieces, most, window)))
    return sorted(rows, key=lambda row: (-row.gpu_hours, row.job.uid))


def expected(board: Board, wanted: Filter, window: Window) -> list[Row]:
    """Return a row for each waiting job that is expected to start before the window's end, the next one first."""
    rows = []
    for job in board.facts.jobs:
        start = job.status.expected_start
        if start is not None and start.earliest < window.end and wanted.project in ("", job.spec.project):
            begin, end = window.x(max(start.earliest, window.now)), window.x(start.latest)
            place = (f"{begin:g}", f"{max(4.0, end - begin):g}")
            rows.append((start.earliest, job.uid, Row(job, 0.0, job.spec.gpus, starts=place)))
    return [row for _, _, row in sorted(rows, key=lambda each: each[:2])]


def user_hours(held: Iterable[HeldHours], prices: Prices) -> list[tuple[HeldHours, float | None]]:
    """Return the first rows with what each cost; None where that is not known."""
    return [(one, prices.cost(one)) for one in itertools.islice(held, MOST_USERS)]


def shares(usage: Iterable[Usage]) -> Mapping[str, tuple[float, float]]:
    """Return each project's part of what was guaranteed and of what was held, in percent."""
    held_s: dict[str, float] = {}
    guaranteed_s: dict[str, float] = {}
    for one in usage:
        name, seconds = one.project, one.seconds
        held_s[name] = held_s.get(name, 0.0) + one.held * seconds
        guaranteed_s[name] = guaranteed_s.get(name, 0.0) + one.guaranteed * seconds
    all_held, all_guaranteed = sum(held_s.values()) or 1.0, sum(guaranteed_s.values()) or 1.0
    return {name: (100 * guaranteed_s[name] / all_guaranteed, 100 * held_s[name] / all_held) for name in held_s}


def _area(pieces: Iterable[tuple[float, float, float]], most: float, window: Window) -> str:
    drawn = []
    for begin, end, gpus in pieces:
        height = round(HEIGHT * gpus / most, 1)
        width = max(1.0, window.x(end) - window.x(begin))
        drawn.append(f"M{window.x(begin):g} {HEIGHT - height:g}h{width:g}v{height:g}h{-width:g}z")
    return "".join(drawn)
