"""The source of an epoch's samples: the user's sampler or batch sampler, as an order and its division into steps."""

from __future__ import annotations

import copy
import random
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, Subset

from elastic_runtime.errors import UsageError
from elastic_runtime.plan.order import Drawn, epoch_order, mix_seed, order_checksum, steps_in_epoch
from elastic_runtime.state.random_streams import RandomStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Attributes = list[dict[str, Any]]

LARGE = 10_000_000
"""Samples of a RandomSampler from which on they are drawn as they are needed."""
LARGEST = 1 << 31


class Source:
    """One loader's epochs. A batch sampler of the user's own makes the steps: each of its batches is one."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._seed = seed
        self._own_batches = loader.batch_sampler if has_own_batches(loader) else None
        self._sampler = loader.sampler
        self._batches, self._batch_size = loader.batch_sampler, loader.batch_size
        self._shuffle = _is_a_permutation(loader.sampler)
        self._drop_last = bool(loader.drop_last)
        self._sizes: list[int] = []
        inner = getattr(self._own_batches, "sampler", None)
        self._drawn_from = [each for each in (self._own_batches or self._sampler, inner) if each is not None]
        self._history = SamplerHistory(self._drawn_from, self._draw)
        self.length = len(self._own_batches or loader.sampler)  # type: ignore[arg-type]

    def steps(self, batch: int) -> int:
        """Global steps of one epoch."""
        if self._own_batches is not None:
            return self.length
        return steps_in_epoch(self.length, batch, drop_last=self._drop_last)

    def epoch(self, epoch: int) -> Sequence[int]:
        """The dataset's indices in the order of this epoch; what a sampler draws depends on (seed, epoch) alone."""
        if self._own_batches is None:
            self._check_batch()
            self._check_length(len(self._sampler), epoch)  # type: ignore[arg-type]
        if self._own_batches is None and (self._shuffle or type(self._sampler) is SequentialSampler):
            return epoch_order(self._seed, epoch, self.length, shuffle=self._shuffle)
        if type(self._sampler) is RandomSampler and self.length > LARGE and self._own_batches is None:
            data = len(self._sampler.data_source)
            return Drawn(mix_seed(self._seed, epoch), data, self.length, replacement=self._sampler.replacement)
        if self.length > LARGEST:
            raise UsageError(
                f"{type(self._sampler).__name__} gives {self.length} samples an epoch, which are read at once; give it "
                "fewer, and train for more epochs or by job.steps(n)"
            )
        order: list[int]
        order, self._sizes = self._history.epoch(epoch)
        if self._own_batches is None:
            self._check_length(len(order), epoch)
        return order

    def _check_batch(self) -> None:
        """Raise UsageError if the script has changed the size of a batch, which would have no effect."""
        size = getattr(self._batches, "batch_size", self._batch_size)
        if type(self._batches) is BatchSampler and size != self._batch_size:
            raise UsageError(
                f"the script changed the loader's batch size from {self._batch_size} to {size} after prepare; a step "
                "has global_batch_size samples, so give prepare a batch sampler of your own, each batch of which is "
                "one step"
            )

    def _check_length(self, length: int, epoch: int) -> None:
        """Raise UsageError if an epoch has another number of samples than the loader had in `prepare`."""
        if length != self.length:
            raise UsageError(
                f"the loader had {self.length} samples when prepare got it, and {length} in epoch {epoch}; the samples "
                "of all epochs are planned then, so keep the length, and choose by the epoch which sample an index "
                "stands for, or give prepare a batch sampler of your own, each batch of which is one step"
            )

    def _draw(self, epoch: int) -> tuple[list[int], list[int]]:
        """Draw one epoch from the sampler as it is now: the order, and the sizes of its own batches."""
        streams = RandomStreams()
        streams.save()
        streams.reseed(mix_seed(self._seed, epoch))
        for drawn_from in self._drawn_from:
            _set_epoch(drawn_from, epoch, mix_seed(self._seed, epoch, 1))
        try:
            if self._own_batches is None:
                return list(self._sampler), []
            batches = [list(batch) for batch in self._own_batches]
        finally:
            streams.restore()
        return [index for batch in batches for index in batch], [len(batch) for batch in batches]

    def cuts(self, index: int, start: int, batch: int) -> Iterator[tuple[int, int]]:
        """(start, size) of each step that is left after `index` steps of `start` samples in this epoch."""
        if self._own_batches is not None:
            for size in self._sizes[index:]:
                yield start, size
                start += size
            return
        while start < self.length and not (self._drop_last and self.length - start < batch):
            size = min(batch, self.length - start)
            yield start, size
            start += size


