"""The records of one worker of a rehearsal: one JSON object per line, in a separate file.

Tensors are recorded as fingerprints: [norm, projection on a fixed vector]. Two tensors with equal fingerprints are
equal for this purpose, and fingerprints of nearly equal tensors are nearly equal, which checksums are not.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_MOST_ELEMENTS = 1 << 20

Fingerprints = dict[str, list[float]]


class Records:
    """The rows of `worker` in `directory`."""

    def __init__(self, directory: Path, worker: str) -> None:
        self._path, self._worker = directory / f"{worker}.jsonl", worker

    def write(self, what: str, **fields: Any) -> None:
        """Append one row to the records."""
        with self._path.open("a") as file:
            file.write(json.dumps({"what": what, "worker": self._worker, **fields}) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All rows; none where nothing was written."""
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines()]


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in double precision, of which differences can be computed."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def fingerprint_of(tensor: torch.Tensor) -> list[float]:
    """[norm, projection] of a tensor of any type; of a large one, of about 2**20 elements."""
    flat = (tensor.to_dense() if tensor.is_sparse else tensor).detach().resolve_conj()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
    flat = flat[:: max(1, flat.numel() // _MOST_ELEMENTS)].to("cpu", torch.float64)
    weights = torch.cos(torch.arange(flat.numel(), dtype=torch.float64) * math.e)
    return [float(flat.norm()), float(flat @ weights)]


def fingerprints_of(named: Iterable[tuple[str, torch.Tensor | None]]) -> Fingerprints:
    """The fingerprint of each tensor by name; of None, zeros."""
    return {name: [0.0, 0.0] if tensor is None else fingerprint_of(tensor) for name, tensor in named}


def flattened(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of each tensor and number in a nested state; anything else is left out."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, bool | int | float):
        yield name, torch.tensor(float(value), dtype=torch.float64)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from flattened(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from flattened(part, f"{name}[{index}]")
