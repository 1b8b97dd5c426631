"""One process's way through an iterable dataset: forwards, and back to where a state was taken.

The dataset, or the iterator that it gives, has `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader
asks for. Every process reads the whole stream and keeps what it is asked for. So which samples a step is made of
depends on nothing but the dataset: not on the number of workers, nor of loader processes.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, IterableDataset

from elastic_runtime.data.sample_checksums import texts_of
from elastic_runtime.errors import StateError, UsageError
from elastic_runtime.plan.order import mix_seed
from elastic_runtime.state.codec import UNPICKLABLE, Skeleton, decode, encode
from elastic_runtime.state.random_streams import RandomStreams
from elastic_runtime.torch_internals import no_worker_info

if TYPE_CHECKING:
    from collections.abc import Iterator


_LOOKS_AT = 8
"""Samples before a state, and after it, that are read twice when a stream is prepared."""


@dataclass(frozen=True)
class Mark:
    """A position after `offset` samples of `epoch`; `state` (encoded) resumes there. Empty: the epoch's beginning."""

    epoch: int = 0
    offset: int = 0
    state: bytes = b""


@dataclass(frozen=True)
class Request:
    """Samples [start, stop) of an epoch. The first of a step reads on to `through` and keeps [start, keep).

    `mark`: where a reader begins that is too far already. `seed`: of what `collate_fn` draws; None: nothing is set.
    """

    epoch: int
    start: int
    stop: int
    mark: Mark
    keep: int = 0
    through: int = 0
    seed: int | None = None


@dataclass(frozen=True)
class Read:
    """The samples that were read: fewer than requested at the stream's end; its `length` if already determined.

    `mark`: after `through`, where that was asked for.
    """

    samples: list[Any]
    length: int | None
    mark: Mark | None
    seed: int | None


class Reader:
    """Reads `dataset`; what it draws at random depends on (`seed`, epoch) and on how much was read."""

    def __init__(self, dataset: IterableDataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._stateful = stateful(dataset)
        self._initial = _dump(dataset.state_dict()) if self._stateful else b""  # type: ignore[attr-defined]
        self._iterator: Iterator[Any] | None = None
        self._epoch, self._at = 0, 0
        self._length: int | None = None
        self._next: list[Any] = []  # the one sample that was looked at ahead
        self._kept: tuple[int, list[Any]] = (0, [])
        self._outer, self._own = RandomStreams(), RandomStreams()
        self._drawn: dict[str, Any] = {}

    def read(self, request: Request) -> Read:
        """StateError where the dataset's state cannot be pickled; else what the dataset raises."""
        with self._inside():
            if self._iterator is None or self._epoch != request.epoch:
                self._go_back(request.mark)
            kept = self._from_kept(request)
            if kept is not None:
                return Read(kept, self._length, self._mark() if request.through else None, request.seed)
            if self._at > request.start:
                self._go_back(request.mark)
            self._take(request.start - self._at, keep=False)
            return self._read_on(request)

    def rewind(self) -> None:
        """Leave the dataset as it was."""
        if self._stateful:
            self._dataset.load_state_dict(_restored(self._initial))  # type: ignore[attr-defined]

    def _read_on(self, request: Request) -> Read:
        samples = self._take(max(request.stop, request.keep) - request.start)
        mark = None
        if request.through:
            self._kept = (request.start, samples)
            self._take(request.through - self._at, keep=False)
            mark = self._mark()
            self._look_ahead()
        return Read(samples[: request.stop - request.start], self._length, mark, request.seed)

    def _from_kept(self, request: Request) -> list[Any] | None:
        """What was kept of a step; of its first request, planned again, where the stream has ended in the step: so that
        a stream read by one worker alone never goes back.
        """
        start, samples = self._kept
        if request.through and request.through != self._length:
            return None
        if not start <= request.start < request.stop <= max(request.stop, request.keep) <= start + len(samples):
            return None
        return samples[request.start - start : request.stop - start]

    def _go_back(self, mark: Mark) -> None:
        self._epoch, self._at, self._length = mark.epoch, mark.offset, None
        self._next, self._kept = [], (0, [])
        state, drawn = _restored(mark.state) if mark.state else (None, None)
        if drawn is None:
            self._own.reseed(mix_seed(self._seed, mark.epoch, 2))
        else:
            self._own.load(drawn)
        if self._stateful:
            self._dataset.load_state_dict(state if mark.state else _restored(self._initial))  # type: ignore[attr-defined]
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(mark.epoch)
        self._iterator = iter(self._dataset)
        if mark.state and not self._stateful:
            self._iterator.load_state_dict(state)  # type: ignore[attr-defined]

    def _take(self, count: int, *, keep: bool = True) -> list[Any]:
        """The next samples; fewer at the end."""
        if count <= 0:
            return []
        assert self._iterator is not None
        ahead, self._next = self._next, []
        if keep:
            samples = [*ahead, *islice(self._iterator, count - len(ahead))]
            taken = len(samples)
        else:
            samples, taken = [], len(ahead) + sum(1 for _ in islice(self._iterator, count - len(ahead)))
        self._at += taken
        if taken < count:
            self._length = self._at
        return samples

    def _look_ahead(self) -> None:
        """Return whether the stream has more samples."""
        if self._length is None and not self._next:
            self._next = self._take(1)
            self._at -= len(self._next)

    def _mark(self) -> Mark:
        holder: Any = self._dataset if self._stateful else self._iterator
        drawn = {name: value for name, value in self._own.capture().items() if name != "cuda"}
        return Mark(self._epoch, self._at, _dump((holder.state_dict(), drawn)))

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """The dataset draws from streams of its own, and sees no loader process: it is asked for all samples."""
        self._outer.save()
        if self._drawn:
            self._own.load(self._drawn)
        try:
            with no_worker_info():
                yield
        finally:
            self._drawn = self._own.capture()
            self._outer.restore()


class StreamedDataset(Dataset[Any]):
    """The user's stream as a map-style dataset of requests, so that loader processes live on and read on."""

    def __init__(self, dataset: IterableDataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._reader: Reader | None = None

    def __getitems__(self, request: Request) -> Read:
        if self._reader is None:
            self._reader = Reader(self._dataset, self._seed)
        return self._reader.read(request)


def stateful(each: object) -> bool:
    """Whether the dataset has a state: it can report its position and continue from there."""
    return callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))


