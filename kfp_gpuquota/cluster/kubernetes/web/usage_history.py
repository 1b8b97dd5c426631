"""What teams held since this process was started: the changes of their quotas' statuses, and means over intervals."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from kfp_gpuquota.api.history import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kfp_gpuquota.api.wire import ProjectView

MAX_CHANGES: Final = 2000
"""Of each team; of one that changes more often the oldest are forgotten."""


class _Change(NamedTuple):
    """GPUs from `at` (seconds since the epoch) on."""

    at: float
    held: float
    borrowed: float
    wanted: float
    guaranteed: float


class UsageHistory:
    """The changes of all teams, by name."""

    def __init__(self) -> None:
        self._changes: dict[str, deque[_Change]] = {}

    def note(self, view: ProjectView, at: float) -> None:
        """Take what a team holds from now on."""
        found = self._changes.setdefault(view.project.name, deque(maxlen=MAX_CHANGES))
        change = _Change(at, view.allocated, view.over_quota, view.requested, view.project.guaranteed_in_all)
        if not found or found[-1][1:] != change[1:]:
            found.append(change)

    def forget(self, name: str) -> None:
        """Forget a team whose quota was deleted."""
        self._changes.pop(name, None)

    def of(self, name: str, width_s: int, since: float, now: float) -> Iterator[Usage]:
        """Yield the team's means in intervals of `width_s` that begin after `since`, oldest first."""
        changes = list(self._changes.get(name, ()))
        if not any(change.held or change.wanted for change in changes):
            since = max(since, now - width_s)  # of thousands of idle teams one interval each is enough
        ends = [change.at for change in changes[1:]] + [now]
        sums: dict[int, list[float]] = {}
        for change, end in zip(changes, ends, strict=True) if changes else ():
            for begin, seconds in _parts(max(change.at, since), end, width_s):
                summed = sums.setdefault(begin, [0.0] * 5)
                for i, value in enumerate((1.0, *change[1:])):
                    summed[i] += value * seconds
        for begin, (seconds, *amounts) in sums.items():
            held, borrowed, wanted, guaranteed = (amount / seconds for amount in amounts)
            yield Usage(
                project=name,
                at=begin,
                width_s=width_s,
                seconds=seconds,
                held=held,
                borrowed=borrowed,
                wanted=wanted,
                guaranteed=guaranteed,
            )


def _parts(begin: float, end: float, width_s: int) -> Iterator[tuple[int, float]]:
    """Yield (begin of an interval, seconds in it) for the time from `begin` to `end`."""
    while begin < end:
        interval = int(begin // width_s) * width_s
        until = min(end, interval + width_s)
        yield interval, until - begin
        begin = until