def _is_a_permutation(sampler: object) -> bool:
    """Whether it is torch's own shuffling of a whole dataset, and nothing else."""
    if type(sampler) is not RandomSampler:
        return False
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _set_epoch(drawn_from: object, epoch: int, seed: int) -> None:
    """Seed a sampler's own generator and counter, so that a joiner draws the same."""
    generator = getattr(drawn_from, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    if hasattr(drawn_from, "set_epoch"):
        drawn_from.set_epoch(epoch)


def chosen(dataset: object) -> str:
    """Which part of a dataset it is, as words; "" for a whole one: `random_split` may differ from worker to worker."""
    if not isinstance(dataset, Subset):
        return ""
    return f" of a Subset (stamp {order_checksum(dataset.indices)}{chosen(dataset.dataset)})"


def has_own_batches(loader: DataLoader[Any]) -> bool:
    """Whether the user gave a batch sampler."""
    return loader.batch_size is None and loader.batch_sampler is not None


class SeededIndices(list[int]):
    """A batch's indices, and the seed of the random numbers that are drawn while it is fetched."""

    def __init__(self, indices: Sequence[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> tuple[type[SeededIndices], tuple[list[int], int]]:
        return SeededIndices, (list(self), self.seed)


class SeededDataset(Dataset[Any]):
    """The user's dataset; what it draws at random depends on the batch alone, whichever process fetches it."""

    _own = ("_seeded_dataset", "_seeded_streams")

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._seeded_dataset = dataset
        self._seeded_streams = RandomStreams()

    def __getitems__(self, indices: Sequence[int]) -> Any:
        if isinstance(indices, SeededIndices):
            self._seeded_streams.reseed(indices.seed)
        dataset = self._seeded_dataset
        together = getattr(dataset, "__getitems__", None)
        return together(list(indices)) if together else [dataset[i] for i in indices]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self._own:
            raise AttributeError(name)
        return getattr(self._seeded_dataset, name)

    def __setattr__(self, name: str, value: object) -> None:
        """A `worker_init_fn` may keep things in the dataset."""
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._seeded_dataset, name, value)


_NUMBERS = (int, float, str, bool, type(None))
_RANDOM = ("numpy.random",)


class SamplerHistory:
    """The draws of samplers with a history, in order: a generator that they keep, an order that they shuffle again.

    Invariant: the order of epoch e is that of the e-th draw in a row, as in a plain loop, whenever and how often it is
    asked for. So a worker that resumes or joins in epoch e repeats the draws before it, and the newest two are kept.
    The attributes that a draw may change are copied before each draw, and put back where an older one is repeated.
    Others, as those of a sampler in the sampler, cannot be: only torch's samplers are known to have none, and what they
    draw before e is left out if the first draw shows no history.

    Rejected: the attributes as a part of the state. They may be anything, a dataset as well, and a worker can draw
    again what it lacks. Rejected: seeding each generator for each epoch: the order would not be the plain loop's.

    What the script changes in a sampler between two draws is refused: it would be put back, or a joiner would lack it.

    `draw(epoch)` draws one epoch, from what the samplers have become.
    """

    def __init__(self, samplers: Sequence[object], draw: Callable[[int], Any]) -> None:
        self._samplers, self._draw = [each for each in samplers if hasattr(each, "__dict__")], draw
        self._before: dict[int, Attributes] = {0: self._attributes()}
        self._left = self._before[0]  # what the last draw has left
        self._remembers: bool | None = None  # whether a draw changes what the next one gives
        self._kept: dict[int, Any] = {}  # the newest draws, by epoch
        self._all_of_torch = all(type(each).__module__.startswith("torch.utils.data") for each in samplers)

    def epoch(self, epoch: int) -> Any:
        """Return the order of this epoch. UsageError if the script has changed a sampler since the last one."""
        self._check_unchanged()
        order = self._order(epoch)
        self._left = self._attributes()
        return order

    def _check_unchanged(self) -> None:
        for sampler, left, now in zip(self._samplers, self._left, self._attributes(), strict=True):
            values = {name: getattr(sampler, name) for name in now}
            for name in (name for name, value in values.items() if _is_set_by_hand(value, sampler)):
                if name in left and not _equal(left[name], now[name]):
                    raise UsageError(
                        f"the script changed '{name}' of {type(sampler).__name__} after prepare, which a worker that "
                        "joins or resumes would not have; give a sampler of your own, whose __iter__ reads it from "
                        "another object, which job.track carries, and change it there between two epochs"
                    )

    def _order(self, epoch: int) -> Any:
        if epoch in self._kept:
            return self._kept[epoch]
        if self._remembers is None and epoch > 0:
            self._drawn(0)
        if self._all_of_torch and not self._remembers and self._remembers is not None:
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
        if not self._all_of_torch:
            self._kept = {number: kept for number, kept in self._kept.items() if number == epoch - 1} | {epoch: order}
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
    if isinstance(value, random.Random) or type(value).__module__.startswith(_RANDOM) or is_array(value):
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


def _is_set_by_hand(value: object, sampler: object) -> bool:
    """Whether a script sets it: no generator, and no number or list of a sampler whose `set_epoch` it may call."""
    if isinstance(value, torch.Tensor) or is_array(value):
        return True
    return isinstance(value, (*_NUMBERS, list, tuple)) and not hasattr(sampler, "set_epoch")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if is_array(one) and is_array(other):
        return bool(one.shape == other.shape and (one == other).all())
    return type(one) is type(other) and bool(one == other)


def is_array(value: object) -> bool:
    """Return whether this is an array of numpy, which is not imported for it."""
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
    if is_array(value):
        return value.tobytes()
    generator = getattr(value, "bit_generator", None)
    if generator is not None:
        return generator.state
    return value.get_state() if hasattr(value, "get_state") else value
