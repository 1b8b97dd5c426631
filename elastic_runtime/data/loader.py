"""The prepared loader: the user's DataLoader with the global order, cut into this worker's micro-batches.

Dataset, collation, worker processes and pinning stay the user's. Which samples a step is made of depends on the seed
and the epoch alone (`order`); which of them are this worker's, on the generation. Loader processes are kept across
resizes; what they had fetched ahead for the old generation is dropped. `streamed` is the same for iterable datasets.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from elastic_runtime.data.changed_datasets import ChangedDatasets
from elastic_runtime.data.dataloader import Batches, like
from elastic_runtime.data.sample_checksums import draw_at_random, sample_checksum
from elastic_runtime.data.sources import SeededDataset, SeededIndices, Source, has_own_batches
from elastic_runtime.errors import UsageError
from elastic_runtime.plan.order import mix_seed, order_checksum
from elastic_runtime.plan.position import Position
from elastic_runtime.torch_internals.modules import drop_loader_processes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elastic_runtime.data.further_loaders import SecondLoader
    from elastic_runtime.plan.batch_sizes import GlobalBatch
    from elastic_runtime.plan.batches import MicroBatch


class Loop(Protocol):
    """The part of the job that the loader uses."""

    @property
    def position(self) -> Position:
        """The position of the training."""

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """Return (rank, world size)."""

    @property
    def finished(self) -> bool:
        """The training is over."""

    @property
    def last_step(self) -> int | None:
        """The training ends after so many steps, also in the middle of an epoch."""

    def most_steps(self, epoch: int) -> int | None:
        """Return after how many steps an epoch ends, if not with its samples: in a rehearsal."""

    def enter_epoch(self) -> int:
        """The loop begins to iterate, possibly in the middle of an epoch; return the script's epoch, of which nothing
        is trained where a loss has led back to an earlier one.
        """

    @property
    def reruns(self) -> bool:
        """Whether the loop gets one batch of an epoch whose steps are all applied, for what follows the loop."""

    def begin_iteration(self, micro_batch: MicroBatch) -> int:
        """The loop gets this micro-batch next; return the iteration's number."""

    def end_iteration(self, iteration: int) -> bool:
        """The loop is done with it; False where what follows is to be planned again."""

    def abandon_iteration(self, iteration: int | None = None) -> None:
        """The loop was left within this iteration."""


class Plan(Protocol):
    """The division of a step into shares."""

    def __call__(self, samples: int, rank: int, world_size: int) -> list[MicroBatch]:
        """Return the micro-batches of `rank` in a step of `samples`."""


@dataclass(frozen=True)
class Step:
    """One global step: `size` samples of the epoch's order from `start` on."""

    number: int
    start: int
    size: int


