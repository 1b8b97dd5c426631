"""When and at what price an administrator lets jobs be moved to gather free GPUs. Pure; the time is an argument.

A window is written as "22:00-06:00", with days before it if it opens on some only: "Mon-Fri 22:00-06:00" or "Sat,Sun
00:00-24:00". Rejected: a cron expression with a duration, as in Karpenter's disruption budgets: two fields that must
fit together, and whose end nobody can read off them.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple
from zoneinfo import ZoneInfo

import msgspec

from kfp_gpuquota.api.validation import MAX_SECONDS, check_range
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_GPU_MINUTES: Final = 100_000_000.0
_ROUND_S: Final = 300.0
_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY: Final = "|".join(_DAYS)
_WINDOW: Final = re.compile(
    rf"(?:((?:{_DAY})(?:[-,](?:{_DAY}))*) )?(\d{{1,2}}):(\d{{2}})-(\d{{1,2}}):(\d{{2}})", re.IGNORECASE
)
_MINUTES_OF_DAY: Final = 1440


class Opening(NamedTuple):
    """One occurrence of a window, in seconds since the epoch."""

    start: float
    end: float


class Window(NamedTuple):
    """The days of the week (Monday is 0) on which it opens, and its start and end in minutes of the day."""

    days: frozenset[int]
    start: int
    end: int
    zone: ZoneInfo | None


class Defragmentation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The window in which jobs may be moved to gather free GPUs, and what the moves may cost.

    `time_zone` is a name such as Europe/Berlin; "": that of the machine. `budget_gpu_minutes` is the work that all
    moves of one window may lose, `max_gpu_minutes_per_gpu` what they may lose for each GPU of a node that becomes free.
    A worker is moved only if it has run for `min_age_s`.
    """

    window: str
    time_zone: str = ""
    budget_gpu_minutes: float = 600.0
    max_gpu_minutes_per_gpu: float = 15.0
    min_age_s: float = 1800.0

    def __post_init__(self) -> None:
        _parsed(self.window, self.time_zone)
        check_range("defragmentation.budget_gpu_minutes", self.budget_gpu_minutes, 0, MAX_GPU_MINUTES, "GPU minutes")
        check_range(
            "defragmentation.max_gpu_minutes_per_gpu", self.max_gpu_minutes_per_gpu, 0, MAX_GPU_MINUTES, "GPU minutes"
        )
        check_range("defragmentation.min_age_s", self.min_age_s, 1, MAX_SECONDS, "s")

    @property
    def round_s(self) -> float:
        """The time between two searches for moves within a window, in seconds."""
        return min(_ROUND_S, self.min_age_s)

    def open_at(self, now: float) -> Opening | None:
        """Return the occurrence of the window that `now` is in, or None."""
        return _open_at(_parsed(self.window, self.time_zone), int(now // 60))

    def opens_after(self, now: float) -> float:
        """Return when the window opens next."""
        return _opens_after(_parsed(self.window, self.time_zone), int(now // 60))


@lru_cache(maxsize=16)
def _parsed(window: str, time_zone: str) -> Window:
    """Return the window. Raises InvalidFieldError."""
    found = _WINDOW.fullmatch(window)
    rule = "a window is written as 22:00-06:00, Mon-Fri 22:00-06:00 or Sat,Sun 00:00-24:00"
    if found is None:
        raise InvalidFieldError("defragmentation.window", window, rule)
    hours, minutes = [int(found[i]) for i in (2, 4)], [int(found[i]) for i in (3, 5)]
    start, end = (60 * hour + minute for hour, minute in zip(hours, minutes, strict=True))
    if max(minutes) >= 60 or start >= _MINUTES_OF_DAY or end > _MINUTES_OF_DAY or start == end:
        raise InvalidFieldError("defragmentation.window", window, f"its times must be two of a day; {rule}")
    return Window(_days(found[1]), start, end, _zone(time_zone))


def _days(text: str | None) -> frozenset[int]:
    """Return the days in "Mon-Wed,Sat"; all without a text. "Sat-Mon" has Sunday in it."""
    days: set[int] = set()
    for part in text.title().split(",") if text else ("Mon-Sun",):
        names = [_DAYS.index(name) for name in part.split("-")]
        days |= {(names[0] + i) % 7 for i in range((names[-1] - names[0]) % 7 + 1)}
    return frozenset(days)


def _zone(name: str) -> ZoneInfo | None:
    try:
        return ZoneInfo(name) if name else None
    except (KeyError, ValueError, OSError):
        rule = "it must be the name of a time zone"
        raise InvalidFieldError("defragmentation.time_zone", name, rule, hint="for example Europe/Berlin") from None


def _openings(window: Window, minute: int) -> Iterator[Opening]:
    """Yield the occurrences from the day before a minute (since the epoch) on, for eight days."""
    here = datetime.fromtimestamp(60 * minute, window.zone)
    for days in range(-1, 8):
        midnight = datetime(here.year, here.month, here.day, tzinfo=window.zone) + timedelta(days=days)
        if midnight.weekday() in window.days:
            length = timedelta(days=window.end <= window.start)
            start = midnight + timedelta(minutes=window.start)  # of clocks, also on days that are not 24 hours long
            yield Opening(start.timestamp(), (midnight + length + timedelta(minutes=window.end)).timestamp())


@lru_cache(maxsize=64)
def _open_at(window: Window, minute: int) -> Opening | None:
    return next((one for one in _openings(window, minute) if one.start <= 60 * minute < one.end), None)


@lru_cache(maxsize=64)
def _opens_after(window: Window, minute: int) -> float:
    return next(one.start for one in _openings(window, minute) if one.start > 60 * minute)
