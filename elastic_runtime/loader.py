"""The prepared loader: the user's DataLoader with the global order, cut into this worker's micro-batches.

Dataset, collation, worker processes and pinning stay the user's. Which samples a step is made of depends on the seed
and the epoch alone (`order`); which of them are this worker's, on the generation. Loader processes are kept across
resizes; what they had fetched ahead for the old generation is dropped. `streamed` is the same for iterable datasets.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from elastic_runtime.errors import UsageError
from elastic_runtime.order import mix_seed, order_stamp
from elastic_runtime.sources import SeededDataset, SeededIndices, Source, has_own_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.process import BaseProcess

    from elastic_runtime.batches import MicroBatch
    from elastic_runtime.position import Position
    from elastic_runtime.sizes import GlobalBatch


T = TypeVar("T")


class Loop(Protocol):
    """What the loader needs of the job."""

    @property
    def position(self) -> Position:
        """Where the training stands."""

    @property
    def place(self) -> tuple[int, int]:
        """(rank, world size)."""

    @property
    def last_step(self) -> int | None:
        """The training ends after so many steps, wherever in an epoch that is."""

    def enter_epoch(self) -> None:
        """The loop begins to iterate, perhaps in the middle of an epoch."""

    def begin(self, micro_batch: MicroBatch) -> None:
        """The loop gets this micro-batch next."""

    def end(self) -> bool:
        """The loop is done with it; False where what follows is to be planned anew."""

    def break_off(self, iteration: MicroBatch | None = None) -> None:
        """The loop was left within this iteration."""


class Plan(Protocol):
    """How a step is split."""

    def __call__(self, samples: int, rank: int, world_size: int) -> list[MicroBatch]:
        """What `rank` iterates over in a step of `samples`."""


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
    stamp = 0
    """A number that differs, most likely, where the epoch's order does."""

    def __init__(
        self, loader: DataLoader[Any], loop: Loop, seed: int, batch: GlobalBatch, plan: Plan, *, seeded: bool = False
    ) -> None:
        self.dataset = loader.dataset
        self.batch = batch
        self._loop, self._seed, self._split, self._seeded = loop, seed, plan, seeded
        self._batches: Batches[Any] = Batches()
        self._generator = torch.Generator()

    def __len__(self) -> int:
        """Global steps of an epoch. Iterations are more where a share is cut. TypeError where it is not known."""
        if self.steps is None:
            raise TypeError("the loader reads an IterableDataset, whose length is known when an epoch ends")
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        loop = self._loop
        loop.enter_epoch()
        epoch = loop.position.epoch
        while loop.position.epoch == epoch and self.has_more(loop.position):
            for micro_batch, batch in self._span():
                loop.begin(micro_batch)
                try:
                    yield batch
                except GeneratorExit:
                    loop.break_off(micro_batch)
                    raise
                if not loop.end():
                    break

    def start_processes(self) -> None:
        """Start the loader's processes, if it has any, where nobody waits for them yet."""
        if self._inner.num_workers:
            self._generator.manual_seed(mix_seed(self._seed))
            self._batches.of_span = iter(())
            list(self._inner)

    def sample(self) -> Any:
        """A batch as an iteration of two workers gets it, out of turn; None where the dataset cannot give one."""
        return None

    def has_more(self, position: Position) -> bool:
        """Whether the epoch has another step, as far as is known."""
        raise NotImplementedError

    def _reseed(self) -> None:
        """What loader processes draw in a span is a function of where it begins, and of the rank."""
        self._generator.manual_seed(mix_seed(self._seed, self._loop.position.step, self._loop.place[0]))

    def _span(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Micro-batches and batches from here to the end of the epoch, as long as nothing changes."""
        raise NotImplementedError


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
        """See ElasticLoader."""
        (micro, *_) = self._split(self.batch.at(2), 0, 2)
        self._batches.of_span = iter([list(self._source.epoch(0)[: micro.size])])
        return next(iter(self._inner))

    def has_more(self, position: Position) -> bool:
        """Whether the epoch has another step."""
        if position.epoch != self._epoch:
            self._epoch, self._order = position.epoch, self._source.epoch(position.epoch)
            self.stamp = order_stamp(self._order)
        return next(self._steps(position), None) is not None

    def _steps(self, position: Position) -> Iterator[Step]:
        """What is left of the epoch, at this size."""
        size = self.batch.at(self._loop.place[1])
        number, last = position.step, self._loop.last_step
        for start, samples in self._source.cuts(position.index, position.samples, size):
            if last is not None and number >= last:
                return
            yield Step(number, start, samples)
            number += 1

    def _span(self) -> Iterator[tuple[MicroBatch, Any]]:
        position, (rank, world_size) = self._loop.position, self._loop.place
        order = self._order
        self._reseed()

        def micros() -> Iterator[tuple[Step, MicroBatch]]:
            for step in self._steps(position):
                for micro in self._split(step.size, rank, world_size):
                    yield step, micro

        self._batches.of_span = (self._indices(order, step, micro) for step, micro in micros())
        yield from zip((micro for _, micro in micros()), self._inner, strict=False)

    def _indices(self, order: Sequence[int], step: Step, micro: MicroBatch) -> Sequence[int]:
        start = step.start
        if micro.ghost:  # two samples: normalisation layers refuse to train on one
            return [order[start], order[start + 1 if step.size > 1 else start]]
        found = list(order[start + micro.start : start + micro.stop])
        if not self._seeded:
            return found
        part = micro.shard if micro.step_shards > 1 else micro.start
        return SeededIndices(found, mix_seed(self._seed, step.number, part, 1))


class Batches(Generic[T]):
    """The batch sampler of the inner DataLoader: whatever the plan of the current span is."""

    def __init__(self) -> None:
        self.of_span: Iterator[T] = iter(())

    def __iter__(self) -> Iterator[T]:
        return self.of_span


def like(
    loader: DataLoader[Any], dataset: Dataset[Any], batches: Batches[Any], collate: Any, generator: torch.Generator
) -> DataLoader[Any]:
    """The user's loader, over other batches. Its own generator: theirs is not to be drawn from by us."""
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": collate,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
    }
    if loader.num_workers:
        context = loader.multiprocessing_context or multiprocessing
        served = context.get_start_method() == "forkserver"
        options["worker_init_fn"] = partial(begin_loader_process, loader.worker_init_fn, served=served)
        options["persistent_workers"] = True
        options["prefetch_factor"] = loader.prefetch_factor
        options["multiprocessing_context"] = loader.multiprocessing_context
    return DataLoader(dataset, batch_sampler=batches, generator=generator, **options)


def begin_loader_process(init: Callable[[int], None] | None, number: int, *, served: bool) -> None:
    """Do what the script does first in a loader process; but end where its worker is killed.

    torch's loader processes look whether their parent is still the one that they began with. So they live for ever
    where that had changed already, and where a fork server made them (`served`), which is their parent.
    """
    worker = multiprocessing.parent_process()
    if worker is not None and served:
        threading.Thread(target=_end_with, args=(worker,), name="elastic-end-with-worker", daemon=True).start()
    elif worker is not None and worker.pid != os.getppid():
        os._exit(1)
    if init is not None:
        init(number)


def _end_with(worker: BaseProcess) -> None:
    wait([worker.sentinel])
    os._exit(1)


def check(loader: DataLoader[Any]) -> None:
    """UsageError for a loader that cannot be shared out."""
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
