"""torch.nn.SyncBatchNorm over the samples of all workers in a step, on CPUs too.

Mean and variance of each worker's share are gathered, with gradients, like rows of `job.gather_batch`, and combined by
their numbers of values. So a loss of a worker in a forward pass is noticed in the backward pass, and the iteration is
repeated. torch's own implementation was rejected: its collectives cannot be repeated, and its kernels are for GPUs.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from elastic_runtime.torch_internals.modules import batch_norm

if TYPE_CHECKING:
    from collections.abc import Iterable


class Gatherer(Protocol):
    """The training that the layers belong to."""

    def gather_statistics(self, row: torch.Tensor) -> torch.Tensor | None:
        """Return one row of each worker, of shape (workers, values); None where this worker's own are all there are.

        `row`: shape (1, values), of which the last one is a weight.
        """


_gatherers: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Gatherer]] = weakref.WeakKeyDictionary()
"""By layer. Not an attribute of the layer: copies (averaged weights) do not take part."""


class SyncedBatchNorm(torch.nn.SyncBatchNorm):
    """A SyncBatchNorm layer of a training; elsewhere (evaluation, copies) a BatchNorm."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (torch's own signature)
        """Normalize by the statistics of the global batch. Shape: (samples, channels, ...)."""
        gatherer = held() if (held := _gatherers.get(self)) is not None else None
        if not self.training or gatherer is None:
            return batch_norm(self, input)
        values = input if input.dtype == torch.float64 else input.float()
        others = [dimension for dimension in range(values.dim()) if dimension != 1]
        variance, mean = torch.var_mean(values, others, correction=0)
        weight = mean.new_full((1,), values.numel() / len(mean))
        rows = gatherer.gather_statistics(torch.cat([mean, variance, weight])[None])
        if rows is None:
            return batch_norm(self, input)
        mean, variance, number = combine(rows)
        self._follow(mean.detach(), variance.detach(), number)
        shape = [1, -1] + [1] * (values.dim() - 2)
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        found = (values - mean.view(shape)) * scale.view(shape)
        found = found if self.bias is None else found + self.bias.view(shape)
        return found.to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: torch.Tensor, variance: torch.Tensor, number: float) -> None:
        """Move the running statistics; the variance is the unbiased one there, as in torch."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (number / max(number - 1, 1.0))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.lerp_(value.to(running.dtype), factor)


def combine(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return (mean, variance, number of values) of several groups of values, from theirs. Shape: (groups, 2 C + 1)."""
    channels = rows.shape[1] // 2
    means, variances, numbers = rows.split([channels, channels, 1], dim=1)  # type: ignore[no-untyped-call]
    total = numbers.detach().sum().clamp(min=1.0)
    mean = (means * numbers).sum(0) / total
    variance = ((variances + (means - mean).square()) * numbers).sum(0) / total
    return mean, variance, float(total)


def synchronize(models: Iterable[torch.nn.Module], gatherer: Gatherer) -> None:
    """Make the SyncBatchNorm layers of `models` take part in the training."""
    for layer in (part for model in models for part in model.modules()):
        if type(layer) in {torch.nn.SyncBatchNorm, SyncedBatchNorm}:
            layer.__class__ = SyncedBatchNorm
            _gatherers[layer] = weakref.ref(gatherer)


def release(models: Iterable[torch.nn.Module]) -> None:
    """Return the layers to the script."""
    for layer in (part for model in models for part in model.modules()):
        if type(layer) is SyncedBatchNorm:
            object.__setattr__(layer, "__class__", torch.nn.SyncBatchNorm)
            _gatherers.pop(layer, None)
