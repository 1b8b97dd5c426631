"""The names of Ray Train and torch that are replaced in a worker's process, before the loop runs. All are here.

Ray Train has extension points for the group of workers (`Backend`) and for what is reported (`UserCallback`), none for
what a loop prepares. Replaced are the functions themselves, not the names in their modules: a loop may have imported
them by name before. A process that calls `replace_names` is an elastic worker to its end.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import ray.train.torch
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from elastic_runtime.errors import UsageError
from elastic_runtime.integrations.ray.unmodified.driver import SEE, LoopDriver, refuse_accumulation
from elastic_runtime.integrations.ray.unmodified.libraries import adapt_libraries
from elastic_runtime.integrations.ray.unmodified.loaders import (
    LoaderSource,
    PreparedLoader,
    check_sampler,
    iterate,
)
from elastic_runtime.loop.trainings_of_process import current_job

if TYPE_CHECKING:
    from collections.abc import Callable

_drivers: list[LoopDriver] = []


def driver() -> LoopDriver:
    """Return the driver of this process's loop."""
    return _drivers[-1]


def replace_names(of: LoopDriver) -> None:
    """From now on the functions work for this driver."""
    first = not _drivers
    _drivers.append(of)
    if not first:
        return
    ray.train.torch.prepare_model.__code__ = _prepare_model.__code__
    ray.train.torch.prepare_data_loader.__code__ = _prepare_data_loader.__code__
    _replace_parallel(torch.nn.parallel.DistributedDataParallel)
    torch.Tensor.backward = _backward_of(torch.Tensor.backward)  # type: ignore[method-assign]
    DataLoader.__iter__ = _iter_of(DataLoader.__iter__)  # type: ignore[method-assign]
    torch.distributed.init_process_group = _refuse_second_group
    register_optimizer_step_pre_hook(_refuse_training_alone)
    adapt_libraries()


def _prepare_model(model, move_to_device=True, parallel_strategy="ddp", parallel_strategy_kwargs=None):  # type: ignore[no-untyped-def]  # noqa: FBT002
    # Its code runs as that of Ray's function, whose globals are others.
    from elastic_runtime.integrations.ray.unmodified.names import prepare_model  # noqa: PLC0415

    return prepare_model(model, move_to_device, parallel_strategy, parallel_strategy_kwargs)


def _prepare_data_loader(data_loader, add_dist_sampler=True, move_to_device=True, auto_transfer=True):  # type: ignore[no-untyped-def]  # noqa: FBT002, ARG001
    from elastic_runtime.integrations.ray.unmodified.names import prepare_data_loader  # noqa: PLC0415

    return prepare_data_loader(data_loader, add_dist_sampler, move_to_device)


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool | torch.device,  # noqa: FBT001  (Ray's own signature)
    parallel_strategy: str | None,
    parallel_strategy_kwargs: dict[str, Any] | None,
) -> torch.nn.Module:
    """As Ray Train's: on the device, and wrapped as DistributedDataParallel wraps it, at every size."""
    if parallel_strategy == "fsdp":
        raise UsageError(
            "prepare_model(parallel_strategy='fsdp') shards for a fixed group; write: job = elastic_runtime.init(), "
            f"job.prepare(model, optimizer, loader, shard=fully_shard) (see docs/guides/sharded.md; {SEE})"
        )
    device = move_to_device if isinstance(move_to_device, torch.device) else ray.train.torch.get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    placed = model.to(device) if move_to_device else model
    if parallel_strategy is None:
        return placed
    return torch.nn.parallel.DistributedDataParallel(placed, **(parallel_strategy_kwargs or {}))


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool,  # noqa: FBT001  (Ray's own signature)
    move_to_device: bool,  # noqa: FBT001
) -> DataLoader[Any]:
    """As Ray Train's: shared out, with batches on the device."""
    check_sampler(data_loader, add_dist_sampler=add_dist_sampler)
    device = ray.train.torch.get_device() if move_to_device else None
    return PreparedLoader(data_loader, driver(), device)


def _replace_parallel(parallel: Any) -> None:
    """Let DistributedDataParallel hold its module, and leave the gradients to the job."""

    def construct(self: Any, module: torch.nn.Module, *_: Any, **__: Any) -> None:
        torch.nn.Module.__init__(self)
        self.module = module
        driver().models.append(module)

    def no_sync(_self: Any) -> None:
        refuse_accumulation("DistributedDataParallel.no_sync()")

    def hook(_self: Any, *_: Any, **__: Any) -> None:
        raise UsageError(
            "DistributedDataParallel.register_comm_hook is not called: the job sums gradients up; leave it out, and "
            f"for gradients of half precision use autocast ({SEE})"
        )

    parallel.__init__, parallel.no_sync, parallel.register_comm_hook = construct, no_sync, hook
    parallel.forward = lambda self, *inputs, **named: self.module(*inputs, **named)
    parallel.join = lambda *_, **__: contextlib.nullcontext()
    parallel._set_static_graph = lambda _self: None  # noqa: SLF001
    parallel.train = torch.nn.Module.train
    for name in ("__getstate__", "__setstate__"):
        if name in vars(parallel):
            delattr(parallel, name)


def _backward_of(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def of_step(
        self: torch.Tensor,
        gradient: Any = None,
        retain_graph: bool | None = None,  # noqa: FBT001  (torch's own signature)
        create_graph: bool = False,  # noqa: FBT001, FBT002
        inputs: Any = None,
    ) -> Any:
        options = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
        if gradient is None and driver().backward(self, **options):
            return None
        return backward(self, gradient, **options)

    return of_step


def _iter_of(iterate_plainly: Callable[..., Any]) -> Callable[..., Any]:
    """A loader with a DistributedSampler is one that the loop shares out by hand."""

    @functools.wraps(iterate_plainly)
    def shared(self: DataLoader[Any]) -> Any:
        if type(getattr(self, "sampler", None)) is DistributedSampler and driver().models:
            return iterate(LoaderSource(self, driver()), driver(), None)
        return iterate_plainly(self)

    return shared


def _refuse_second_group(*_: Any, **__: Any) -> None:
    raise UsageError(
        "torch.distributed.init_process_group() is called, but the default process group is there, as in TorchTrainer; "
        f"leave it out ({SEE})"
    )


def _refuse_training_alone(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if current_job() is None:
        driver().refuse_step(type(optimizer).__name__)
