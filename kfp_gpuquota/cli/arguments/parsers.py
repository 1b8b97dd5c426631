"""Parsers of user input: numbers of GPUs, times, labels and tolerations."""

from __future__ import annotations

import re

from kfp_gpuquota.api import TaintEffect, Toleration, TolerationOperator, durations
from kfp_gpuquota.errors import InvalidFieldError


def seconds(field: str, text: str) -> float:
    """Return the seconds of a time as "90", "90s", "1m30s", "2h". Raises InvalidFieldError."""
    found = durations.seconds(text)
    if found is None:
        raise InvalidFieldError(field, text, "a time is written as 30, 30s, 5m or 1h30m")
    return found


def gpus_or_fraction(text: str | None, *, memory: str | None) -> tuple[int, float | None]:
    """(GPUs, fraction of one) for `-g`. Raises InvalidFieldError, also where `memory` is asked for as well."""
    if text is None:
        return 1, None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if 0 < value < 1:
        return 1, value
    if value != value // 1:
        raise InvalidFieldError("gpus", text, "it must be a whole number of GPUs, or a part of one, such as 0.25")
    if memory is not None:
        raise InvalidFieldError(
            "gpus", text, "it counts whole GPUs, and the job asks for a share of them (gpu_memory)",
            hint="leave it out; for the same share of several GPUs of a node give --gpu-devices",
        )  # fmt: skip
    return whole_number("gpus", text.removesuffix(".0")), None


def count_or_gpus(text: str | None) -> tuple[int | None, tuple[str, ...]]:
    """Return (GPUs of each node, ()) of "2", (None, the named GPUs) of "0,1,3" or "GPU-6a0f...". InvalidFieldError."""
    if text is None:
        return None, ()
    if "," not in text and not text.startswith("GPU-"):
        return whole_number("gpus_per_node", text), ()
    names = tuple(name.strip() for name in text.removesuffix(",").split(","))
    if not all(names):
        raise InvalidFieldError("gpus_per_node", text, "GPUs are named by index or UUID, as 0,1,3")
    return None, names


def whole_number(field: str, text: str, unit: str = "GPUs") -> int:
    """The number. Raises InvalidFieldError."""
    try:
        return int(text)
    except ValueError:
        raise InvalidFieldError(field, text, f"it must be a whole number of {unit}") from None


def gpu_quota(field: str, text: str) -> float:
    """A quota's number of GPUs, or part of one. Raises InvalidFieldError."""
    try:
        return float(text)
    except ValueError:
        raise InvalidFieldError(field, text, "it must be a number of GPUs, such as 4 or 0.5") from None


def pairs(field: str, given: list[str], rule: str) -> dict[str, str]:
    """KEY=VALUE as a dictionary. Raises InvalidFieldError with the rule."""
    found = [text.partition("=") for text in given]
    for text, (_, equals, _value) in zip(given, found, strict=True):
        if not equals:
            raise InvalidFieldError(field, text, rule)
    return {key: value for key, _, value in found}


def toleration_of(text: str) -> Toleration:
    """KEY, KEY=VALUE, KEY:EFFECT or KEY=VALUE:EFFECT. Raises InvalidFieldError."""
    rest, _, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    if effect and effect not in set(TaintEffect):
        allowed = ", ".join(TaintEffect)
        raise InvalidFieldError("toleration", text, f"what follows ':' must be one of {allowed}")
    operator = TolerationOperator.EQUAL if equals else TolerationOperator.EXISTS
    return Toleration(key, operator, value, TaintEffect(effect) if effect else None)


def seconds_back(text: str) -> float:
    """Return the seconds of "12h", "30d", "4w": how far a report looks back."""
    match = re.fullmatch(r"([1-9][0-9]{0,4})([hdw])", text)
    if match is None:
        raise InvalidFieldError("--since", text, "it must be a number of hours, days or weeks", hint="for example 30d")
    return int(match[1]) * durations.UNITS_S[match[2]]
