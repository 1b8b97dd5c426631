"""The numbers of optimizers and schedulers that must be equal on all workers: hyperparameters, counters, the best loss.

They are read in each step, so they are read as they are, and turned into text only where one has changed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_TOLERANCE = 1e-5
"""Of numbers that two kinds of machines may round differently."""
_ATTRIBUTE = "attribute "
_MOST = 251
"""Elements of a tensor that are compared."""


def numbers(optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[object]) -> list[object]:
    """Return what the host has; numbers in a GPU's memory are left out, for to read them is to wait."""
    groups = (group for each in optimizers for group in each.param_groups)
    found = [value for group in groups for value in group.values() if value is not group["params"]]
    if not all(type(value) in _SIMPLE for value in found):
        found = [value if type(value) in _SIMPLE else _plain(value) for value in found]
    for part in (*optimizers, *schedulers):
        found += [v for name, v in vars(part).items() if type(v) in _PLAIN and name[0] != "_"]
    return found


_PLAIN = {int, float, bool}
_SIMPLE = {*_PLAIN, str, type(None)}


def _plain(value: object) -> object:
    """Return a value as something to be compared: numbers in tuples and in tensors of the host; else None."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.device.type == "cpu" and value.numel() <= _MOST else None
    if isinstance(value, tuple | list) and all(type(item) in _PLAIN for item in value):
        return tuple(value)
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else None


def named_numbers(
    optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[object]
) -> Iterator[tuple[str, object]]:
    """Yield the same with names, for a message."""
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            named = {name: _plain(value) if type(value) not in _PLAIN else value for name, value in group.items()}
            yield from ((f"{name!r} of group {number} of {kind}", v) for name, v in named.items() if name != "params")
    for part in (*optimizers, *schedulers):
        for name, value in vars(part).items():
            if type(value) in _PLAIN and not name.startswith("_"):
                yield f"{_ATTRIBUTE}{name!r} of {type(part).__name__}", value


def first_difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Return the first name whose values differ; "" where none do.

    An attribute that one worker has not set yet, since it has made no step, is compared from its next step on.
    """
    for name in [*other, *(name for name in one if name not in other)]:
        unset = name.startswith(_ATTRIBUTE) and not (name in one and name in other)
        if not unset and not _alike(one.get(name), other.get(name)):
            return name
    return ""


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if type(one) in _PLAIN and type(other) in _PLAIN:
        return math.isclose(one, other, rel_tol=_TOLERANCE) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def scheduled(parts: Sequence[object]) -> list[object]:
    """Return the schedulers among the parts of a state."""
    return [part for part in parts if isinstance(part, LRScheduler)]
