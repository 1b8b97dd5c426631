"""What every benchmark does: print its conditions, and end with one JSON line."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kfp_gpuquota.cluster.certificates import Material


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


def written_certificates(folder: Path) -> Material:
    """Write an authority's certificate, and that of a server on this machine with its key: ca, cert, key."""
    from kfp_gpuquota.cluster.certificates import maintained  # noqa: PLC0415 (most benchmarks need no cryptography)

    material = maintained(None, ["127.0.0.1"], time.time())
    pair = material.serving
    for name, content in (("ca", material.trusted), ("cert", pair.certificate), ("key", pair.key)):
        (folder / name).write_bytes(content)
    return material
