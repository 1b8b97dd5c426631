"""The steps of a sharded job: FSDP sums the gradients, one small sum more carries what the workers have to agree on.

FSDP divides by the number of ranks; here it does not, because each micro-batch's loss is scaled to its part of the
global batch. It communicates in each forward pass, so all ranks need the same number of iterations in a step
(`batches.lockstep_batches`). Between the micro-batches of a step FSDP keeps the sums on the unsharded parameters.

Gradients that lie in shards are clipped by the norm of all of them.
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
from elastic_runtime.reduction.gradients import GradientReducer
from elastic_runtime.reduction.step_modes import Mode
from elastic_runtime.state.kept_gradients import with_gradient
from elastic_runtime.validation.leftover_gradients import uncleared

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_runtime.membership.process_group import Group
    from elastic_runtime.plan.batches import MicroBatch
    from elastic_runtime.reduction.backward_pass import Pass
    from elastic_runtime.reduction.buffers import FollowedBuffers
    from elastic_runtime.reduction.step_metadata import Share
    from elastic_runtime.reduction.step_modes import Clipping
    from elastic_runtime.sharded.sharding import Sharding
    from elastic_runtime.state.random_streams import RandomStreams

    TotalNorm = Callable[[Group, list[torch.Tensor], Clipping], torch.Tensor]


def norm_of_shards(group: Group, gradients: list[torch.Tensor], clipping: Clipping) -> torch.Tensor:
    """Return the norm of the ranks' norms. They travel in one type: a rank's shards may all be empty."""
    shards = [_shard_of(gradient) for gradient in gradients]
    filled = [shard for shard in shards if shard.numel()]
    own = torch.nn.utils.get_total_norm(filled, clipping.norm_type, foreach=clipping.foreach)
    device = shards[0].device if shards else own.device
    norms = group.all_gather(own.to(device, torch.float64))
    dtype = reduce(torch.promote_types, (shard.dtype for shard in shards)) if shards else torch.float32
    total: torch.Tensor = torch.linalg.vector_norm(norms, clipping.norm_type).to(dtype)
    return total


def clip_shards_(
    group: Group, gradients: list[torch.Tensor], clipping: Clipping, total_norm: TotalNorm = norm_of_shards
) -> torch.Tensor:
    """As torch.nn.utils.clip_grad_norm_, with a plain tensor as the norm, the same on all ranks. `total_norm(group,
    gradients, clipping)` returns that.

    CollectiveError where a peer is lost; no gradient was changed then. UsageError for what is no norm of shards.
    """
    if not clipping.norm_type > 0:
        raise UsageError(f"job.clip_grad_norm_ got norm_type={clipping.norm_type:g}; with shard= it must be above 0")
    shards = [_shard_of(gradient) for gradient in gradients]
    total = total_norm(group, gradients, clipping)
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


_OWN = 2


class ShardedReducer(GradientReducer):
    """FSDP sums the gradients by its own hooks; this sums the metadata. Strays are not noticed."""

    in_flight = True  # FSDP communicates from the first forward pass on
    in_each_pass = False  # gradients are exchanged

    def __init__(self, sharding: Sharding, metadata_size: int) -> None:
        super().__init__()
        self._sharding = sharding
        self._whole_metadata = torch.zeros(metadata_size + _OWN, device=sharding.device)
        self.own = self._whole_metadata[-_OWN:]
        self._kept: frozenset[str] = frozenset()

    @property
    def metadata(self) -> torch.Tensor:
        """The caller's numbers. Shape: (metadata_size,)."""
        return self._whole_metadata[:-_OWN]

    @property
    def kept(self) -> frozenset[str]:
        """The names of the parameters that had a gradient of zeros when the step began."""
        return self._kept

    def begin_pass(self, group: Group | None, begun: Pass) -> None:  # noqa: ARG002
        """Make FSDP reduce the gradients after the last micro-batch only, unless it does `in_each_pass`. LoopError for
        those of an earlier step.
        """
        self.current = begun
        if begun.first:
            parameters = self._sharding.wrapping.parameters().items()
            if found := self._leftovers.look(parameters):
                raise uncleared(min(found))
            self._kept = with_gradient(parameters)
        reduces = begun.micro.last or self.in_each_pass
        for module in self._sharding.wrapping.modules:
            module.set_requires_gradient_sync(reduces, recurse=False)
            module.set_is_last_backward(reduces)

    def end_pass(self) -> None:
        """Raise CollectiveError if one of FSDP's collectives has failed since the step's beginning."""
        self._sharding.link.check()

    def reduce(self) -> None:
        """Sum the metadata over the workers, once the copies of their shards are whole."""
        self._sharding.end_step()
        group = self._sharding.link.group
        if group.size > 1:
            group.wait([group.all_reduce(self._whole_metadata)])

    def distribute(self, factor: float) -> None:
        """Multiply the gradients, which FSDP has summed, by `factor`."""
        if factor != 1.0:
            torch._foreach_mul_(self._gradients(), factor)

    def abandon(self) -> None:
        """Drop the gradients; FSDP's own buffers are dropped with its wrapping."""
        for parameter in self._sharding.wrapping.parameters().values():
            parameter.grad = None

    def _gradients(self) -> list[torch.Tensor]:
        found = [parameter.grad for parameter in self._sharding.wrapping.parameters().values()]
        return [gradient.to_local() for gradient in found if isinstance(gradient, DTensor)]


class ShardedMode(Mode):
    """Checkpoints and preemption are agreed on in the same sum as a switch: no worker can save alone."""

    name = "sharded"
    lockstep = True
    _reducer_type = ShardedReducer
    _total_norm = staticmethod(norm_of_shards)

    def __init__(self, sharding: Sharding, buffers: FollowedBuffers, streams: RandomStreams) -> None:
        self._sharding = sharding
        super().__init__(buffers, streams, self._make_reducer)

    def _make_reducer(self, metadata_size: int) -> ShardedReducer:
        self._reducer = self._reducer_type(self._sharding, metadata_size)
        return self._reducer

    def begin_micro_batch(self, micro: MicroBatch, step: int, *, first: bool) -> None:
        """Begin a micro-batch; with a step's first one another worker gets a copy of this worker's shards."""
        super().begin_micro_batch(micro, step, first=first)
        if first:
            self._sharding.begin_step(self._streams.saved)

    def fill_metadata(self, share: Share, *, leader: bool, alone: bool = False) -> None:
        """Write this worker's numbers, and whether it wants a checkpoint or was asked to leave."""
        super().fill_metadata(share, leader=leader, alone=alone)
        save = self._sharding.saves.due() if leader else 0
        self._reducer.own.copy_(torch.tensor([save, self._sharding.is_preempted()], dtype=torch.float32))

    def read_metadata(self, micro: MicroBatch, *, leader: bool, workers: int, group: Group | None = None) -> bool:
        """Read the sums, and agree on a checkpoint or the end."""
        save, preempted = self._reducer.own.tolist()
        self._sharding.saves.agreed(save=int(save), preempted=preempted > 0)
        return super().read_metadata(micro, leader=leader, workers=workers, group=group)

    def clip_grad_norm_(self, parameters: list[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Clip by the norm over all shards. CollectiveError if a peer is lost."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return clip_shards_(self._sharding.link.group.shards, gradients, clipping, self._total_norm)
