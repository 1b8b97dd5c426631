"""Parsers of what a job waits for: `--begin`, `--after` and `--array`, in Slurm's forms."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from kfp_gpuquota.api import durations
from kfp_gpuquota.api.start_conditions import MAX_TIME, parse_after
from kfp_gpuquota.cli.arguments.names import resource
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import tzinfo

MAX_ARRAY: Final = 1000
_RANGE: Final = re.compile(r"(\d{1,6})(?:-(\d{1,6})(?::(\d{1,6}))?)?")
_CLOCK: Final = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")


class Array(NamedTuple):
    """The indices of an array's jobs, and how many of them are queued or run at a time; None: all."""

    indices: tuple[int, ...]
    limit: int | None


def begin_time(text: str, now: float, zone: tzinfo | None = None) -> float:
    """Return the time of "+2h", "22:00[:30]" (the next one) or "2027-01-31T22:00", in seconds since the epoch.

    Times without a time zone are in `zone`, or in the local one. Raises InvalidFieldError.
    """
    wait = text.removeprefix("now")  # as Slurm has it: now, now+2h
    if text == "now":
        return now
    if wait.startswith("+") and (seconds := durations.seconds(wait[1:])) is not None:
        return now + seconds
    try:
        found = _CLOCK.fullmatch(text)
        at = _next(now, zone, *(int(part or 0) for part in found.groups())) if found else datetime.fromisoformat(text)
        # of a local time that does not exist, as clocks are put forward: the one after the gap
        seconds = (at if at.tzinfo or zone is None else at.replace(tzinfo=zone)).timestamp()
    except (ValueError, OverflowError, OSError):
        raise InvalidFieldError(
            "begin", text, "a time is written as +2h, 22:00, 2027-01-31T22:00 or 2027-01-31T22:00Z"
        ) from None
    if not 0 <= seconds <= MAX_TIME:
        raise InvalidFieldError("begin", text, "a time must be between the years 1970 and 2100")
    return seconds


def _next(now: float, zone: tzinfo | None, hour: int, minute: int, second: int) -> datetime:
    """Return the next time at which clocks show this; without a time zone if `zone` is None."""
    here = datetime.fromtimestamp(now, zone)
    at = here.replace(hour=hour, minute=minute, second=second, microsecond=0, fold=0)
    return at if at.timestamp() > now else at + timedelta(days=1)


def dependencies(given: Sequence[str], arrays: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the jobs in ["prep,any:clean", ...]; the name of one of the `arrays` means all of its jobs."""
    return tuple(dict.fromkeys(_each(given, arrays)))


def _each(given: Sequence[str], arrays: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for word in (word.strip() for text in given for word in text.split(",")):
        name = resource(parse_after(word).name, "job")
        if not word or ":" in name:
            raise InvalidFieldError("after", word, "a job is written as prep, or any:prep; several as prep,any:clean")
        prefix = word[: len(word) - len(parse_after(word).name)]
        yield from (prefix + each for each in arrays.get(name, (name,)))


def array_of(text: str) -> Array:
    """Return the indices and the limit of "0-99%8", "1,5,7" or "0-30:10". Raises InvalidFieldError."""
    ranges, percent, most = text.partition("%")
    found = [_RANGE.fullmatch(part) for part in ranges.split(",")]
    if any(one is None for one in found) or (percent and not (most.isascii() and most.isdigit() and int(most))):
        raise InvalidFieldError(
            "array", text, "indices are written as 0-99, 1,5,7 or 0-30:10, a limit behind them as %8"
        )
    indices = [index for one in found if one is not None for index in _indices(*one.groups())]
    if not indices or len(set(indices)) != len(indices):
        raise InvalidFieldError("array", text, "it must have one index at least, and none twice")
    if len(indices) > MAX_ARRAY:
        raise InvalidFieldError("array", text, f"an array has at most {MAX_ARRAY} jobs")
    return Array(tuple(indices), int(most) if percent else None)


def _indices(first: str, last: str | None, step: str | None) -> range:
    return range(int(first), int(last or first) + 1, max(1, int(step or 1)))
