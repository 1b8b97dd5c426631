"""What a job waits for before it is queued: a time, the ends of other jobs, its turn in an array. Pure.

The words are Slurm's: `begin`, `after` (afterok, or with "any:" afterany), an array with at most N jobs at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec

from kfp_gpuquota.api.validation import (
    MAX_NAME_LENGTH,
    Count,
    Name,
    PositiveCount,
    check_count,
    check_name,
    check_range,
)
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from kfp_gpuquota.api.job import JobSpec

ANY_END: Final = "any:"
INDEX_VARIABLE: Final = "GPUQUOTA_ARRAY_INDEX"
MAX_AFTER: Final = 256
"""Each end of a job costs time for each name in the lists of those that wait for it."""
MAX_TIME: Final = 4_102_444_800
"""The year 2100, in seconds since the epoch."""
_PATTERN: Final = f"^({ANY_END})?[a-z0-9]([-a-z0-9]*[a-z0-9])?$"

Dependency = Annotated[
    str, msgspec.Meta(extra_json_schema={"pattern": _PATTERN, "maxLength": len(ANY_END) + MAX_NAME_LENGTH})
]
Dependencies = Annotated[tuple[Dependency, ...], msgspec.Meta(extra_json_schema={"maxItems": MAX_AFTER})]
Time = Annotated[float, msgspec.Meta(extra_json_schema={"minimum": 0, "maximum": MAX_TIME})]


class ArrayTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job's place in the array `name` of its project, of which at most `limit` jobs are queued or run at a time."""

    name: Name
    index: Count
    limit: PositiveCount | None = None

    def __post_init__(self) -> None:
        check_name("array.name", self.name)
        check_count("array.index", self.index, unit="")
        if self.limit is not None:
            check_count("array.limit", self.limit, 1, unit="jobs")


class After(NamedTuple):
    """A job of the same project that has to end first: with success, unless `any_end`."""

    name: str
    any_end: bool


def parse_after(text: str) -> After:
    """Return the dependency in "prep" or "any:prep"."""
    return After(text.removeprefix(ANY_END), text.startswith(ANY_END))


def check_start_conditions(spec: JobSpec) -> None:
    """Raise InvalidFieldError for conditions that are written wrongly, or that a job cannot meet."""
    if len(spec.after) > MAX_AFTER:
        raise InvalidFieldError("after", len(spec.after), f"a job waits for at most {MAX_AFTER} others")
    for text in spec.after:
        name = parse_after(text).name
        check_name("after", name)
        if name == spec.name:
            raise InvalidFieldError("after", text, "a job cannot wait for its own end")
    if spec.begin_at is not None:
        check_range("begin_at", spec.begin_at, 0, MAX_TIME, "s since 1970")
