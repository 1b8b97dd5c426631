"""The range of starts of each waiting job, of several plays of the state with different run times.

In play `k` of `n` a job has the quantile `(h + k / n) mod 1` of its run times, with `h` spread evenly over the jobs: so
the plays together try all parts of each distribution, one play has all kinds of jobs, and the same state gives the same
forecast, which does not move at random from one time to the next.
"""

from __future__ import annotations

from math import ceil, inf
from typing import TYPE_CHECKING, Final
from zlib import crc32

from kfp_gpuquota.api.job import ExpectedStart
from kfp_gpuquota.scheduler.forecast.accuracy import OUTSIDE
from kfp_gpuquota.scheduler.forecast.play import Effort, play, usual_effort
from kfp_gpuquota.scheduler.forecast.run_time import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kfp_gpuquota.scheduler.forecast.run_time import RunTime
    from kfp_gpuquota.scheduler.state.state import State


SEVERAL: Final = 4
UNSURE: Final = 0.25


def expected_starts(
    state: State,
    now: float,
    run_time: Callable[[str], RunTime],
    effort: Effort | None = None,
    *,
    in_time: Callable[[], bool] = lambda: True,
) -> dict[str, ExpectedStart]:
    """Return when the waiting jobs are expected to start, by uid; those of which it is unknown are left out.

    `run_time(uid)` is what is known of a job, `effort` by default the usual one. Once `in_time()` is false no further
    play begins, and the first one ends: jobs that start later in it are left out. The state is the same afterwards.
    """
    forecast = Forecast(state, now, run_time, effort)
    while forecast.step(in_time):
        pass
    return forecast.starts()


class Forecast:
    """A forecast in steps, between which the state may change; for the parameters see `expected_starts`."""

    def __init__(
        self, state: State, now: float, run_time: Callable[[str], RunTime], effort: Effort | None = None
    ) -> None:
        self._state, self._now = state, now
        self._jobs = {uid: run_time(uid) for uid, job in state.jobs.items() if not job.removed}
        self._plays, self._cycles = usual_effort(len(self._jobs)) if effort is None else effort
        self._spread = {uid: crc32(uid.encode()) / 2**32 for uid in self._jobs}
        self._found: dict[str, list[float]] = {}
        self._played = 0

    def step(self, in_time: Callable[[], bool]) -> bool:
        """Make one play; return whether there is another one to make."""
        offset = self._played / self._plays

        def left_s(uid: str) -> float:
            return self._jobs.get(uid, UNKNOWN).left((self._spread.get(uid, 0.0) + offset) % 1.0)

        starts = play(self._state, self._now, left_s, self._cycles, in_time)
        if self._played and not in_time():
            return False  # it may have been cut short, and would count as never for most jobs
        for uid, at in starts.items():
            self._found.setdefault(uid, []).append(at)
        self._played += 1
        return self._played < self._plays and in_time()

    def starts(self) -> dict[str, ExpectedStart]:
        """Return the expected starts after these steps."""
        jobs = self._state.jobs
        waiting = {uid: starts for uid, starts in self._found.items() if uid in jobs and not jobs[uid].active}
        ranges = {uid: _range(starts, self._played, self._now) for uid, starts in waiting.items()}
        return {uid: between for uid, between in ranges.items() if between is not None}


def _range(starts: Sequence[float], plays: int, now: float) -> ExpectedStart | None:
    """Return the range of the starts but for `OUTSIDE` of them on each side, by nearest rank.

    A play without a start counts as never.

    Fewer than `SEVERAL` plays do not show how much the starts scatter: then it is a part of the wait.
    """
    ordered = sorted(starts) + [inf] * (plays - len(starts))
    latest = ordered[min(plays - 1, ceil((1.0 - OUTSIDE) * plays) - 1)]
    if latest == inf:
        return None
    earliest = ordered[int(OUTSIDE * plays)]
    if plays < SEVERAL:
        return ExpectedStart(earliest=earliest - UNSURE * (earliest - now), latest=latest + UNSURE * (latest - now))
    return ExpectedStart(earliest=earliest, latest=latest)
