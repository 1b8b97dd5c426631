"""Ray's classes for Lightning: its strategy is ElasticStrategy, and the others are refused."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray.train.torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from elastic_runtime.errors import UsageError
from elastic_runtime.integrations.lightning import ElasticStrategy
from elastic_runtime.integrations.ray.unmodified.driver import SEE
from elastic_runtime.integrations.ray.unmodified.loaders import EpochOrder, LoaderSource
from elastic_runtime.integrations.ray.unmodified.names import driver

if TYPE_CHECKING:
    import torch


class RayDDPStrategy(ElasticStrategy):
    """Takes what DistributedDataParallel's strategy takes, none of which has an effect on an elastic job."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        driver().follow(self.job)

    @property
    def root_device(self) -> torch.device:
        """The device that Ray has given to this worker."""
        device: torch.device = ray.train.torch.get_device()
        return device

    def process_dataloader(self, dataloader: object) -> object:
        """Prepare the training's loader: with the batch of the least number of workers, in DistributedSampler's order.

        Lightning shuffles with that sampler in training, whether the loader does or not.
        """
        trainer = self._trainer
        trains = trainer is not None and trainer.training and not trainer.sanity_checking
        if not (trains and isinstance(dataloader, DataLoader) and dataloader.batch_size):
            return super().process_dataloader(dataloader)
        size = dataloader.batch_size
        self.job.settle_batch(global_batch_size=driver().options.kept(size), max_batch_per_gpu=size)
        if isinstance(dataloader.sampler, SequentialSampler | RandomSampler):
            source = LoaderSource(dataloader, driver())
            seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
            return super().process_dataloader(source.over(EpochOrder(len(source.order), shuffle=True, seed=seed)))
        return super().process_dataloader(dataloader)


class _Refused:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            f"{type(self).__name__} shards for a fixed group; use RayDDPStrategy(), or, for a model that exceeds one "
            f"GPU, job.prepare(..., shard=fully_shard) of elastic_runtime (see docs/guides/sharded.md; {SEE})"
        )


class RayFSDPStrategy(_Refused):
    """Refused."""


class RayDeepSpeedStrategy(_Refused):
    """Refused."""
