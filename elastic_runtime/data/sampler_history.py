"""A sampler of the script's own that has a history: a generator that it keeps, an order that it shuffles again.

Invariant: the order of epoch e is that of the e-th draw in a row, as in a plain loop, whenever and how often it is
asked for. So the attributes that a draw may change are copied before each draw, and put back before it is repeated; a
worker that resumes or joins in epoch e repeats the draws before it, if the first draw shows that the sampler has a
history.

Rejected: the attributes as a part of the state. They may be anything, a dataset as well, and a worker can draw again
what it lacks. Rejected: seeding each generator for each epoch: the order would not be the plain loop's.
"""

from __future__ import annotations

import copy
import random
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Attributes = list[dict[str, Any]]

_NUMBERS = (int, float, str, bool, type(None))
_RANDOM = ("numpy.random",)


class SamplerHistory:
    """The draws of samplers, in order. `draw(epoch)` draws one epoch, from what the samplers have become."""

    def __init__(self, samplers: Sequence[object], draw: Callable[[int], Any]) -> None:
        self._samplers, self._draw = [each for each in samplers if hasattr(each, "__dict__")], draw
        self._before: dict[int, Attributes] = {0: self._attributes()}
        self._remembers: bool | None = None  # whether a draw changes what the next one gives

    def epoch(self, epoch: int) -> Any:
        """Return the order of this epoch."""
        if self._remembers is None and epoch > 0:
            self._drawn(0)
        if not self._remembers and self._remembers is not None:
            self._put_back(self._before[0])
            return self._draw(epoch)
        begin = max(each for each in self._before if each <= epoch)
        for earlier in range(begin, epoch):
            self._drawn(earlier)
        return self._drawn(epoch)

    def _drawn(self, epoch: int) -> Any:
        self._put_back(self._before[epoch])
        order = self._draw(epoch)
        after = self._attributes()
        self._before = {number: kept for number, kept in self._before.items() if number in {0, epoch}}
        self._before[epoch + 1] = after
        if self._remembers is None:
            self._remembers = [_states(each) for each in after] != [_states(each) for each in self._before[0]]
        return order

    def _attributes(self) -> Attributes:
        """Return copies of the attributes that may be a history: numbers, generators, orders."""
        return [
            {name: copied for name, value in vars(each).items() if (copied := _copied(value)) is not _OTHER}
            for each in self._samplers
        ]

    def _put_back(self, attributes: Attributes) -> None:
        for sampler, values in zip(self._samplers, attributes, strict=True):
            for name, value in values.items():
                _set(sampler, name, value)


_OTHER = object()


def _copied(value: Any) -> Any:
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, random.Random) or type(value).__module__.startswith(_RANDOM) or _is_array(value):
        return copy.deepcopy(value)
    if isinstance(value, list | tuple) and (not value or isinstance(value[0], _NUMBERS)):
        return copy.copy(value)
    return _OTHER


def _set(sampler: object, name: str, value: Any) -> None:
    now = getattr(sampler, name, None)
    if isinstance(now, torch.Generator):
        now.set_state(value)
    else:
        setattr(sampler, name, _copied(value))


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _states(attributes: dict[str, Any]) -> str:
    """Return a text that differs where the attributes do; the number of the epoch itself is no history."""
    return repr({name: _state(value) for name, value in attributes.items() if name not in {"epoch", "_epoch"}})


def _state(value: Any) -> object:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if _is_array(value):
        return value.tobytes()
    generator = getattr(value, "bit_generator", None)
    if generator is not None:
        return generator.state
    return value.get_state() if hasattr(value, "get_state") else value
