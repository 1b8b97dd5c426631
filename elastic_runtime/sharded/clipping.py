"""Clipping gradients that lie in shards, by the norm of all of them.

torch.nn.utils.clip_grad_norm_ takes DTensors, but talks to the others by torch's own functional collectives: where a
peer dies in the middle of one, it ends the script, or waits for half an hour. Here one number of each rank is gathered
over the generation's group, which notices a loss and can be recovered from.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from elastic_runtime.errors import UsageError

if TYPE_CHECKING:
    from elastic_runtime.membership.process_group import Group
    from elastic_runtime.reduction.step_modes import Clipping


def clip_shards_(group: Group, gradients: list[torch.Tensor], clipping: Clipping) -> torch.Tensor:
    """As torch.nn.utils.clip_grad_norm_, with a plain tensor as the norm, the same on all ranks.

    CollectiveError where a peer is lost; no gradient was changed then. UsageError for what is no norm of shards.
    """
    if not clipping.norm_type > 0:
        raise UsageError(f"job.clip_grad_norm_ got norm_type={clipping.norm_type:g}; with shard= it must be above 0")
    shards = [_shard_of(gradient) for gradient in gradients]
    total = _total_norm(group, shards, clipping)
    if clipping.error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {clipping.norm_type:g} of the gradients is {total.item()}, so they cannot be "
            "clipped; error_if_nonfinite=False scales them by it nevertheless"
        )
    if shards:
        torch._foreach_mul_(shards, (clipping.max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


def _shard_of(gradient: torch.Tensor) -> torch.Tensor:
    if not isinstance(gradient, DTensor):
        raise UsageError(
            f"job.clip_grad_norm_ got a gradient of shape {tuple(gradient.shape)} that is not sharded; with shard= it "
            "takes parameters of the model"
        )
    local: torch.Tensor = gradient.to_local()
    return local


def _total_norm(group: Group, shards: list[torch.Tensor], clipping: Clipping) -> torch.Tensor:
    """The norm of the ranks' norms. They travel in one type: a rank's shards may all be empty."""
    filled = [shard for shard in shards if shard.numel()]
    own = torch.nn.utils.get_total_norm(filled, clipping.norm_type, foreach=clipping.foreach)
    device = shards[0].device if shards else own.device
    norms = group.all_gather(own.to(device, torch.float64))
    dtype = reduce(torch.promote_types, (shard.dtype for shard in shards)) if shards else torch.float32
    total: torch.Tensor = torch.linalg.vector_norm(norms, clipping.norm_type).to(dtype)
    return total
