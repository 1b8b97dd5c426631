"""The objects that `prepare` refuses, because they would give wrong results on several workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import UninitializedParameter

from elastic_runtime.errors import UsageError
from elastic_runtime.state.sparse_parameters import sparse_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable

DISTRIBUTING = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def check_default_device() -> None:
    """Raise UsageError if tensors are made on another device than the CPU by default, which are the runtime's, too."""
    device = torch.get_default_device()
    if device.type != "cpu":
        raise UsageError(
            f"torch.set_default_device({str(device)!r}) is set, and would move the order of the samples and what "
            "workers send to each other there as well; call torch.set_default_device('cpu') before prepare, and move "
            f"the model and the batches: model.to({str(device)!r}), x.to({str(device)!r})"
        )


def check_kinds(models: list[Any], optimizers: list[Any]) -> None:
    """UsageError for what is no model or no optimizer, or cannot be repeated."""
    if not models or not all(isinstance(model, torch.nn.Module) for model in models):
        raise UsageError("prepare takes (model, optimizer, loader[, scheduler]), in this order")
    if not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers):
        raise UsageError("prepare takes (model, optimizer, loader[, scheduler]), in this order")
    for optimizer in optimizers:
        if not _is_initialized(optimizer):
            raise UsageError(
                f"{type(optimizer).__name__} has not called __init__ of torch.optim.Optimizer, so that its state could "
                "neither be saved nor sent to a worker that joins; call super().__init__(parameters, defaults) in it, "
                "or give prepare the optimizer that it wraps"
            )
    for part in (part for model in models for part in model.modules()):
        _check_plain(part)
    if any(isinstance(each, UninitializedParameter) for model in models for each in model.parameters()):
        raise UsageError(
            "the model has layers whose shapes are undetermined (LazyLinear and the like), of which no gradient could "
            "be summed and no optimizer made; compute one batch with it before prepare"
        )


def check_stateful(what: str, objects: Iterable[object]) -> None:
    """UsageError for what cannot be carried to other workers and in checkpoints."""
    for each in objects:
        if not all(callable(getattr(each, name, None)) for name in ("state_dict", "load_state_dict")):
            raise UsageError(
                f"{type(each).__name__}, a {what}, lacks state_dict and load_state_dict, so that it would begin again "
                "on a worker that joins or resumes; give it both methods (in a subclass: their content is what changes "
                "in vars(self)), or set what it sets as a function of job.step in each iteration"
            )


def _is_initialized(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it has what is read of it. One that wraps another may have a state_dict of its own."""
    own = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
    needed = ("param_groups", "state", "defaults", *(() if own else ("_optimizer_state_dict_pre_hooks",)))
    return all(hasattr(optimizer, name) for name in needed)


def check_synchronized(models: list[Any], *, exact: bool, sharded: bool) -> None:
    """UsageError for SyncBatchNorm layers where the workers do not compute a step together."""
    if not any(isinstance(part, torch.nn.SyncBatchNorm) for model in models for part in model.modules()):
        return
    if exact or sharded:
        raise UsageError(
            "the model has SyncBatchNorm layers, which are not supported with "
            + ("shard=" if sharded else "reduction='exact'")
            + "; use BatchNorm, whose buffers follow rank 0, or a normalization without batch statistics"
        )


def _check_plain(part: torch.nn.Module) -> None:
    """UsageError for what sums gradients up by itself. By name: importing FSDP costs a second, and Fabric need not be
    there.
    """
    if type(part).__name__ == "_FabricModule":
        raise UsageError(
            "the model was wrapped by Lightning Fabric's setup, which sums gradients over workers by itself; make an "
            "ElasticFabric (elastic_runtime.integrations.lightning) in place of the Fabric, or give prepare the plain "
            "model, optimizer and loader, and call job.backward in place of fabric.backward"
        )
    for kind in type(part).__mro__:
        if kind.__name__ in DISTRIBUTING and kind.__module__.startswith("torch."):
            raise UsageError(
                f"the model is wrapped by {kind.__name__}, which sums gradients over workers by itself; give prepare "
                "the plain model, which job.backward sums for (in shards by FSDP2, if need be: shard=)"
            )


def check_embeddings(model: torch.nn.Module) -> None:
    """UsageError for embeddings whose rows or gradients depend on which samples one worker has together."""
    for name, part in model.named_modules():
        if not isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue
        where = name or type(part).__name__
        if part.max_norm is not None:
            raise UsageError(
                f"{where} has max_norm, which changes rows of its weight in the forward pass: "
                "those of this worker's samples only; leave max_norm out, and after optimizer.step(), under `if "
                "job.applied:`, call, within torch.no_grad(), weight.copy_(weight.renorm(2, 0, max_norm))"
            )
        if part.scale_grad_by_freq:
            raise UsageError(
                f"{where} has scale_grad_by_freq, which divides the gradient of a row by its number among this "
                "worker's samples, and not among those of the global batch; leave scale_grad_by_freq out"
            )


def check_sparse(
    model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], *, exact: bool, sharded: bool, measured: bool
) -> None:
    """UsageError for sparse gradients if they cannot be summed, or an optimizer keeps a sparse state of them.

    `measured`: the noise of the gradients is estimated, for which rows are not added up.
    """
    sparse = sparse_parameters(model)
    if sparse and measured:
        raise UsageError(
            "the model has an embedding with sparse=True, whose gradients noise_scale=True and scale_lr='adascale' "
            "do not measure; leave sparse=True or that option out"
        )
    if sparse and (exact or sharded):
        raise UsageError(
            "the model has an embedding with sparse=True, whose gradients are summed with reduction='fast' only, "
            f"without shard=; leave sparse=True out{', or use the fast reduction' if exact and not sharded else ''}"
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and sparse.intersection(group["params"]):
                raise UsageError(
                    "SGD with momentum keeps the momentum of an embedding with sparse=True as a sparse tensor, which "
                    "no joining worker could be sent; use SparseAdam, Adagrad or momentum=0 for it, or leave "
                    "sparse=True out"
                )


def check_parameters(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """UsageError for what would be trained by each worker for itself."""
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in own:
                    raise UsageError(
                        f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} in its group "
                        f"{number} that is none of the model's, so that its gradient would not be summed; give "
                        "prepare all modules that have parameters, as a list: prepare([model, criterion], ...)"
                    )
