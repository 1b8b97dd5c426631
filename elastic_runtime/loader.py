"""The prepared loader: the user's DataLoader with the global order, cut into this worker's micro-batches.

Dataset, collation, worker processes and pinning stay the user's. Which samples a step is made of depends on the seed
and the epoch alone (`order`); which of them are this worker's, on the generation. Loader processes are kept across
resizes; what they had fetched ahead for the old generation is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from elastic_runtime.errors import UsageError
from elastic_runtime.order import epoch_order, mix_seed, steps_in_epoch
from elastic_runtime.streams import RandomStreams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elastic_runtime.batches import MicroBatch
    from elastic_runtime.position import Position


class Loop(Protocol):
    """What the loader needs of the job."""

    @property
    def position(self) -> Position:
        """Where the training stands."""

    @property
    def place(self) -> tuple[int, int]:
        """(rank, world size)."""

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


class ElasticLoader:
    """Iterates over this worker's micro-batches of the current epoch, from where the training stands."""

    def __init__(
        self, loader: DataLoader[Any], loop: Loop, seed: int, global_batch: int, plan: Plan, *, seeded: bool = False
    ) -> None:
        _check(loader)
        self.dataset = loader.dataset
        self.global_batch = global_batch
        self._loop, self._seed, self._split, self._seeded = loop, seed, plan, seeded
        self._shuffle = isinstance(loader.sampler, RandomSampler)
        self._sampler = loader.sampler
        self._samples = len(loader.sampler)  # type: ignore[arg-type]
        self.steps = steps_in_epoch(self._samples, global_batch, drop_last=bool(loader.drop_last))
        if self.steps == 0:
            raise UsageError(
                f"the dataset has {self._samples} samples and drop_last is set, so that no global batch of "
                f"{global_batch} is ever full; lower global_batch_size, or leave drop_last out"
            )
        self._batches: list[Sequence[int]] | Iterator[Sequence[int]] = []
        self._generator = torch.Generator()
        self._inner = _like(loader, self, self._generator)

    def __len__(self) -> int:
        """Global steps of an epoch. Iterations are more where a share is cut into micro-batches."""
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        loop = self._loop
        loop.enter_epoch()
        epoch = loop.position.epoch
        order = self._order(epoch)
        while loop.position.epoch == epoch and loop.position.index < self.steps:
            for micro_batch, batch in self._span(order):
                loop.begin(micro_batch)
                yield batch
                if not loop.end():
                    break

    def _order(self, epoch: int) -> Sequence[int]:
        if self._shuffle or isinstance(self._sampler, SequentialSampler):
            return epoch_order(self._seed, epoch, self._samples, shuffle=self._shuffle)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mix_seed(self._seed, epoch))
            return list(self._sampler)

    def _span(self, order: Sequence[int]) -> Iterator[tuple[MicroBatch, Any]]:
        """Micro-batches and batches from here to the end of the epoch, as long as the membership stays."""
        position, (rank, world_size) = self._loop.position, self._loop.place
        indices = range(position.index, self.steps)
        self._generator.manual_seed(mix_seed(self._seed, position.step, rank))
        first_step = position.step - position.index  # of the epoch
        self._batches = (
            self._indices(order, k, m, first_step + k)
            for k in indices
            for m in self._micro_batches(k, rank, world_size)
        )
        micros = (m for k in indices for m in self._micro_batches(k, rank, world_size))
        yield from zip(micros, self._inner, strict=False)

    def _micro_batches(self, index: int, rank: int, world_size: int) -> list[MicroBatch]:
        samples = min(self.global_batch, self._samples - index * self.global_batch)
        return self._split(samples, rank, world_size)

    def _indices(self, order: Sequence[int], index: int, micro: MicroBatch, step: int) -> Sequence[int]:
        start = index * self.global_batch
        if micro.ghost:  # two samples: normalisation layers refuse to train on one
            return [order[start], order[start + 1 if micro.step_samples > 1 else start]]
        found = list(order[start + micro.start : start + micro.stop])
        return SeededIndices(found, mix_seed(self._seed, step, micro.shard, 1)) if self._seeded else found


class SeededIndices(list[int]):
    """A batch's indices, and the seed of the random numbers that are drawn while it is fetched."""

    def __init__(self, indices: Sequence[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> tuple[type[SeededIndices], tuple[list[int], int]]:
        return SeededIndices, (list(self), self.seed)


class SeededDataset(Dataset[Any]):
    """The user's dataset; what it draws at random depends on the batch alone, whichever process fetches it."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset
        self._streams = RandomStreams()

    def __getitems__(self, indices: Sequence[int]) -> Any:
        if isinstance(indices, SeededIndices):
            self._streams.reseed(indices.seed)
        together = getattr(self._dataset, "__getitems__", None)
        return together(list(indices)) if together else [self._dataset[i] for i in indices]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


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
    if loader.batch_size is None:
        raise UsageError("the loader has no batch_size; give it one, or use batch_size=1 with the same collate_fn")
    try:
        len(loader.sampler)  # type: ignore[arg-type]
    except TypeError as error:
        raise UsageError(f"the loader has no length ({error}); a sampler needs __len__") from error
