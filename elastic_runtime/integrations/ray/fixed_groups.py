"""Refuses, in an elastic worker, what a loop for TorchTrainer does with its group of a fixed size.

Such a loop would fail in torch ("Default process group has not been initialized"), or each worker would train a whole
epoch alone before its first report. Here the first such call says which line to write instead.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic_runtime.errors import UsageError
from elastic_runtime.integrations.ray.ray_internals import TagKey, train_loop_utils
from elastic_runtime.loop.job import current_job

if TYPE_CHECKING:
    from collections.abc import Callable

PREPARE = (
    "job = elastic_runtime.init(), then model, optimizer, loader = job.prepare(model, optimizer, loader), which moves "
    "the model to its device and shares the loader out"
)
BACKWARD = "job.backward(loss)"
TAGS = {
    TagKey.TRAIN_TORCH_PREPARE_MODEL: "ray.train.torch.prepare_model",
    TagKey.TRAIN_TORCH_PREPARE_DATALOADER: "ray.train.torch.prepare_data_loader",
}
"""Functions by what Ray counts them as, which is their first act. They may have been imported by name before."""
_OTHER_LOOPS = (
    "for Hugging Face's Trainer use elastic_runtime.integrations.transformers, for Accelerate "
    "elastic_runtime.integrations.accelerate, for Lightning elastic_runtime.integrations.lightning"
)
_SEE = "see docs/guides/ray_train.md, or use TorchTrainer"


def refuse_fixed_groups() -> None:
    """From now on such calls raise UsageError in this process, which is an elastic worker."""
    train_loop_utils.record_extra_usage_tag = _refuse_by_tag
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    parallel.__init__ = functools.partialmethod(_refuse_method, "DistributedDataParallel", PREPARE)
    distributed: Any = torch.distributed
    distributed.init_process_group = _before_the_job(distributed.init_process_group)
    register_optimizer_step_pre_hook(_refuse_training_alone)


def _refuse(name: str, instead: str, *_: object, **__: object) -> None:
    raise UsageError(
        f"{name} needs a group of a fixed size, and that of ElasticTorchTrainer changes; write: {instead} ({_SEE})"
    )


def _refuse_by_tag(tag: Any, *_: object) -> None:
    if tag in TAGS:
        _refuse(TAGS[tag], PREPARE)


def _refuse_method(_self: object, name: str, instead: str, *_: object, **__: object) -> None:
    _refuse(name, instead)


def _before_the_job(init_process_group: Callable[..., None]) -> Callable[..., None]:
    """Return the function, which refuses a caller other than the job itself."""

    @functools.wraps(init_process_group)
    def checked(*args: Any, **options: Any) -> None:
        if current_job() is None:
            _refuse("torch.distributed.init_process_group", f"{PREPARE}; {_OTHER_LOOPS}")
        init_process_group(*args, **options)

    return checked


def _refuse_training_alone(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if current_job() is None:
        raise UsageError(
            f"{type(optimizer).__name__}.step() before elastic_runtime.init(): each worker would train alone; write: "
            f"{PREPARE}; iterate over job.epochs(N), and call {BACKWARD} in place of loss.backward(); {_OTHER_LOOPS} "
            f"({_SEE})"
        )
