"""Loaders of a Trainer's own making."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset


def without_sharding(loader: Any) -> Any:
    """As it was before `accelerator.prepare`, with which `get_train_dataloader` and its like usually end."""
    found = getattr(loader, "base_dataloader", loader)
    batches = getattr(found, "batch_sampler", None)
    if found is loader or type(batches) is not BatchSampler or isinstance(found.dataset, IterableDataset):
        return found
    more = {"prefetch_factor": found.prefetch_factor} if found.num_workers else {}
    return DataLoader(
        found.dataset,
        batch_size=batches.batch_size,
        sampler=batches.sampler,
        drop_last=batches.drop_last,
        num_workers=found.num_workers,
        collate_fn=found.collate_fn,
        pin_memory=found.pin_memory,
        timeout=found.timeout,
        worker_init_fn=found.worker_init_fn,
        multiprocessing_context=found.multiprocessing_context,
        **more,
    )
