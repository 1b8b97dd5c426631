"""The prepared loader of an iterable dataset with a state.

Step k of an epoch is the next samples of the stream, at every size; each worker reads the stream and keeps its share.
Whether a step is full is known when it has been read: the first request of a step reads through to its end and looks
one sample further. A step that turns out short is planned again before any of it was computed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic_runtime.data.dataloader import like
from elastic_runtime.data.loader import ElasticLoader, Step, last_step
from elastic_runtime.data.stream_reader import Mark, Read, Request, StreamedDataset, check_resumes, check_stateful
from elastic_runtime.errors import UsageError
from elastic_runtime.plan.order import mix_seed
from elastic_runtime.state.random_streams import RandomStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.data import DataLoader

    from elastic_runtime.data.loader import Loop, Plan
    from elastic_runtime.plan.batch_sizes import GlobalBatch
    from elastic_runtime.plan.batches import MicroBatch
    from elastic_runtime.plan.position import Position

Fetched = tuple[Any, int | None, Mark | None]


class StreamedLoader(ElasticLoader):
    """The samples of a stream, step by step. The state is the stream's position at the current step's beginning."""

    def __init__(
        self, loader: DataLoader[Any], loop: Loop, seed: int, batch: GlobalBatch, plan: Plan, *, seeded: bool = False
    ) -> None:
        super().__init__(loader, loop, seed, batch, plan, seeded=seeded)
        check_stateful(loader.dataset)  # type: ignore[arg-type]
        check_resumes(loader.dataset, seed)  # type: ignore[arg-type]
        self._drop_last = bool(loader.drop_last)
        self._marks = (Mark(), Mark())  # at the beginning of the step, and at its end once that has been read
        self._length: int | None = None  # of the epoch, once it is known
        dataset = StreamedDataset(loader.dataset, seed)  # type: ignore[arg-type]
        self._inner = like(loader, dataset, self._batches, partial(_collate, loader.collate_fn), self._generator)

    def state_dict(self) -> dict[str, Any]:
        """Return the position at which a worker with this state begins."""
        mark = self._mark(self._loop.position)
        return {"epoch": mark.epoch, "offset": mark.offset, "state": mark.state, "length": self._length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from this state."""
        mark = Mark(state["epoch"], state["offset"], state["state"])
        self._marks, self._length = (mark, mark), state["length"]

    def _refresh_processes(self) -> None:
        """Do nothing: the loader processes continue at their position, and call the dataset's `set_epoch`."""

    def has_more(self, position: Position) -> bool:
        """Return whether the epoch has another step; True if the stream was not read that far."""
        self._enter(position)
        return next(self._steps(position), None) is not None

    def _enter(self, position: Position) -> None:
        if self._marks[0].epoch != position.epoch:
            self._marks, self._length = (Mark(position.epoch), Mark(position.epoch)), None

    def _mark(self, position: Position) -> Mark:
        """The newest one that is not beyond the position."""
        self._enter(position)
        first, second = self._marks
        return second if second.offset <= position.samples else first

    def _steps(self, position: Position) -> Iterator[Step]:
        size, last = self.batch.at(self._loop.rank_and_size[1]), last_step(self._loop, position)
        number, start = position.step, position.samples
        while last is None or number < last:
            samples = size if self._length is None else min(size, self._length - start)
            if samples <= 0 or (self._drop_last and samples < size):
                return
            yield Step(number, start, samples)
            number, start = number + 1, start + samples

    def _span(self) -> Iterator[tuple[MicroBatch, Any]]:
        self._reseed()
        self._batches.of_span = (self._request(step, micro, first=first) for step, micro, first in self._micros())
        for (step, micro, _), fetched in zip(self._micros(), self._inner, strict=False):
            batch, length, mark = fetched
            if length is not None and self._note_end(length) < step.start + step.size:
                return  # the step is shorter than it was planned, or there is none
            if mark is not None:
                self._marks = (self._mark(self._loop.position), mark)
            yield micro, batch

    def _note_end(self, length: int) -> int:
        self._length = length
        if length == 0:
            raise UsageError(
                "the IterableDataset gave no sample; where it reads what it was given once, let it start again in "
                "each __iter__"
            )
        return length

    def _micros(self) -> Iterator[tuple[Step, MicroBatch, bool]]:
        rank, world_size = self._loop.rank_and_size
        for step in self._steps(self._loop.position):
            for number, micro in enumerate(self._split(step.size, rank, world_size)):
                yield step, micro, number == 0

    def _request(self, step: Step, micro: MicroBatch, *, first: bool) -> Request:
        start, stop = step.start + micro.start, step.start + micro.stop
        if micro.padding:  # two samples: normalisation layers refuse to train on one
            start, stop = step.start, step.start + min(2, step.size)
        keep, through = (0, 0)
        if first:
            rank, world_size = self._loop.rank_and_size
            keep = step.start + max(each.stop for each in self._split(step.size, rank, world_size))
            through = step.start + step.size
        seed = mix_seed(self._seed, step.number, micro.shard, 1) if self._seeded else None
        epoch = self._loop.position.epoch
        return Request(epoch, start, stop, self._mark(self._loop.position), keep, through, seed)

    def _first(self) -> Iterator[tuple[MicroBatch, Any]]:
        step, micro = self._first_step()
        request = replace(self._request(step, micro, first=False), mark=Mark(self._loop.position.epoch))
        self._reseed()
        self._batches.of_span = iter([request])
        yield micro, next(iter(self._inner))[0]


def _collate(collate: Callable[[list[Any]], Any], read: Read) -> Fetched:
    """A batch, and what reading it has shown about the stream."""
    if read.seed is not None:
        RandomStreams().reseed(read.seed)
    return collate(read.samples) if read.samples else None, read.length, read.mark
