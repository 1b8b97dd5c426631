"""Variables of the loop that a worker which joins has with other values: the best loss, a counter, kept weights.

Those that exist when the training starts and have changed since, or exist when the loader's loop begins and have
changed in it (a total that begins with 0 in each epoch), in the functions that were running then. Targets of `for`
loops are left out: they are set in each iteration. Whether a variable matters cannot be seen. One that is only printed
does not, a copy of the model's state does.
"""

from __future__ import annotations

import dis
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.rehearsal.records import fingerprints_of, flattened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import CodeType, FrameType

    from elastic_runtime.rehearsal.records import Fingerprints

_OURS = ("elastic_runtime.", "torch.", "lightning.", "accelerate.", "transformers.")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_KINDS = (type(None), int, float, torch.Tensor, dict, list, tuple, deque)
_MOST, _LAST = 512, 8
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")


class LoopVariables:
    """Of this process. `start` is called within `job.epochs` or `job.steps`."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        self._first: dict[CodeType, dict[str, Fingerprints]] = {}
        self._known: dict[CodeType, set[str]] = {}  # those that are not set in the loop

    def start(self) -> None:
        """Look at the variables of the functions that are running, unless that was done."""
        if not self._first:
            self._first = {frame.f_code: dict(_values(frame)) for frame in _frames()}

    def enter(self) -> None:
        """Look at those that were set since, as the loader's loop begins."""
        for frame in _frames():
            first, known = self._first.setdefault(frame.f_code, {}), self._known.get(frame.f_code)
            wanted = set(frame.f_locals) if known is None else known
            self._known.setdefault(frame.f_code, wanted - set(first))
            first |= dict(_values(frame, self._known[frame.f_code]))

    def changed(self) -> tuple[Fingerprints, list[str]]:
        """Return those that have changed since, and the names of those that hold a state of a model."""
        changed: Fingerprints = {}
        states: list[str] = []
        keys = [set(model.state_dict()) for model in self._models]
        for frame in _frames():
            first = self._first.get(frame.f_code, {})
            for name, values in _values(frame, set(first)):
                if values != first[name]:
                    changed |= values or {name: [0.0, 0.0]}
                    if any(_holds(frame.f_locals[name], names) for names in keys if names):
                        states.append(name)
        return changed, states


def _frames() -> Iterator[FrameType]:
    """The script's own functions on the stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if not f"{frame.f_globals.get('__name__', '')}.".startswith(_OURS):
            yield frame
        frame = frame.f_back


def _values(frame: FrameType, names: set[str] | None = None) -> Iterator[tuple[str, Fingerprints]]:
    left_out = _targets(frame.f_code)
    for name, value in list(frame.f_locals.items()):
        wanted = (names is None or name in names) and name not in left_out and not name.startswith("__")
        if wanted and isinstance(value, _KINDS):
            yield name, fingerprints_of(flattened(_short(value), name))


def _short(value: Any) -> Any:
    """Return lists as their length and their last elements: one that collects a number in each step grows long.

    Leave out shards, which no worker can look at alone, and groups of an optimizer.
    """
    if isinstance(value, torch.Tensor) and (type(value) not in _PLAIN or value.is_meta):
        return None
    if isinstance(value, dict) and "params" in value:
        return None
    if isinstance(value, list | tuple | deque):
        return {"length": len(value), "last": [_short(each) for each in list(value)[-_LAST:]]}
    if isinstance(value, dict):
        return {str(key): _short(each) for key, each in list(value.items())[:_MOST]}
    return value


def _holds(value: Any, names: set[str]) -> bool:
    """Whether it is a state_dict with these names, or has one among its last elements."""
    if isinstance(value, dict):
        return names <= set(value) or any(_holds(each, names) for each in list(value.values())[:_LAST])
    return isinstance(value, list | tuple | deque) and any(_holds(each, names) for each in list(value)[-_LAST:])


def _targets(code: CodeType) -> set[str]:
    """Names that a `for` sets."""
    found: set[str] = set()
    within = False
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        within = name == "FOR_ITER" or (within and name.startswith(("STORE_", "UNPACK_", "SWAP", "EXTENDED_ARG")))
        if within and name in _STORES:
            found.add(instruction.argval)
    return found
