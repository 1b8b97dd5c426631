"""Checks that name the field, its value and the range, so that each message can be shown to a user as it is."""

from __future__ import annotations

import re
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta

from kfp_gpuquota.api.quantity import as_number
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_NAME_LENGTH: Final = 63
MAX_NODE_NAME_LENGTH: Final = 253
MAX_COUNT: Final = 1_000_000
MAX_MIB: Final = 1 << 40
MIN_CORES: Final = 0.001
MAX_PRIORITY: Final = 1_000_000_000
MAX_SECONDS: Final = 86_400
MOST_LABELS: Final = 64
MOST_LABEL_LETTERS: Final = 253
MAX_RUNTIME_S: Final = 365 * 86_400
MAX_WEIGHT: Final = 1_000_000
_PATTERN: Final = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"

# What the checks below hold, for JSON Schema: as a description only, since msgspec's own message for a value out of
# range names neither the value nor the next step.
Name = Annotated[str, Meta(extra_json_schema={"pattern": _PATTERN, "minLength": 1, "maxLength": MAX_NAME_LENGTH})]
Count = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_COUNT})]
Gpus = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_COUNT})]
PositiveCount = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": MAX_COUNT})]
Mebibytes = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_MIB})]
Cores = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_COUNT})]
Fraction = Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})]
Priority = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_PRIORITY})]
Seconds = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_SECONDS})]
RunTime = Annotated[float, Meta(extra_json_schema={"minimum": 1, "maximum": MAX_RUNTIME_S})]
Weight = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_WEIGHT})]

_LABEL = re.compile(_PATTERN[1:-1])
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_name(field: str, value: str) -> None:
    """A DNS label (RFC 1123), so that every name also works as a Kubernetes object's."""
    if len(value) <= MAX_NAME_LENGTH and _LABEL.fullmatch(value):
        return
    raise InvalidFieldError(
        field,
        value,
        f"a name is 1 to {MAX_NAME_LENGTH} lower-case letters, digits and '-', and starts and ends with one "
        "of the first two",
        hint=f"for example {_suggested(value)!r}",
    )


def _suggested(name: str) -> str:
    """Return a valid name that resembles this one, as `team-a` does `Team_A`."""
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower())
    return letters[:MAX_NAME_LENGTH].strip("-") or "train-digits-2"


def check_job_labels(labels: Mapping[str, str]) -> None:
    """Raise InvalidFieldError for more or longer labels of a job than lists and logs can show."""
    if len(labels) > MOST_LABELS:
        raise InvalidFieldError("labels", len(labels), f"a job has at most {MOST_LABELS} labels")
    for key, value in labels.items():
        for text in (key, value):
            if len(text) > MOST_LABEL_LETTERS or not text.isprintable():
                rule = f"a label's key and value are up to {MOST_LABEL_LETTERS} printable characters"
                raise InvalidFieldError("labels", f"{text[:40]}...", rule)


def check_node_name(field: str, value: str) -> None:
    """Labels joined by dots (RFC 1123): machines are often called by their whole DNS name."""
    if len(value) <= MAX_NODE_NAME_LENGTH and all(_LABEL.fullmatch(part) for part in value.split(".")):
        return
    rule = f"a node's name is 1 to {MAX_NODE_NAME_LENGTH} lower-case letters, digits, '-' and '.'"
    raise InvalidFieldError(field, value, rule, hint="for example 'node-1.example.com'")


def check_range(field: str, value: float, low: float, high: float, unit: str = "") -> None:
    """low <= value <= high; `unit` is only for the message."""
    if not low <= value <= high:  # also refuses NaN
        raise InvalidFieldError(field, value, f"it must be between {low} and {high}{unit and ' ' + unit}")


def check_count(field: str, value: int, low: int = 0, unit: str = "GPUs", high: int = MAX_COUNT) -> None:
    """A whole number of things from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidFieldError(field, value, "it must be a whole number")
    if value < low:
        unit = unit.removesuffix("s") if low == 1 else unit
        raise InvalidFieldError(field, value, f"it must be at least {low} {unit}".rstrip())
    if value > high:
        raise InvalidFieldError(field, value, f"it must be at most {high} {unit}")


def check_gpus(field: str, value: float) -> int | float:
    """A number of GPUs, 0.5 as well as 2; returned as people write it: 2 for 2.0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise InvalidFieldError(field, value, "it must be a number of GPUs", hint="for example 4, or 0.5")
    check_range(field, value, 0, MAX_COUNT, "GPUs")
    return as_number(value)


def check_environment(field: str, environment: dict[str, str]) -> None:
    """Names that a shell can set, values that a process can be given."""
    for name, value in environment.items():
        if not _ENVIRONMENT_NAME.fullmatch(name):
            raise InvalidFieldError(
                field, name, "a variable's name is letters, digits and '_' and starts with no digit"
            )
        if "\0" in value:
            raise InvalidFieldError(f"{field}.{name}", value, "a value cannot hold a NUL character")


def check_no_runtime_env(runtime_env: Mapping[str, Any], *, instead: str) -> None:
    """No runtime environment, on a cluster without Ray; `instead` is what its user can do."""
    if runtime_env:
        why = "only a cluster that runs on Ray sets up runtime environments"
        raise InvalidFieldError("runtime_env", ", ".join(sorted(runtime_env)), why, hint=instead)