class ElasticLoader:
    """Iterates over this worker's micro-batches of the current epoch, from where the training stands."""

    steps: int | None = None
    """Global steps of an epoch (of `global_batch_size` samples); None: known when it ends."""
    _inner: DataLoader[Any]
    order_checksum = 0
    """A number that differs, most likely, where the epoch's order does."""

    def __init__(
        self, loader: DataLoader[Any], loop: Loop, seed: int, batch: GlobalBatch, plan: Plan, *, seeded: bool = False
    ) -> None:
        self.dataset = loader.dataset
        self.seconds: list[SecondLoader] = []
        self.changes = ChangedDatasets([])
        self.batch, self._given = batch, loader
        self._begun_with: object = None  # what the dataset was when the loader's processes began
        self._loop, self._seed, self._split, self._seeded = loop, seed, plan, seeded
        self._batches: Batches[Any] = Batches()
        self._generator = torch.Generator()

    def __len__(self) -> int:
        """Return the global steps of an epoch; iterations are more if a share is cut. TypeError if it is unknown."""
        if self.steps is None:
            raise TypeError("the loader reads an IterableDataset, whose length is known when an epoch ends")
        return self.steps

    def __getattr__(self, name: str) -> Any:
        """Return other attributes (`batch_size`, `sampler`, `num_workers`) from the script's loader."""
        if name.startswith("_"):  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self._given, name)

    def __iter__(self) -> Iterator[Any]:
        """This worker's micro-batches; once the training has finished, all batches of the loader that was given."""
        return iter(self._given) if self._loop.finished else self._epoch_of_loop()

    def _epoch_of_loop(self) -> Iterator[Any]:
        epoch = self._loop.enter_epoch()
        self.changes.entered(epoch)
        self._refresh_processes()
        try:
            yield from self._iterations(epoch)
        finally:
            self.changes.ended()

    def _iterations(self, epoch: int) -> Iterator[Any]:
        loop = self._loop
        while loop.reruns or (loop.position.epoch == epoch and self.has_more(loop.position)):
            for micro_batch, batch in self._first() if loop.reruns else self._span():
                iteration = loop.begin_iteration(micro_batch)
                for second in self.seconds:
                    second.advance()
                try:
                    yield batch
                except GeneratorExit:
                    loop.abandon_iteration(iteration)
                    raise
                if not loop.end_iteration(iteration):
                    break

    def start_processes(self) -> None:
        """Start the loader's processes, if it has any, before a step waits for them."""
        if self._inner.num_workers:
            self._generator.manual_seed(mix_seed(self._seed))
            self._batches.of_span = iter(())
            list(self._inner)
            self._begun_with = snapshot_of(self.dataset)

    def _refresh_processes(self) -> None:
        """Without `persistent_workers` an epoch's processes see what the script has changed in the dataset since."""
        if not self._inner.num_workers or self._given.persistent_workers:
            return
        if self._begun_with is None or self._begun_with != snapshot_of(self.dataset):
            drop_loader_processes(self._inner)
        self._begun_with = None

    def sample(self) -> Any:
        """Return a batch as an iteration of two workers gets it; None if the dataset cannot give one out of order."""
        return None

    def sample_checksum(self) -> int:
        """Return a number that differs if the dataset has other samples; 0 if that cannot be determined."""
        return 0

    def processes_may_draw(self) -> bool:
        """Return whether samples may depend on random numbers of the loader's processes."""
        return self._inner.num_workers > 0

    def has_more(self, position: Position) -> bool:
        """Return whether the epoch has another step, as far as this worker has read."""
        raise NotImplementedError

    def _reseed(self) -> None:
        """Seed the loader processes for a span: a function of its beginning and of the rank."""
        self._generator.manual_seed(mix_seed(self._seed, self._loop.position.step, self._loop.rank_and_size[0]))

    def _span(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Micro-batches and batches from here to the end of the epoch, as long as nothing changes."""
        raise NotImplementedError

    def _first(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this worker's first micro-batch of the epoch, and its batch."""
        raise NotImplementedError

    def _first_step(self) -> tuple[Step, MicroBatch]:
        """Return the epoch's first step, and this worker's first micro-batch of it."""
        rank, world_size = self._loop.rank_and_size
        step = next(self._steps(Position(self._loop.position.epoch)))
        return step, self._split(step.size, rank, world_size)[0]

    def _steps(self, position: Position) -> Iterator[Step]:
        """Return the rest of the epoch at the current size."""
        raise NotImplementedError


def last_step(loop: Loop, position: Position) -> int | None:
    """Return the step before which the epoch, or the training, ends whatever samples are left; None: there is none."""
    most = loop.most_steps(position.epoch)
    ends = None if most is None else position.step - position.index + most
    return min((each for each in (ends, loop.last_step) if each is not None), default=None)


class IndexedLoader(ElasticLoader):
    """Over a map-style dataset: each sample has an index, and an epoch is an order of them."""

    def __init__(
        self, loader: DataLoader[Any], loop: Loop, seed: int, batch: GlobalBatch, plan: Plan, *, seeded: bool = False
    ) -> None:
        super().__init__(loader, loop, seed, batch, plan, seeded=seeded or loader.num_workers > 0)
        self._source = Source(loader, seed)
        self.length = self._source.length
        self.steps = self._source.steps(batch.samples)
        if self.steps == 0:
            raise UsageError(
                f"the dataset has {self._source.length} samples and drop_last is set, so that no global batch of "
                f"{batch.samples} is ever full; lower global_batch_size, or leave drop_last out"
            )
        self._epoch, self._order = -1, cast("Sequence[int]", ())
        dataset = SeededDataset(loader.dataset) if self._seeded else loader.dataset
        self._inner = like(loader, dataset, self._batches, loader.collate_fn, self._generator)

    def sample(self) -> Any:
        """Return the first micro-batch of the first epoch, as an iteration of two workers gets it."""
        (micro, *_) = self._split(self.batch.at(2), 0, 2)
        self._batches.of_span = iter([list(self._source.epoch(0)[: micro.size])])
        return next(iter(self._inner))

    def sample_checksum(self) -> int:
        """Return a checksum of a few samples, read as the loop reads them: in a loader process if there are some."""
        order, own = self._source.epoch(0), int.from_bytes(os.urandom(6))
        return sample_checksum(partial(self._read, order), len(order), mix_seed(self._seed, 2), own)

    def processes_may_draw(self) -> bool:
        """Return whether samples depend on random numbers of the loader's processes, as far as a few reads show."""
        if not super().processes_may_draw():
            return False
        order = self._source.epoch(0)
        return draw_at_random(partial(self._read, order), len(order))

    def _read(self, order: Sequence[int], places: list[int], seed: int) -> Any:
        """Return the batch of these places of an order, drawn with a seed."""
        indices = [order[place] for place in places]
        self._generator.manual_seed(seed)
        self._batches.of_span = iter([SeededIndices(indices, seed) if self._seeded else indices])
        return next(iter(self._inner))

    def has_more(self, position: Position) -> bool:
        """Return whether the epoch has another step."""
        if position.epoch != self._epoch:
            self._epoch, self._order = position.epoch, self._source.epoch(position.epoch)
            self.order_checksum = order_checksum(self._order)
        return next(self._steps(position), None) is not None

    def _steps(self, position: Position) -> Iterator[Step]:
        """Return the rest of the epoch at the current size."""
        size = self.batch.at(self._loop.rank_and_size[1])
        number, last = position.step, last_step(self._loop, position)
        for start, samples in self._source.cuts(position.index, position.samples, size):
            if last is not None and number >= last:
                return
            yield Step(number, start, samples)
            number += 1

    def _span(self) -> Iterator[tuple[MicroBatch, Any]]:
        position, (rank, world_size) = self._loop.position, self._loop.rank_and_size
        order = self._order
        self._reseed()

        def micros() -> Iterator[tuple[Step, MicroBatch]]:
            for step in self._steps(position):
                for micro in self._split(step.size, rank, world_size):
                    yield step, micro

        self._batches.of_span = (self._indices(order, step, micro) for step, micro in micros())
        before = position.epoch * self.length
        for second in self.seconds:
            second.follow(((before + step.start, micro) for step, micro in micros()), position.step)
        yield from zip((micro for _, micro in micros()), self._inner, strict=False)

    def _first(self) -> Iterator[tuple[MicroBatch, Any]]:
        step, micro = self._first_step()
        self._reseed()
        self._batches.of_span = iter([self._indices(self._order, step, micro)])
        before = self._loop.position.epoch * self.length
        for second in self.seconds:
            second.follow(iter([(before + step.start, micro)]), self._loop.position.step)
        yield micro, next(iter(self._inner))

    def _indices(self, order: Sequence[int], step: Step, micro: MicroBatch) -> Sequence[int]:
        start = step.start
        if micro.padding:  # two samples: normalisation layers refuse to train on one
            return [order[start], order[start + 1 if step.size > 1 else start]]
        found = list(order[start + micro.start : start + micro.stop])
        if not self._seeded:
            return found
        part = micro.shard if micro.step_shards > 1 else micro.start
        return SeededIndices(found, mix_seed(self._seed, step.number, part, 1))


def check(loader: DataLoader[Any]) -> None:
    """UsageError for a loader that cannot be shared out."""
    if type(loader).__name__ == "_FabricDataLoader":
        raise UsageError(
            "the loader was wrapped by fabric.setup_dataloaders; leave that out, and give the plain one, or use an "
            "ElasticFabric (elastic_runtime.integrations.lightning) for the whole loop"
        )
    if not isinstance(loader, DataLoader):
        raise UsageError(f"prepare was given a {type(loader).__name__} as loader; it needs a torch DataLoader")
    samplers = (getattr(loader, "sampler", None), getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise UsageError("the loader has a DistributedSampler; leave it out: elastic_runtime shares the samples out")
    if type(loader).__iter__ is not DataLoader.__iter__ and not type(loader).__module__.startswith("torchdata."):
        raise UsageError(
            f"the loader is a {type(loader).__name__} with an __iter__ of its own, which would be left out: batches "
            "are dealt out to the workers; use a plain DataLoader, and a collate_fn for what is done to batches"
        )
    if loader.batch_size is None and not has_own_batches(loader):
        raise UsageError("the loader has no batch_size; give it one, or use batch_size=1 with the same collate_fn")
    if isinstance(loader.dataset, IterableDataset):
        return
    try:
        len(loader.batch_sampler if has_own_batches(loader) else loader.sampler)  # type: ignore[arg-type]
    except TypeError as error:
        raise UsageError(f"the loader has no length ({error}); a sampler needs __len__") from error


def snapshot_of(dataset: Any) -> object:
    """Return a snapshot to detect a script's change of a dataset: the values and identities of its attributes."""
    attributes = getattr(dataset, "__dict__", {})
    plain = (int, float, str, bool, type(None))
    return {name: value if isinstance(value, plain) else id(value) for name, value in attributes.items()}
