"""What every benchmark does: print its conditions, and end with one JSON line."""

from __future__ import annotations

import json
import os
import platform
import statistics
from pathlib import Path


def print_conditions(title: str, **conditions: object) -> None:
    """What was measured, on what, as people want to read it."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?"
    )
    print(f"# {title}")
    print(f"machine: {len(os.sched_getaffinity(0))} cores ({model}), load {os.getloadavg()[0]:.1f}")
    print(f"python {platform.python_version()}, {platform.system()} {platform.release()}")
    for name, value in conditions.items():
        print(f"{name.replace('_', ' ')}: {value}")


def print_result(**figures: object) -> None:
    """The last line: one JSON object."""
    print(json.dumps(figures))


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Median, and the ends, in ms."""
    return {
        "median": round(statistics.median(seconds) * 1e3, 2),
        "min": round(min(seconds) * 1e3, 2),
        "max": round(max(seconds) * 1e3, 2),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
