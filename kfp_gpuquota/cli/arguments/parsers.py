"""Parsers of user input: numbers of GPUs, times, labels and tolerations."""

from __future__ import annotations

import re

from kfp_gpuquota.api import TaintEffect, Toleration, TolerationOperator, durations
from kfp_gpuquota.api.quantity import whole_number
from kfp_gpuquota.errors import InvalidFieldError


def seconds(field: str, text: str) -> float:
    """Return the seconds of a time as "90", "90s", "1m30s", "2h". Raises InvalidFieldError."""
    found = durations.seconds(text)
    if found is None:
        raise InvalidFieldError(field, text, "a time is written as 30, 30s, 5m or 1h30m")
    return found


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
