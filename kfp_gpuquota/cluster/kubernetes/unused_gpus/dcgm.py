"""Reads what NVIDIA's dcgm-exporter serves in Prometheus' text format: whose a GPU is, and what it does. Pure.

    DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",Hostname="n0",container="main",namespace="team-a",pod="nb-0"} 0

A value that is no number, or out of its range (DCGM has such values for "unknown"), makes that GPU one that is not
measured. So does a lack of the energy counter: a served value has no time, and that the counter of a GPU changes, idle
or not, is what shows that its values are new.
"""

from __future__ import annotations

import re
from math import inf
from typing import Final, NamedTuple

MAX_BYTES: Final = 4 << 20
MAX_SAMPLES: Final = 8192
"""Of the metrics that are read: 16 GPUs have less than 200, time slices for each of their pods again."""

LONGEST_INDEX: Final = 4
MOST_MIB: Final = 1 << 30
"""A larger number of a GPU's memory is DCGM's "unknown"."""

BUSY: Final = {"DCGM_FI_DEV_GPU_UTIL": 100.0, "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 1.0}
"""The metrics of a GPU's work, one of which is needed, with their largest values."""
USES: Final = {
    **BUSY,
    "DCGM_FI_DEV_MEM_COPY_UTIL": 100.0,
    "DCGM_FI_DEV_ENC_UTIL": 100.0,
    "DCGM_FI_DEV_DEC_UTIL": 100.0,
}
ENERGY: Final = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
MEMORY: Final = "DCGM_FI_DEV_FB_USED"

_LINE: Final = re.compile(rf"^({'|'.join([*USES, ENERGY, MEMORY])})\{{([^\n]*)\}} ([^ \n]+)(?: [0-9]+)?$", re.MULTILINE)
_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\["\\n])*)"(?:,|$)')


class Reading(NamedTuple):
    """One GPU: whether it is used (None: unknown), and its energy counter in mJ (None: it has none).

    `number` is its own on the node, `percent` how much of the time it computed, `used_mib` its memory in use.
    """

    used: bool | None
    energy: float | None
    number: int = 0
    percent: float | None = None
    used_mib: int | None = None


Readings = dict[tuple[str, str], dict[str, Reading]]
"""GPUs by pod (namespace and name; "" and "" of a GPU that no pod has), and by their UUID, with the MIG instance's."""


def readings_in(body: bytes) -> Readings:
    """Return the GPUs of pods in an exporter's answer. Raises ValueError for one that is none, or too large."""
    if len(body) > MAX_BYTES:
        raise ValueError(f"its answer is larger than {MAX_BYTES >> 20} MiB")
    found: dict[tuple[tuple[str, str], str], dict[str, float]] = {}
    numbers: dict[str, int] = {}
    for count, line in enumerate(_LINE.finditer(body.decode())):
        if count >= MAX_SAMPLES:
            raise ValueError(f"its answer has more than {MAX_SAMPLES} values of GPUs")
        name, text, value = line.groups()
        labels = _labels(text)
        pod, gpu = (labels.get("namespace", ""), labels.get("pod", "")), labels.get("UUID", "")
        if gpu and all(pod) == any(pod):
            gpu, index = f"{gpu}/{labels.get('GPU_I_ID', '')}", labels.get("gpu", "")
            numbers[gpu] = int(index) if index.isdecimal() and len(index) <= LONGEST_INDEX else 0
            values = found.setdefault((pod, gpu), {})
            values[name] = max(_number(value, USES.get(name, inf)), values.get(name, 0.0))
    readings: Readings = {}
    for (pod, gpu), values in found.items():
        readings.setdefault(pod, {})[gpu] = _reading(values, numbers[gpu])
    return readings


def _reading(values: dict[str, float], index: int) -> Reading:
    uses = [value for name, value in values.items() if name in USES]
    energy, memory = values.get(ENERGY, inf), values.get(MEMORY, inf)
    known = any(name in values for name in BUSY) and inf not in uses
    percents = [100 * values[name] / whole for name, whole in BUSY.items() if values.get(name, inf) < inf]
    return Reading(
        used=True if any(0 < value < inf for value in uses) else False if known else None,
        energy=None if energy == inf else energy,
        number=index,
        percent=max(percents, default=None),
        used_mib=int(memory) if memory <= MOST_MIB else None,
    )


def _labels(text: str) -> dict[str, str]:
    """Return the labels of a sample; {} unless the whole text is labels, each once."""
    labels, at = dict[str, str](), 0
    while at < len(text):
        found = _LABEL.match(text, at)
        if found is None or found[1] in labels:
            return {}
        labels[found[1]], at = found[2], found.end()
    return labels


def _number(text: str, largest: float) -> float:
    """Return a sample's value; infinity for one that is unknown."""
    try:
        value = float(text)
    except ValueError:
        return inf
    return value if 0 <= value <= largest else inf
