"""The results of `ElasticAccelerator.prepare`: loaders, optimizers and schedulers that follow an elastic job.

Optimizers and schedulers are Accelerate's own wrappers, for code that asks for them, less what those do because of a
number of processes or of iterations: both are the job's here.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import send_to_device
from torch.utils.data import BatchSampler, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from elastic_runtime.data.dataloader import like
from elastic_runtime.data.sources import Source, has_own_batches
from elastic_runtime.errors import LoopError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.utils.data import DataLoader

    from elastic_runtime.data.loader import ElasticLoader
    from elastic_runtime.integrations.accelerate.accelerator import ElasticAccelerator


class ElasticOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # Accelerate has no types
    """Acts where a global step is complete."""

    acted = False  # in this iteration

    def step(self, closure: Any = None) -> None:
        """Return the state, as Accelerate does."""
        super().step(closure)
        self.acted = True

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # noqa: FBT001  (torch's own signature)
        """Clear gradients, at any point of an iteration: between micro-batches of a step there are none to lose."""
        self.optimizer.zero_grad(**({} if set_to_none is None else {"set_to_none": set_to_none}))

    def rebind(self) -> None:
        """The optimizer's `step` was guarded: what puts it back after each step of a GradScaler must put back that."""
        if self.scaler is not None:
            self._optimizer_original_step_method = self.optimizer.step
            self._optimizer_patched_step_method = patch_optimizer_step(self, self.optimizer.step)


class ElasticScheduler(AcceleratedScheduler):  # type: ignore[misc]  # Accelerate has no types
    """Steps once for each global step, at every size.

    Accelerate steps once for each process, because its global batch grows with them; and it counts iterations that
    accumulate, whose number depends on the size here.
    """

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step if a global step was applied; outside an iteration (once per epoch) each time."""
        if self.step_with_optimizer and not self.gradient_state.sync_gradients:
            return
        if not any(optimizer.step_was_skipped for optimizer in self.optimizers):
            self.scheduler.step(*args, **kwargs)


class _Loader:
    """A prepared loader; all attributes but its batches are those of the original loader."""

    def __init__(self, accelerator: ElasticAccelerator, loader: DataLoader[Any], *, place: bool) -> None:
        """`place`: put the batches on the device."""
        self.loader, self._accelerator, self._place = loader, accelerator, place

    def __getattr__(self, name: str) -> Any:
        if name in {"loader", "_accelerator"}:  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Nothing: the epoch is the job's."""


class TrainingLoader(_Loader):
    """The training data, shared out by the job. Iterated inside `accelerator.epochs(n)`, else LoopError."""

    def __init__(self, accelerator: ElasticAccelerator, loader: DataLoader[Any], *, place: bool) -> None:
        super().__init__(accelerator, loader, place=place)
        self.elastic: ElasticLoader | None = None

    def __len__(self) -> int:
        """Global steps of an epoch times `gradient_accumulation_steps`: schedules divide by it.

        TypeError for an IterableDataset, as for any loader of one.
        """
        steps = Source(self.loader, 0).steps(self.total_batch_size) if self.elastic is None else len(self.elastic)
        return steps * int(self._accelerator.gradient_accumulation_steps)

    @property
    def total_batch_size(self) -> int:
        """Samples of a global step, at every size."""
        return self._accelerator.batch_of(self.loader)[0]

    def __iter__(self) -> Iterator[Any]:
        if self.elastic is None:
            raise LoopError(
                "the training loader is iterated outside accelerator.epochs(...); write: "
                "for epoch in accelerator.epochs(N)"
            )
        return self._epoch(self.elastic)

    def _epoch(self, batches: Iterable[Any]) -> Iterator[Any]:
        accelerator = self._accelerator
        accelerator.epoch_over = False
        try:
            yield from self.iterations(batches)
        finally:
            accelerator.epoch_over = True

    def iterations(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Each batch begins an iteration, which has not completed a step yet."""
        accelerator = self._accelerator
        try:
            for number, batch in enumerate(batches):
                if number == 0:
                    accelerator.follow()
                accelerator.begin_iteration()
                yield self.on_device(batch)
        finally:
            accelerator.end_iterations()

    def on_device(self, batch: Any) -> Any:
        """The batch where the model is, unless that was not asked for."""
        accelerator = self._accelerator
        return send_to_device(batch, accelerator.device, accelerator.non_blocking) if self._place else batch


class EvaluationLoader(_Loader):
    """Evaluation's and others': each worker reads all of it by itself; in a function that `accelerator.repeat` calls
    its share at the current size, as Accelerate deals it out.
    """

    def __init__(self, accelerator: ElasticAccelerator, loader: DataLoader[Any], *, place: bool) -> None:
        super().__init__(accelerator, loader, place=place)
        if isinstance(getattr(loader, "sampler", None), DistributedSampler):
            raise UsageError("the loader has a DistributedSampler; leave it out: accelerator.repeat shares samples out")
        self._of_place: tuple[tuple[int, int], Any] | None = None

    def __len__(self) -> int:
        """Iterations of this worker, here and now."""
        return len(self._prepared())

    def __iter__(self) -> Iterator[Any]:
        accelerator = self._accelerator
        with nullcontext() if accelerator.repeating else accelerator.by_itself():
            yield from self._prepared()

    def _prepared(self) -> Any:
        """Kept until the size changes, with its loader processes."""
        accelerator = self._accelerator
        place = (accelerator.process_index, accelerator.num_processes) if accelerator.repeating else (0, 1)
        if self._of_place is None or self._of_place[0] != place:
            self._of_place = (place, self._by_accelerate(*place))
        return self._of_place[1]

    def _by_accelerate(self, rank: int, size: int) -> Any:
        """Without `split_batches` (a batch that three workers do not divide would be an error), without a worker that
        reads for the others, and without communication: either would be lost with a worker.
        """
        accelerator = self._accelerator
        return prepare_data_loader(
            self.loader if size == 1 else self._in_one_order(),
            accelerator.device,
            num_processes=size,
            process_index=rank,
            put_on_device=self._place,
            rng_types=None,
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler and size == 1,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
        )

    def _in_one_order(self) -> DataLoader[Any]:
        """Whatever a sampler draws, the same on all workers. UsageError for a dataset without a length: the samples
        that pad the last batches could not be distinguished from the others.
        """
        loader = self.loader
        if isinstance(loader.dataset, IterableDataset):
            if hasattr(loader.dataset, "__len__"):
                return loader
            raise UsageError(
                "an evaluation loader over an IterableDataset without a length cannot be shared out exactly; iterate "
                "it outside accelerator.repeat, where each worker reads all of it"
            )
        if has_own_batches(loader):
            return loader
        order = Source(loader, self._accelerator.seed).epoch(0)
        batches: Any = BatchSampler(order, loader.batch_size or 1, loader.drop_last)
        return like(loader, loader.dataset, batches, loader.collate_fn, torch.Generator())
