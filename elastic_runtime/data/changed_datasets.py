"""Refuses a dataset that the script changes between two epochs, after the loop over the loader.

A worker that joins or resumes in the next epoch runs the code of that epoch's beginning, and not what came before it:
it would train other samples, without an error. Pseudo-labels and a difficulty that is counted up are set like that.

Invariant: an attribute is refused if it differs between the end of the loop and the end of the epoch, and the code
before the next loop leaves it so. What a script switches for an evaluation and switches back passes. Rejected: to
look at changes within the loop, where a dataset counts what it has read, or fills a cache.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from elastic_runtime.data.sources import is_array
from elastic_runtime.errors import LoopError
from elastic_runtime.torch_internals.modules import writes_to

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Contents = dict[str, object]

_PLAIN = (int, float, str, bool, type(None))
_ABSENT = object()
_FEW, _SAMPLED, _ELEMENTS, _DEEPEST = 16, 1000, 1 << 17, 4


class ChangedDatasets:
    """Of all loaders of a loop. `ended`, `left` and `entered` come in this order, in each epoch."""

    def __init__(self, datasets: Sequence[object]) -> None:
        self._datasets = datasets
        self._ended: list[Contents] | None = None
        self._changed: list[Contents] = []

    def ended(self) -> None:
        """The loop over the loader has ended."""
        self._ended = [dict(_contents(dataset)) for dataset in self._datasets]

    def left(self, tracked: Sequence[object]) -> None:
        """The script's epoch has ended. `tracked`: datasets among these are carried to joiners and in checkpoints."""
        before, self._ended = self._ended, None
        if before is None:
            return
        after = [dict(_contents(dataset)) for dataset in self._datasets]
        carried = {id(each) for each in tracked}
        self._changed = [
            {name: new[name] for name in new if id(dataset) not in carried and old.get(name, _ABSENT) != new[name]}
            for dataset, old, new in zip(self._datasets, before, after, strict=True)
        ]

    def entered(self, epoch: int) -> None:
        """The loop over the loader begins again. LoopError for a change that the code before it has not made again."""
        changed, self._changed = self._changed, []
        for dataset, values in zip(self._datasets, changed, strict=False):
            now = dict(_contents(dataset)) if values else {}
            for name, value in sorted(values.items(), key=lambda item: len(item[0])):
                if now.get(name) == value:
                    raise LoopError(
                        f"the script changed '{name}' of its {type(dataset).__name__} between the loops of epochs "
                        f"{epoch - 1} and {epoch}, which a worker that joins or resumes in epoch {epoch} would not "
                        "have; set it before the loop over the loader, as a function of the epoch, or give the dataset "
                        "state_dict and load_state_dict and pass it to job.track; if no sample depends on it (a "
                        "counter, a cache), let its name begin with '_'"
                    )


class _Tensor:
    """A tensor, and how often it was written to."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._writes = tensor, 0 if tensor.is_inference() else writes_to(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Tensor):
            return False
        if self._tensor is other._tensor:
            return self._writes == other._writes
        one, two = self._tensor, other._tensor
        return one.device == two.device and one.dtype == two.dtype and torch.equal(one, two)

    __hash__ = None  # type: ignore[assignment]


def _contents(dataset: object, depth: int = 0) -> Iterator[tuple[str, object]]:
    """Names and contents of the dataset's attributes that a script may set, also of the datasets in it."""
    for name, value in getattr(dataset, "__dict__", {}).items():
        if not name.startswith("_") and depth < _DEEPEST:
            yield from _content(name, value, depth + 1)


def _content(name: str, value: Any, depth: int) -> Iterator[tuple[str, object]]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield name, _Tensor(value)
    elif isinstance(value, _PLAIN):
        yield name, value
    elif is_array(value):
        some = value[:: value.size // _ELEMENTS + 1] if value.ndim else value
        yield name, (value.shape, zlib.crc32(some.tobytes()))
    elif isinstance(value, Dataset):
        for inner, found in _contents(value, depth):
            yield f"{name}.{inner}", found
    elif isinstance(value, list | tuple):
        yield from _of_sequence(name, value, depth)


def _of_sequence(name: str, value: Sequence[Any], depth: int) -> Iterator[tuple[str, object]]:
    if len(value) <= _FEW and any(isinstance(each, torch.Tensor | Dataset) for each in value):
        for number, each in enumerate(value):
            yield from _content(f"{name}[{number}]", each, depth + 1)
        return
    sampled = value[:: len(value) // _SAMPLED + 1]
    if not any(each is None for each in sampled):  # else a cache that is filled
        yield name, (len(value), [each if isinstance(each, _PLAIN) else id(each) for each in sampled])
