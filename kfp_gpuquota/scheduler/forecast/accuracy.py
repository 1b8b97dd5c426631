"""How right past estimates were, and the ranges that follow from it.

The plays know nothing of jobs that will be submitted, so that actual waits are longer than played ones, and a few of
them do not show how much run times scatter. Both are measured: of each job that has started, the time that it waited
after an estimate, as a multiple of what was estimated then. The range of a new estimate is that of the middle 80 % of
the latest multiples. (Split conformal prediction, on a sliding window.) Until there are `FEWEST` of them it is that of
the plays.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from kfp_gpuquota.api.job import ExpectedStart

if TYPE_CHECKING:
    from collections.abc import Iterable

FEWEST: Final = 20
LATEST: Final = 500
OF_ONE_JOB: Final = 8
"""Estimates of one job that are compared: those of a job that waits for days do not outnumber all others."""
SHORT_S: Final = 60.0
"""Waits are compared with at least this one."""
CONFIDENCE: Final = 0.8
"""The part of the starts that lie within their ranges."""


class _Stated(NamedTuple):
    at: float
    middle: float
    shown: ExpectedStart


class Accuracy:
    """The estimates of jobs that wait, and what became of the latest ones; times are in seconds since the epoch."""

    def __init__(self) -> None:
        self._stated: dict[str, list[_Stated]] = {}
        self._multiples: deque[float] = deque(maxlen=LATEST)
        self._held: deque[bool] = deque(maxlen=LATEST)

    @property
    def compared(self) -> int:
        """Return how many of the latest estimates are compared with the actual starts."""
        return len(self._held)

    @property
    def held(self) -> float:
        """Return the part of these of which the range held; 1.0 if there are none."""
        return sum(self._held) / len(self._held) if self._held else 1.0

    def ranged(self, played: ExpectedStart, now: float) -> ExpectedStart:
        """Return the range to show for what the plays gave."""
        if len(self._multiples) < FEWEST:
            return played
        ordered = sorted(self._multiples)
        outside = (1.0 - CONFIDENCE) / 2
        first = int(outside * len(ordered))
        wait = max(0.0, (played.earliest + played.latest) / 2 - now)
        earliest, latest = now + wait * ordered[first], now + wait * ordered[-1 - first]
        return ExpectedStart(earliest=earliest, latest=latest, held=round(self.held, 2))

    def state(self, uid: str, now: float, played: ExpectedStart, shown: ExpectedStart) -> None:
        """Remember an estimate of a job that waits."""
        stated = self._stated.setdefault(uid, [])
        if len(stated) == OF_ONE_JOB:
            del stated[1::2]
        stated.append(_Stated(now, (played.earliest + played.latest) / 2, shown))

    def started(self, uid: str, at: float) -> None:
        """Compare the job's estimates with its start."""
        for one in self._stated.pop(uid, ()):
            self._multiples.append((at - one.at) / max(SHORT_S, one.middle - one.at))
            self._held.append(one.shown.earliest - SHORT_S <= at <= one.shown.latest + SHORT_S)

    def keep(self, waiting: Iterable[str]) -> None:
        """Forget the estimates of jobs that do not wait any more, and have not started."""
        kept = set(waiting)
        for uid in [uid for uid in self._stated if uid not in kept]:
            del self._stated[uid]
