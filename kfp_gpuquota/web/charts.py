"""Figures over time as SVG paths. Pure.

A chart's drawing area is `WIDTH` by `HEIGHT` and stretched to the space that the page has, with strokes of a constant
width; its labels are HTML beside it, so that they stay legible at every width.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    Points = Sequence[tuple[float, float]]

WIDTH: Final = 600.0
HEIGHT: Final = 120.0


@dataclass(frozen=True)
class Chart:
    """A chart's paths and labels. `area` is "" where nothing is filled; `marks` are vertical lines, as x."""

    title: str
    latest: str
    line: str
    area: str
    top: str
    bottom: str
    begin: float
    end: float
    marks: tuple[str, ...] = ()


def curve(title: str, points: Points, *, begin: float, end: float, marks: Sequence[float] = ()) -> Chart | None:
    """Return a line through the points (seconds, value), between their smallest and largest value; None without any."""
    points = [(at, value) for at, value in points if math.isfinite(value)]
    if not points:
        return None
    low, high = min(value for _, value in points), max(value for _, value in points)
    padding = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    box = _Box(begin, end, low - padding, high + padding)
    return Chart(
        title=title,
        latest=short(points[-1][1]),
        line="M" + "L".join(box.place(at, value) for at, value in points),
        area="",
        top=short(high),
        bottom=short(low),
        begin=begin,
        end=end,
        marks=tuple(box.x(at) for at in marks if begin <= at <= end),
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
    line = "M" + "L".join(corners)
    area = f"{line}L{box.place(end, 0.0)}L{box.place(points[0][0], 0.0)}Z"
    return Chart(title, latest, line, area, short(top), "0", begin, end)


def short(value: float) -> str:
    """Return a number as a label shows it: 0.0421, 12.5, 19,700, 1.5M."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    size = abs(value)
    if size < 0.001:
        return f"{value:.1e}".replace("e-0", "e-")
    if size < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size < 1e6 else f"{value / 1e6:,.4g}M"


class _Box:
    """Places points: time from left to right, values upwards."""

    def __init__(self, begin: float, end: float, low: float, high: float) -> None:
        self._begin, self._span = begin, max(end - begin, 1e-9)
        self._low, self._height = low, max(high - low, 1e-300)

    def x(self, at: float) -> str:
        return _number(min(1.0, max(0.0, (at - self._begin) / self._span)) * WIDTH)

    def place(self, at: float, value: float) -> str:
        return f"{self.x(at)} {_number(HEIGHT * (1.0 - (value - self._low) / self._height))}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
