"""Which of Accelerate's settings go together with an elastic job, and how Accelerate is set up for one process."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import SettingsError, UsageError
from elastic_runtime.membership.environment import Environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
DISTRIBUTING = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "parallelism_config",
    "torch_tp_plugin",
)
SWITCHES = (
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)
REFUSED = (
    ("dataloader_config", "use_stateful_dataloader", True, "the place in the data is the job's, in its checkpoints"),
    ("dataloader_config", "dispatch_batches", True, "no worker reads for the others: it may be lost"),
    ("gradient_accumulation_plugin", "sync_with_dataloader", False, "the last step of an epoch ends with it"),
    ("gradient_accumulation_plugin", "sync_each_batch", True, "gradients are summed once a step"),
)
"""(argument of Accelerator, its attribute, the value that is not supported, why)"""


@contextmanager
def as_one_process(*, cpu: bool) -> Iterator[None]:
    """Accelerate sees no launcher, so that it neither makes a process group nor wraps models: the ranks are the job's.

    Where torchrun started several processes on a node with GPUs, each takes the one of its LOCAL_RANK, unless the `cpu`
    was asked for.
    """
    environment = Environment.read()
    if environment.static is None and not environment.coordinator:
        yield
        return
    hidden = {name: os.environ.pop(name) for name in LAUNCHER if name in os.environ}
    named = cpu or "ACCELERATE_TORCH_DEVICE" in os.environ
    shown = not named and "LOCAL_RANK" in hidden and torch.cuda.is_available()
    if shown:
        index = int(hidden["LOCAL_RANK"]) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        os.environ["ACCELERATE_TORCH_DEVICE"] = f"cuda:{index}"
    try:
        yield
    finally:
        os.environ.update(hidden)
        if shown:
            del os.environ["ACCELERATE_TORCH_DEVICE"]


def check_arguments(given: Mapping[str, Any], variables: Mapping[str, str]) -> None:
    """SettingsError for what brings a way of distributing of its own, or a place in the data of its own."""
    asked = [name for name in DISTRIBUTING if given.get(name) is not None]
    asked += [name for name in SWITCHES if variables.get(name, "").lower() == "true"]
    if asked:
        raise SettingsError(
            f"{asked[0]} is set, but ElasticAccelerator distributes by itself; leave it out (for a model that one GPU "
            "does not hold, use elastic_runtime directly: job.prepare(..., shard=...))"
        )
    precision = given.get("mixed_precision") or variables.get("ACCELERATE_MIXED_PRECISION")
    if str(precision) == "fp8":
        raise SettingsError("mixed_precision is 'fp8', which ElasticAccelerator has not been tried with; use 'bf16'")
    for owner, name, bad, instead in REFUSED:
        if getattr(given.get(owner), name, not bad) is bad:
            raise SettingsError(f"{name} is {bad}, but {instead}; leave it out")


def check_more(given: Mapping[str, Any]) -> None:
    """UsageError for keywords of `backward` that ask for a second pass, or for something else that cannot be."""
    if given:
        raise UsageError(
            f"accelerator.backward got {', '.join(given)}; an iteration has one backward pass, over the sum of its "
            "losses, with weight= or reduction= as for job.backward"
        )
