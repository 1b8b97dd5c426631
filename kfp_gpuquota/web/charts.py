"""Figures over time or steps as SVG paths. Pure.

A chart's drawing area is `WIDTH` by `HEIGHT` and stretched to the space that the page has, with strokes of a constant
width; its labels are HTML beside it, so that they stay legible at every width. A value that is not a number, or that
was not reported, interrupts its line and is marked as a gap: it never looks like a value.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Points = Sequence[tuple[float, float]]

WIDTH: Final = 600.0
HEIGHT: Final = 120.0
LARGEST_IN_WORDS: Final = 1e9


@dataclass(frozen=True)
class Line:
    """One run's line. `at` and `values` belong to each of its points, at `xs`; they are shown under the pointer.

    `unsmoothed` is the path of the values themselves where `path` is their moving average, else "".
    """

    name: str
    path: str
    latest: str
    xs: str
    at: str
    values: str
    unsmoothed: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart's paths and labels. `area` is "" where nothing is filled; `marks` are vertical lines, as x.

    `gaps` are the parts (x, width) in which a value is missing, and `note` says so.
    """

    title: str
    lines: tuple[Line, ...]
    top: str
    bottom: str
    begin: float
    end: float
    area: str = ""
    marks: tuple[str, ...] = ()
    gaps: tuple[tuple[str, str], ...] = ()
    note: str = ""

    @property
    def latest(self) -> str:
        """Return the last value of the first line."""
        return self.lines[0].latest


def curves(
    title: str, runs: Sequence[tuple[str, Points]], *, begin: float, end: float, marks: Sequence[float] = (),
    logarithmic: bool = False, span: tuple[float, float] | None = None, smoothing: float = 0.0,
) -> Chart | None:  # fmt: skip
    """Return a line for each run (name, points), between their smallest and largest value; None without any point.

    A point is (x, value): x in seconds or steps. `span`: the smallest and largest value that the chart has room for.
    `smoothing`: 0 or the weight, below 1, that a moving average gives to what came before each value.
    """
    runs = [(name, points) for name, points in runs if points]
    if not runs:
        return None
    shown = [value for _, points in runs for _, value in points if _drawn(value, logarithmic=logarithmic)]
    low, high = span or ((min(shown), max(shown)) if shown else (1.0, 1.0))
    scale = math.log10 if logarithmic else float
    padding = (scale(high) - scale(low)) * 0.06 or abs(scale(high)) * 0.05 or 1.0
    box = _Box(begin, end, scale(low) - padding, scale(high) + padding)
    gaps = tuple(_gaps(runs[0][1], box, logarithmic=logarithmic))
    return Chart(
        title=title,
        lines=tuple(_line(name, points, box, logarithmic=logarithmic, smoothing=smoothing) for name, points in runs),
        top=short(high) if shown else "",
        bottom=short(low) if shown else "",
        begin=begin,
        end=end,
        marks=tuple(box.x(at) for at in marks if begin <= at <= end),
        gaps=gaps,
        note=_note(runs, logarithmic=logarithmic),
    )


def steps(title: str, points: Points, *, begin: float, end: float, top: float, latest: str) -> Chart | None:
    """Return a stepped line from 0 to `top`: each value holds until the next point."""
    if not points:
        return None
    box = _Box(begin, end, 0.0, top * 1.08 or 1.0)
    corners = [box.place(*points[0])]
    for (_, before), (at, value) in itertools.pairwise(points):
        corners += [box.place(at, before), box.place(at, value)]
    corners.append(box.place(end, points[-1][1]))
    path = "M" + "L".join(corners)
    area = f"{path}L{box.place(end, 0.0)}L{box.place(points[0][0], 0.0)}Z"
    held = [*points, (end, points[-1][1])]
    line = Line("", path, latest, *_under_pointer(held, box))
    return Chart(title, (line,), short(top), "0", begin, end, area)


