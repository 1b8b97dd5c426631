"""What the workers report at each point of the training, put together. No Ray, no I/O.

Ray Train lets all workers wait in `report` until the last one has called it. Here none waits: a report carries its
point in the training and the workers that trained there, and is complete once each of them has reported that point or
has ended. So a change of size in between disturbs nothing, and a lost worker is not waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

R = TypeVar("R")


@dataclass(frozen=True)
class Point:
    """A call of `report`: the global steps applied before it, and the calls at that step before it."""

    step: int
    call: int


@dataclass
class _Open(Generic[R]):
    members: tuple[str, ...]
    reports: dict[str, R] = field(default_factory=dict)


class Reports(Generic[R]):
    """The points that some workers have reported and others have not, oldest first."""

    def __init__(self) -> None:
        self._open: dict[Point, _Open[R]] = {}
        self._ended: set[str] = set()

    def add(self, point: Point, worker: str, members: Sequence[str], report: R) -> list[list[R]]:
        """Add a worker's report; return the complete points with their reports by rank."""
        self._open.setdefault(point, _Open(tuple(members))).reports[worker] = report
        return self._complete()

    def end(self, worker: str) -> list[list[R]]:
        """Record that a worker reports nothing any more; return the complete points, as `add` does."""
        self._ended.add(worker)
        return self._complete()

    def _complete(self) -> list[list[R]]:
        done = [point for point, each in self._open.items() if set(each.members) <= {*each.reports, *self._ended}]
        return [_by_rank(self._open.pop(point)) for point in done]


def _by_rank(point: _Open[R]) -> list[R]:
    return [point.reports[member] for member in point.members if member in point.reports]
