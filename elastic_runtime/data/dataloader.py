"""The DataLoader inside a prepared one: the user's dataset, collation, processes and pinning, over planned batches."""

from __future__ import annotations

import multiprocessing
import os
import threading
from functools import partial
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.process import BaseProcess

    import torch

T = TypeVar("T")


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
    """Initialize a loader process as the script does, and have it exit with its worker.

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