def short(value: float) -> str:
    """Return a number as a label shows it: 0.0421, 12.5, 19,700, 1.5M, 2.5e30."""
    if value == 0 or not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{value:g}"
    size = abs(value)
    if size < 0.001 or size >= LARGEST_IN_WORDS:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    if size < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size < 1e6 else f"{value / 1e6:,.4g}M"


def _drawn(value: float, *, logarithmic: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not logarithmic)


def smoothed(points: Points, weight: float) -> list[tuple[float, float]]:
    """Return the exponential moving average of the values, as TensorBoard's: without a bias towards its beginning.

    Values that are not finite stay as they are, and are left out of the average.
    """
    total, weights, found = 0.0, 0.0, []
    for x, value in points:
        if not math.isfinite(value):
            found.append((x, value))
            continue
        total, weights = weight * total + value, weight * weights + 1.0
        found.append((x, total / weights))
    return found


def _line(name: str, points: Points, box: _Box, *, logarithmic: bool, smoothing: float) -> Line:
    path, unsmoothed = _path(points, box, logarithmic=logarithmic), ""
    if smoothing:
        path, unsmoothed = _path(smoothed(points, smoothing), box, logarithmic=logarithmic), path
    return Line(name, path, short(points[-1][1]), *_under_pointer(points, box), unsmoothed)


def _path(points: Points, box: _Box, *, logarithmic: bool) -> str:
    scale = math.log10 if logarithmic else float
    pieces = itertools.groupby(points, key=lambda point: _drawn(point[1], logarithmic=logarithmic))
    return "".join("M" + "L".join(box.place(x, scale(v)) for x, v in piece) for drawn, piece in pieces if drawn)


def _under_pointer(points: Points, box: _Box) -> tuple[str, str, str]:
    """Return the positions, the seconds or steps, and the values of the points, with spaces between them."""
    begin = box.begin
    return (
        " ".join(box.x(x) for x, _ in points),
        " ".join(f"{x - begin:.0f}" for x, _ in points),
        " ".join(f"{value:.5g}" for _, value in points),
    )


def _gaps(points: Points, box: _Box, *, logarithmic: bool) -> Iterator[tuple[str, str]]:
    """Yield the parts between the last value before a gap and the first one after it."""
    before = points[0][0]
    for drawn, group in itertools.groupby(points, key=lambda point: _drawn(point[1], logarithmic=logarithmic)):
        piece = list(group)
        if drawn:
            before = piece[-1][0]
            continue
        after = next((x for x, value in points if x > piece[-1][0]), box.end)
        begin, end = float(box.x(before)), float(box.x(after))
        yield _number(begin), _number(max(3.0, end - begin))


def _note(runs: Sequence[tuple[str, Points]], *, logarithmic: bool) -> str:
    """Return what of the first run is no number, or cannot be drawn."""
    values = [value for _, value in runs[0][1]]
    strange = [value for value in values if not math.isfinite(value)]
    if strange:
        words = "inf" if strange[-1] > 0 else "-inf" if strange[-1] < 0 else "no number"
        last = f"{words} now" if not math.isfinite(values[-1]) else f"{words} at times"
        return f"{last}: {len(strange)} of {len(values)} reports"
    hidden = sum(value <= 0 for value in values) if logarithmic else 0
    of_them = "1 value of 0 or less is" if hidden == 1 else f"{hidden} values of 0 or less are"
    return f"{of_them} not drawn" if hidden else ""


class _Box:
    """Places points: time or steps from left to right, values upwards."""

    def __init__(self, begin: float, end: float, low: float, high: float) -> None:
        self.begin, self.end, self._span = begin, end, max(end - begin, 1e-9)
        self._low, self._height = low, max(high - low, 1e-300)

    def x(self, at: float) -> str:
        return _number(min(1.0, max(0.0, (at - self.begin) / self._span)) * WIDTH)

    def place(self, at: float, value: float) -> str:
        return f"{self.x(at)} {_number(HEIGHT * (1.0 - (value - self._low) / self._height))}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
