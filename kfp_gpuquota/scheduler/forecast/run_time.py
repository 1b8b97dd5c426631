"""What is known of the time for which a job runs, as a distribution.

A quantile `part` (0 to 1) of it is a possible run time; `inf` where nothing is known. Of a job that has run for longer
than all of its examples did, it is assumed that it runs for about as long again (Pareto, as run times are in the traces
of Philly and Alibaba), rather than that it ends now.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class RunTime:
    """Possible run times in seconds. `examples`: those of comparable jobs, in order. `most_s`: the declared maximum.

    `ran_s` is how long it has run. `left_s`: what its own progress leaves, which is better than any example.
    """

    examples: tuple[float, ...] = ()
    most_s: float = inf
    ran_s: float = 0.0
    left_s: float | None = None

    def left(self, part: float) -> float:
        """Return the run time that is left, in seconds, at the quantile `part` of what is possible; at least 0."""
        most = max(0.0, self.most_s - self.ran_s)
        if self.left_s is not None:
            return min(self.left_s, most)
        longer = len(self.examples) - (at := bisect_right(self.examples, self.ran_s))
        if longer:
            return min(self.examples[at + min(longer - 1, int(part * longer))] - self.ran_s, most)
        if self.examples:
            return min(self.ran_s * part / (1.0 - min(part, 0.99)), most)
        return most


def examples_of(ended: Sequence[float], running: Iterable[float]) -> tuple[float, ...]:
    """Return the examples that follow from run times, of jobs that have ended and so far of those that run, in order.

    Of a job that runs it is the median of what is possible. Those that have ended alone would be too short: the longest
    ones still run.
    """
    known = tuple(sorted(ended))
    medians = (ran_s + RunTime(known, ran_s=ran_s).left(0.5) for ran_s in running)
    return tuple(sorted([*known, *medians]))


UNKNOWN: Final = RunTime()
"""Nothing is known: the job may run without end."""
