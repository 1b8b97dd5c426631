"""What the workers report at each point of the training, put together. No Ray, no I/O.

Ray Train lets all workers wait in `report` until the last one has called it. Here none waits: a report carries its
point in the training and the workers that trained there, and is complete once each of them has reported that point or
has ended. So a change of size in between disturbs nothing, and a lost worker is not waited for.

Invariant: a point is recorded once. Where a loop resumes at a checkpoint of its job, workers come again to what was
reported after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

R = TypeVar("R")


@dataclass(frozen=True, order=True)
class Point:
    """A call of `report`: its epoch, the global steps applied before it, and the calls at that step before it.

    In their order: an epoch that is trained again with more workers has fewer steps.
    """

    epoch: int
    step: int
    call: int


@dataclass
class _Open(Generic[R]):
    members: tuple[str, ...]
    reports: dict[str, R] = field(default_factory=dict)


class Reports(Generic[R]):
    """The points that some workers have reported and others have not, oldest first."""

    def __init__(self, before: Point | None = None) -> None:
        """`before`: the last point of the attempts that this one continues."""
        self._before = before
        self._complete_points: set[Point] = set()
        self._open: dict[Point, _Open[R]] = {}
        self._ended: set[str] = set()

    def add(self, point: Point, worker: str, members: Sequence[str], report: R) -> list[list[R]]:
        """Add a worker's report; return the complete points with their reports by rank."""
        if not self.recorded(point):
            self._open.setdefault(point, _Open(tuple(members))).reports[worker] = report
        return self._complete()

    def end(self, worker: str) -> list[list[R]]:
        """Record that a worker reports nothing any more; return the complete points, as `add` does."""
        self._ended.add(worker)
        return self._complete()

    def recorded(self, point: Point) -> bool:
        """Return whether a point was complete before."""
        return point in self._complete_points or (self._before is not None and point <= self._before)

    @property
    def last(self) -> Point | None:
        """Return the last point that was complete."""
        return max(self._complete_points, default=self._before)

    def _complete(self) -> list[list[R]]:
        done = [point for point, each in self._open.items() if set(each.members) <= {*each.reports, *self._ended}]
        self._complete_points.update(done)
        return [_by_rank(self._open.pop(point)) for point in done]


def _by_rank(point: _Open[R]) -> list[R]:
    return [point.reports[member] for member in point.members if member in point.reports]
