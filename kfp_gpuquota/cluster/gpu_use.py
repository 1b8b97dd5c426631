"""The use of each GPU over the last hours: means over intervals, of which a bounded number is kept."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.history import GPU_USE_KEPT_S, GPU_USE_WIDTH_S, UsePoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfp_gpuquota.fractions.activity import GpuUse

MOST_POINTS: Final = int(GPU_USE_KEPT_S / GPU_USE_WIDTH_S)
"""Of each GPU 4 KB."""


class GpuUseHistory:
    """The use of GPUs by their names. What was not measured has no point."""

    def __init__(self) -> None:
        self._rings: dict[str, _Ring] = {}

    def add(self, measured: Mapping[str, GpuUse], now: float) -> None:
        """Add what was measured at `now` (seconds since the epoch); forget GPUs that were not measured for long."""
        for name, use in measured.items():
            self._rings.setdefault(name, _Ring()).add(use, now)
        gone = [name for name, ring in self._rings.items() if ring.begins[-1] < now - GPU_USE_KEPT_S]
        for name in gone:
            del self._rings[name]

    def of(self, name: str, since: float = 0.0) -> tuple[UsePoint, ...]:
        """Return a GPU's points of intervals that end after `since`, oldest first."""
        ring = self._rings.get(name)
        return () if ring is None else ring.points(since)


class _Ring:
    """One GPU: the begin of each interval, the sum of the percents, their number, and the largest memory in it."""

    def __init__(self) -> None:
        self.begins, self._sums, self._counts = array("d"), array("f"), array("H")
        self._memory = array("i")  # -1: not known

    def add(self, use: GpuUse, now: float) -> None:
        begin = now // GPU_USE_WIDTH_S * GPU_USE_WIDTH_S
        if self.begins and begin < self.begins[-1]:  # the clock was set back
            kept = bisect_right(self.begins, begin)
            for values in (self.begins, self._sums, self._counts, self._memory):
                del values[kept:]
        if not self.begins or begin > self.begins[-1]:
            for values, first in ((self.begins, begin), (self._sums, 0.0), (self._counts, 0), (self._memory, -1)):
                values.append(first)  # type: ignore[arg-type]
                del values[:-MOST_POINTS]
        self._sums[-1] += use.percent
        self._counts[-1] += 1
        self._memory[-1] = max(self._memory[-1], -1 if use.used_mib is None else use.used_mib)

    def points(self, since: float) -> tuple[UsePoint, ...]:
        rows = zip(self.begins, self._sums, self._counts, self._memory, strict=True)
        points = (
            UsePoint(begin, round(total / count, 1), None if mib < 0 else mib) for begin, total, count, mib in rows
        )
        return tuple(point for point in points if point.until > since)