def check_stateful(dataset: IterableDataset[Any]) -> None:
    """UsageError where a worker that joins could not go on where the others are."""
    if not stateful(dataset) and not stateful(iter(dataset)):
        raise UsageError(
            f"the loader's dataset, {type(dataset).__name__}, is an IterableDataset without a state, so that a worker "
            "which joins cannot go on where the others are; give it, or the iterator that its __iter__ returns, "
            "state_dict() and load_state_dict(state), or make it a map-style dataset (__len__ and __getitem__)"
        )


def check_resumes(dataset: IterableDataset[Any], seed: int) -> None:
    """UsageError where the first samples after a state are others when the stream goes back to it.

    A buffer that shuffles, or a generator, that the state leaves out: a worker that goes back, joins or resumes would
    read other samples than the others.
    """
    reader = Reader(dataset, seed)
    start = Mark()
    first = reader.read(Request(0, 0, _LOOKS_AT, start, _LOOKS_AT, _LOOKS_AT))
    if first.mark is None or first.length is not None:
        reader.rewind()
        return
    request = Request(0, _LOOKS_AT, 2 * _LOOKS_AT, first.mark)
    before = list(texts_of(reader.read(request).samples))
    again = list(texts_of(reader.read(request).samples))
    reader.rewind()
    if before != again:
        raise UsageError(
            f"the stream of {type(dataset).__name__} gives other samples after its load_state_dict(state_dict()) than "
            "it gave before: its state leaves something out, like the content of a buffer that shuffles, or a "
            "generator of its own; put them into state_dict, or shuffle by index in a map-style dataset"
        )


def _restored(state: bytes) -> Any:
    """Return the argument of `_dump`. A skeleton was verified on receipt; other bytes must not hold pickled objects."""
    return decode(state, trusted=isinstance(state, Skeleton))


def _dump(state: object) -> Skeleton:
    try:
        return encode(state)
    except UNPICKLABLE as error:
        raise StateError(
            f"the dataset's state cannot be saved: {error}; keep open files, locks and lambdas out of state_dict()"
        ) from error
