"""The prepared loader: the user's DataLoader with the global order, cut into this worker's micro-batches.

Dataset, collation, worker processes and pinning stay the user's. Which samples a step is made of depends on the seed
and the epoch alone (`order`); which of them are this worker's, on the generation. Loader processes are kept across
resizes; what they had fetched ahead for the old generation is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from elastic_runtime.errors import UsageError
from elastic_runtime.order import mix_seed
from elastic_runtime.sources import SeededDataset, SeededIndices, Source, has_own_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elastic_runtime.batches import MicroBatch
    from elastic_runtime.position import Position
    from elastic_runtime.sizes import GlobalBatch


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

    def __init__(
        self, loader: DataLoader[Any], loop: Loop, seed: int, batch: GlobalBatch, plan: Plan, *, seeded: bool = False
    ) -> None:
        _check(loader)
        self.dataset = loader.dataset
        self.batch = batch
        self._loop, self._seed, self._split, self._seeded = loop, seed, plan, seeded
        self._source = Source(loader, seed)
        self.steps = self._source.steps(batch.samples)
        if self.steps == 0:
            raise UsageError(
                f"the dataset has {self._source.length} samples and drop_last is set, so that no global batch of "
                f"{batch.samples} is ever full; lower global_batch_size, or leave drop_last out"
            )
        self._batches: Iterator[Sequence[int]] = iter(())
        self._generator = torch.Generator()
        self._inner = _like(loader, self, self._generator)

    def __len__(self) -> int:
        """Global steps of an epoch (of `global_batch_size` samples). Iterations are more where a share is cut."""
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        loop = self._loop
        loop.enter_epoch()
        epoch = loop.position.epoch
        order = self._source.epoch(epoch)
        while loop.position.epoch == epoch and self.has_more(loop.position):
            for micro_batch, batch in self._span(order):
                loop.begin(micro_batch)
                yield batch
                if not loop.end():
                    break

    def has_more(self, position: Position) -> bool:
        """Whether the epoch has another step."""
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

    def _span(self, order: Sequence[int]) -> Iterator[tuple[MicroBatch, Any]]:
        """Micro-batches and batches from here to the end of the epoch, as long as nothing changes."""
        position, (rank, world_size) = self._loop.position, self._loop.place
        self._generator.manual_seed(mix_seed(self._seed, position.step, rank))

        def micros() -> Iterator[tuple[Step, MicroBatch]]:
            for step in self._steps(position):
                for micro in self._split(step.size, rank, world_size):
                    yield step, micro

        self._batches = (self._indices(order, step, micro) for step, micro in micros())
        yield from zip((micro for _, micro in micros()), self._inner, strict=False)

    def _indices(self, order: Sequence[int], step: Step, micro: MicroBatch) -> Sequence[int]:
        start = step.start
        if micro.ghost:  # two samples: normalisation layers refuse to train on one
            return [order[start], order[start + 1 if step.size > 1 else start]]
        found = list(order[start + micro.start : start + micro.stop])
        return SeededIndices(found, mix_seed(self._seed, step.number, micro.shard, 1)) if self._seeded else found


class _Batches:
    """The batch sampler of the inner DataLoader: whatever the plan of the current span is."""

    def __init__(self, owner: ElasticLoader) -> None:
        self._owner = owner

    def __iter__(self) -> Iterator[Sequence[int]]:
        return iter(self._owner._batches)  # noqa: SLF001  (two halves of one thing)


def _like(loader: DataLoader[Any], owner: ElasticLoader, generator: torch.Generator) -> DataLoader[Any]:
    """The user's loader, over other batches. Its own generator: theirs is not to be drawn from by us."""
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
    }
    if loader.num_workers:
        options["persistent_workers"] = True
        options["prefetch_factor"] = loader.prefetch_factor
        options["multiprocessing_context"] = loader.multiprocessing_context
    dataset = SeededDataset(loader.dataset) if owner._seeded else loader.dataset  # noqa: SLF001
    return DataLoader(dataset, batch_sampler=_Batches(owner), generator=generator, **options)  # type: ignore[arg-type]


def _check(loader: DataLoader[Any]) -> None:
    if not isinstance(loader, DataLoader):
        raise UsageError(f"prepare was given a {type(loader).__name__} as loader; it needs a torch DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "the loader's dataset is an IterableDataset, whose samples have no indices to be shared out; "
            "wrap it into a map-style dataset (with __len__ and __getitem__)"
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise UsageError("the loader has a DistributedSampler; leave it out: elastic_runtime shares the samples out")
    if loader.batch_size is None and not has_own_batches(loader):
        raise UsageError("the loader has no batch_size; give it one, or use batch_size=1 with the same collate_fn")
    try:
        len(loader.batch_sampler if has_own_batches(loader) else loader.sampler)  # type: ignore[arg-type]
    except TypeError as error:
        raise UsageError(f"the loader has no length ({error}); a sampler needs __len__") from error
