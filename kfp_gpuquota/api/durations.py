"""Lengths of time as people write them: "90" (seconds), "30s", "5m", "1h30m", "2d", "1w". Pure."""

from __future__ import annotations

import re
from typing import Final

UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_NUMBER: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_PART: Final = re.compile(rf"({_NUMBER.pattern})\s*([{''.join(UNITS_S)}])")


def seconds(text: str) -> float | None:
    """Return the seconds, or None if the text is no length of time."""
    if _NUMBER.fullmatch(text):
        return float(text)
    if not text or _PART.sub("", text):
        return None
    return sum(float(number) * UNITS_S[unit] for number, unit in _PART.findall(text))


def text_of(duration_s: float) -> str:
    """Return a length of time as `seconds` reads it: "1h30m", "2d", "0.5s"."""
    parts, left = [], duration_s
    for unit in ("d", "h", "m"):
        number, left = divmod(left, UNITS_S[unit])
        if number:
            parts.append(f"{number:.0f}{unit}")
    if left or not parts:
        parts.append(f"{left:g}s")
    return "".join(parts)
