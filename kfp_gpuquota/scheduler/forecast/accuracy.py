"""How right past estimates were, and how wide the ranges of new ones are made because of that.

The plays know nothing of jobs that will be submitted, and a few plays do not show how much run times scatter. So the
start of each job is compared with the ranges that were shown. Both sides of later ranges become wider when a start was
outside, and narrower when it was inside, in such steps that a tenth of the starts lies outside on each side in the long
run (adaptive conformal inference, Gibbs and Candes, 2021). Rejected: the quantiles of (actual / estimated wait) of jobs
that have started. Those that wait longest are compared last, so while a queue grows these quantiles are too short: on
the traces of Philly and Pollux half of the starts were outside.
"""

from __future__ import annotations

from collections import deque
from math import exp
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.api.job import ExpectedStart

if TYPE_CHECKING:
    from collections.abc import Iterable

FEWEST: Final = 20
"""Compared starts, fewer of which are no measurement."""
LATEST: Final = 500
OF_ONE_JOB: Final = 8
"""Estimates of one job that are compared: those of a job that waits for days do not outnumber all others."""
EXACT_S: Final = 60.0
"""A start that is so close to a range counts as within it."""
CONFIDENCE: Final = 0.8
"""The part of the starts that lie within their ranges."""
OUTSIDE: Final = (1.0 - CONFIDENCE) / 2
STEP: Final = 0.1
"""With half of it the ranges of a queue that grows widened too late: those that wait longest are compared last."""
NARROWEST, WIDEST = 0.25, 16.0
"""At 4 the later side stayed too short on Philly's trace, where jobs that arrive later come first: 61 % held."""


class Accuracy:
    """The estimates of jobs that wait, and what became of the latest ones; times are in seconds since the epoch.

    `sooner` and `later` are the factors of the parts of a range before and after its middle.
    """

    def __init__(self) -> None:
        self._stated: dict[str, list[ExpectedStart]] = {}
        self._held: deque[bool] = deque(maxlen=LATEST)
        self._late: dict[str, float] = {}
        self.sooner = self.later = 1.0

    @property
    def compared(self) -> int:
        """Return how many of the latest estimates are compared with the actual starts."""
        return len(self._held)

    @property
    def held(self) -> float:
        """Return the part of these of which the range held; 1.0 if there are none."""
        return sum(self._held) / len(self._held) if self._held else 1.0

    def ranged(self, played: ExpectedStart, now: float) -> ExpectedStart:
        """Return the range to show for that of the plays."""
        if self.compared < FEWEST:
            return played
        middle = (played.earliest + played.latest) / 2
        half = middle - played.earliest
        earliest, latest = max(now, middle - self.sooner * half), middle + self.later * half
        return ExpectedStart(earliest=earliest, latest=latest, held=round(self.held, 2))

    def state(self, uid: str, shown: ExpectedStart) -> None:
        """Remember an estimate of a job that waits."""
        stated = self._stated.setdefault(uid, [])
        if len(stated) == OF_ONE_JOB:
            del stated[1::2]
        stated.append(shown)

    def started(self, uid: str, at: float) -> None:
        """Compare the job's estimates with its start."""
        for shown in self._stated.pop(uid, ()):
            early, late = at < shown.earliest - EXACT_S, at > shown.latest + EXACT_S
            self.sooner = _adapted(self.sooner, missed=early)
            self.later = _adapted(self.later, missed=late)
            self._held.append(not early and not late)

    def newly_late(self, now: float) -> dict[str, float]:
        """Return the jobs that still wait after the first range that was stated of them, with its end; each once."""
        over = {uid: stated[0].latest for uid, stated in self._stated.items() if now > stated[0].latest + EXACT_S}
        new = {uid: latest for uid, latest in over.items() if uid not in self._late}
        self._late |= new
        return new

    def keep(self, waiting: Iterable[str]) -> None:
        """Forget the estimates of jobs that do not wait any more, and have not started."""
        kept = set(waiting)
        for uid in [uid for uid in self._stated if uid not in kept]:
            del self._stated[uid]
        self._late = {uid: at for uid, at in self._late.items() if uid in kept}


def _adapted(factor: float, *, missed: bool) -> float:
    return min(WIDEST, max(NARROWEST, factor * exp(STEP * (missed - OUTSIDE))))
