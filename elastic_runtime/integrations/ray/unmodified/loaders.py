"""What `prepare_data_loader` returns: in training the job's share of each step, in evaluation this worker's share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import ray.train
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from elastic_runtime.data.sources import has_own_batches
from elastic_runtime.errors import UsageError
from elastic_runtime.integrations.ray.unmodified.driver import SEE, LoopDriver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_runtime.loop.job import Job


class TrainingSource(Protocol):
    """What a loop trains with, before it is prepared."""

    def make_job(self) -> tuple[Job, Any]:
        """Make the job; return it, and its batches."""

    def same_as(self, other: Any) -> bool:
        """Whether it has the same samples: a loop may make its loader again in each epoch."""

    def begin(self) -> None:
        """The training begins: its first batch is asked for next."""

    def sample(self) -> Any:
        """Return a batch, whichever; None: the job has one."""


class EpochOrder(Sampler[int]):
    """The order in which DistributedSampler deals samples out, as a whole and without padding.

    So step k has the samples that it has in Ray, at every size. The job sets the epoch; its epoch 0 is number `first`
    of the script, which continues at a checkpoint of its own.
    """

    def __init__(self, length: int, *, shuffle: bool, seed: int, first: int = 0) -> None:
        self.length, self.shuffle, self.seed, self.epoch, self._first = length, shuffle, seed, first, first

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.length))
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return iter(order)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as a loop does for a DistributedSampler."""
        self.epoch = self._first + epoch

    def of_job(self, first: int) -> EpochOrder:
        """Return the order for a job that begins with this epoch of the script."""
        return EpochOrder(self.length, shuffle=self.shuffle, seed=self.seed, first=first)


class LoaderSource:
    """A DataLoader that the loop prepared, or gave a DistributedSampler."""

    def __init__(self, loader: DataLoader[Any], driver: LoopDriver) -> None:
        self._loader, self._driver = loader, driver
        self.batch_size = loader.batch_size or 1
        self.order = order_of(loader)

    def __str__(self) -> str:
        kind = type(self._loader.dataset).__name__
        return f"{len(self.order)} samples of a {kind}"

    def make_job(self) -> tuple[Job, Any]:
        """Make the job of the whole order, from the epoch on that the script has set: of this loader's sampler, or of
        the DistributedSampler that it was prepared with.
        """
        order = self.order.of_job(self.order.epoch or getattr(self._loader.sampler, "epoch", 0))
        return self._driver.make_job(self.batch_size, lambda size: self.over(order, size))

    def same_as(self, other: Any) -> bool:
        """Whether it has as many samples of the same kind; the batches keep their size."""
        return str(self) == str(other)

    def begin(self) -> None:
        """Do nothing: the samples are read by number."""

    def sample(self) -> None:
        """Leave it to the job."""

    def over(self, sampler: Any, batch_size: int | None = None) -> DataLoader[Any]:
        """Return the same loader over another sampler, and with another batch size, if one is given."""
        loader = self._loader
        options: dict[str, Any] = {}
        if loader.num_workers:
            options = {
                "prefetch_factor": loader.prefetch_factor,
                "persistent_workers": loader.persistent_workers,
                "multiprocessing_context": loader.multiprocessing_context,
            }
        return DataLoader(
            loader.dataset,
            batch_size=batch_size or loader.batch_size,
            sampler=sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            drop_last=loader.drop_last,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            **options,
        )


def order_of(loader: DataLoader[Any]) -> EpochOrder:
    """Return the order of the loader's samples. UsageError where it has none that all workers can have."""
    if isinstance(loader.dataset, IterableDataset) or has_own_batches(loader):
        what = "reads an IterableDataset" if isinstance(loader.dataset, IterableDataset) else "has a batch_sampler"
        raise UsageError(
            f"prepare_data_loader got a loader that {what}, of which Ray Train gives each worker everything; write: "
            f"job = elastic_runtime.init(), model, optimizer, loader = job.prepare(model, optimizer, loader) ({SEE})"
        )
    length, sampler = len(loader.dataset), loader.sampler  # type: ignore[arg-type]
    if isinstance(sampler, DistributedSampler):
        order = EpochOrder(length, shuffle=sampler.shuffle, seed=sampler.seed)
        order.set_epoch(sampler.epoch)
        return order
    return EpochOrder(length, shuffle=not isinstance(sampler, SequentialSampler), seed=0)


class PreparedLoader(DataLoader[Any]):
    """A loop's loader over `device`; its attributes are those of the loader that was prepared, but for the sampler."""

    _source: LoaderSource
    _driver: LoopDriver
    _device: torch.device | None

    def __init__(self, loader: DataLoader[Any], driver: LoopDriver, device: torch.device | None) -> None:
        self.__dict__.update(loader.__dict__)  # DataLoader's own constructor would check and change them
        source = LoaderSource(loader, driver)
        self.__dict__.update(_source=source, _driver=driver, _device=device, sampler=source.order)

    def __len__(self) -> int:
        """Return the batches of an epoch at the current size; before the first one, at the expected size."""
        workers = ray.train.get_context().get_world_size()
        size = self._driver.options.global_batch_size or self._source.batch_size * workers
        samples = len(self._source.order)
        return samples // size if self.drop_last else -(-samples // size)

    def __iter__(self) -> Any:
        return iterate(self._source, self._driver, self._device)


def iterate(source: LoaderSource, driver: LoopDriver, device: torch.device | None) -> Iterator[Any]:
    """Yield batches: of the job in training, else of this worker's share; one where the epoch is run again."""
    batches = driver.epoch(source) if driver.trains else _share(source, driver)
    for batch in batches:
        yield batch if device is None else moved(batch, device)


class _Share(DistributedSampler[Any]):
    """A part of the samples for a loader that is iterated as it is: those of DistributedSampler are dealt out again."""


def _share(source: LoaderSource, driver: LoopDriver) -> Iterator[Any]:
    """Yield the batches of an evaluation, dealt out as Ray does: all workers have equally many samples."""
    rank, size = dist.get_rank(), dist.get_world_size()
    order: Any = source.order
    if size > 1:
        order = _Share(range(len(order)), size, rank, shuffle=order.shuffle, seed=order.seed)  # type: ignore[arg-type]
        order.set_epoch(source.order.epoch)
    for batch in source.over(order):
        yield batch
        if driver.replaying:
            return


def moved(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on `device`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return type(batch)({key: moved(value, device) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device) for value in batch)
    return batch


def check_sampler(loader: DataLoader[Any], *, add_dist_sampler: bool) -> None:
    """UsageError for a loader that Ray would not share out, but each worker would read as a whole."""
    shared = isinstance(loader.sampler, DistributedSampler)
    if not add_dist_sampler and not shared:
        raise UsageError(
            "prepare_data_loader(add_dist_sampler=False) got a loader without a DistributedSampler, so that each "
            f"worker would train on everything; write: prepare_data_loader(loader) ({SEE})"
        )
    if not shared and not isinstance(loader.sampler, SequentialSampler | RandomSampler):
        kind = type(loader.sampler).__name__
        raise UsageError(
            f"prepare_data_loader got a loader with a {kind}, which Ray Train replaces by a DistributedSampler; to "
            "keep it, write: job = elastic_runtime.init(), "
            f"model, optimizer, loader = job.prepare(model, optimizer, loader) ({SEE})"
        )
