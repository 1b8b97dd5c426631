"""Gradients in shards that are the same to the bit whatever the number of workers: along the tree of `sum_tree`.

In each iteration a rank computes one shard of the step, and the ranks of an iteration follow one another in the tree.
FSDP's own reduce-scatter would add up an iteration's gradients in an order that depends on the number of ranks, and one
iteration's to those before. Here each rank receives its part of every rank's gradients instead, by FSDP's hook for the
collective, and pushes them in the order of the tree when FSDP has set the parameter's gradient, by torch's hook for
that. A rank so holds partial sums of its own part only: at most log2(shards) + 1 of them, and the parts of the
parameters of one `fully_shard` that are received.

Rejected: sums on the unsharded parameters as `reduction.exact` makes them, and one exchange in a step. They move less,
and hold the gradients of the whole model on each worker, which `shard=` is there to avoid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.distributed.tensor import DTensor

from elastic_runtime.errors import LoopError, SettingsError
from elastic_runtime.reduction.step_modes import ExactParts, check_cublas
from elastic_runtime.reduction.sum_tree import Push, range_plan
from elastic_runtime.sharded.mode import ShardedMode, ShardedReducer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_runtime.membership.process_group import Group
    from elastic_runtime.reduction.backward_pass import Pass
    from elastic_runtime.reduction.buffers import FollowedBuffers
    from elastic_runtime.reduction.step_modes import Clipping
    from elastic_runtime.sharded.collectives import Link
    from elastic_runtime.sharded.sharding import Sharding
    from elastic_runtime.state.random_streams import RandomStreams

ELEMENTWISE: Final = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""torch's optimizers that compute each element of a parameter from this element only."""


class PartialSums:
    """The partial sums of one parameter's shard; None stands for a sum of nothing."""

    def __init__(self) -> None:
        self.leaves = 0  # pushed so far
        self._rows: list[torch.Tensor | None] = []

    def push(self, pushes: tuple[Push, ...], leaf: int, gradient: torch.Tensor | None) -> None:
        """Add a leaf's gradient, which is copied where it is kept. Leaves that were left out had none."""
        for missing in range(self.leaves, leaf):
            self._push(pushes[missing], None)
        self._push(pushes[leaf], gradient)
        self.leaves = leaf + 1

    def total(self, pushes: tuple[Push, ...]) -> torch.Tensor | None:
        """Return the sum of all leaves; None if none has a gradient."""
        for missing in range(self.leaves, len(pushes)):
            self._push(pushes[missing], None)
        (found,) = self._rows
        return found

    def _push(self, push: Push, gradient: torch.Tensor | None) -> None:
        rows = self._rows
        rows.append(gradient)
        for _ in push.merges:  # the last two, each
            right, left = rows.pop(), rows[-1]
            if left is None:
                rows[-1] = right
            elif right is not None:
                left.add_(right)
        if gradient is not None and rows[-1] is gradient:
            rows[-1] = gradient.clone()


class ExactShardedReducer(ShardedReducer):
    """Sums the gradients of each iteration along the tree, as they arrive."""

    in_each_pass = True

    def __init__(self, sharding: Sharding, metadata_size: int) -> None:
        super().__init__(sharding, metadata_size)
        self._sums: dict[int, tuple[torch.nn.Parameter, PartialSums]] = {}  # by id(parameter)
        self._attached = True
        sharding.exact, sharding.wrapping.on_gradient = True, self._collect

    def attach(self) -> None:
        """Take the gradients of backward passes from now on."""
        self._attached = True

    def release(self) -> None:
        """Leave the gradients where they are from now on."""
        self._attached = False

    def begin_pass(self, group: Group | None, begun: Pass) -> None:
        """Begin an iteration's pass; with the first one of a step, its sums."""
        super().begin_pass(group, begun)
        if begun.first:
            self._sums = {}

    def reduce(self) -> None:
        """Sum the metadata, and show the sums of the gradients."""
        super().reduce()
        pushes, found, self._sums = self._pushes(), self._sums, {}
        for parameter, sums in found.values():
            total = sums.total(pushes)
            parameter.grad = None if total is None else _like(parameter, total)

    def abandon(self) -> None:
        """Drop the step's gradients."""
        super().abandon()
        self._sums = {}

    def _pushes(self) -> tuple[Push, ...]:
        shards = self.current.micro.step_shards
        return range_plan(0, shards, shards).pushes

    def _collect(self, parameter: torch.nn.Parameter) -> None:
        """Take the gradient that FSDP has just set, and push what it consists of."""
        gradient = parameter.grad
        if not self._attached or not isinstance(gradient, DTensor):
            return
        parameter.grad = None
        link, micro = self._sharding.link, self.current.micro
        first = micro.shard - link.group.rank  # of this iteration's shards
        sums = self._sums.setdefault(id(parameter), (parameter, PartialSums()))[1]
        if sums.leaves > first:
            raise LoopError(
                "with reduction='exact' and shard= a parameter gets its gradient of a micro-batch at once, and one got "
                "it in parts: torch.utils.checkpoint needs use_reentrant=False"
            )
        pushes = self._pushes()
        for leaf, row in enumerate(_summands(link, gradient.to_local())[: len(pushes) - first], first):
            sums.push(pushes, leaf, row)


def _summands(link: Link, gradient: torch.Tensor) -> list[torch.Tensor]:
    """Return each rank's summand of this rank's part of a gradient; none after a collective has failed."""
    if link.group.size == 1:
        return [gradient]
    return link.received.of(gradient) if link.received else []


def _like(parameter: torch.Tensor, local: torch.Tensor) -> DTensor:
    """Return a gradient of a parameter, made of this rank's part of it."""
    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def norm_of_parameters(group: Group, gradients: list[torch.Tensor], clipping: Clipping) -> torch.Tensor:
    """Return the norm of the parameters' norms, as torch does for tensors that are not sharded: a sum over shards would
    depend on their number. Each worker collects one parameter's gradient after another.
    """
    if not gradients:
        return torch.tensor(0.0)
    norms = [torch.linalg.vector_norm(_whole(group, gradient), clipping.norm_type) for gradient in gradients]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), clipping.norm_type)
    return total


def _whole(group: Group, gradient: torch.Tensor) -> torch.Tensor:
    """Return all of a gradient. Dimension 0 may be divided unevenly, as torch.chunk does; others are not."""
    assert isinstance(gradient, DTensor)
    local, dim = gradient.to_local(), gradient.placements[-1].dim  # type: ignore[attr-defined]
    if group.size == 1:
        return local
    shape = list(gradient.shape)
    shape[dim] = -(-shape[dim] // group.size)
    padded = local.new_zeros(shape)
    padded.narrow(dim, 0, local.size(dim)).copy_(local)
    received = local.new_empty(group.size * padded.numel())
    group.all_gather_into(received, padded.view(-1))
    return torch.cat(received.view(group.size, *shape).unbind(), dim).narrow(dim, 0, gradient.size(dim))


class ExactShardedMode(ExactParts, ShardedMode):
    """The mode `exact` of sharded models. `seed`: the job's."""

    _reducer_type = ExactShardedReducer
    _total_norm = staticmethod(norm_of_parameters)
    remember = ShardedMode.remember  # with the streams, since copies of the state are stored in the middle of a step
    rewound = ShardedMode.rewound

    def __init__(self, sharding: Sharding, buffers: FollowedBuffers, streams: RandomStreams, seed: int) -> None:
        ShardedMode.__init__(self, sharding, buffers, streams)
        self._seed = seed
        check_cublas()


def check_elementwise(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise SettingsError for an optimizer whose steps may depend on how parameters are divided."""
    for optimizer in optimizers:
        kind = type(optimizer)
        if kind.__name__ not in ELEMENTWISE or getattr(torch.optim, kind.__name__, None) is not kind:
            raise SettingsError(
                f"reduction='exact' and shard= cannot be used with {kind.__name__}: what it does to one element of a "
                "parameter may depend on others, which other workers have at other sizes; use one of torch.optim's "
                f"{', '.join(sorted(ELEMENTWISE))}, or leave shard= out"
            )
        if any(group.get("fused") for group in optimizer.param_groups):
            raise SettingsError(
                f"reduction='exact' and shard= cannot be used with {kind.__name__}(fused=True), which rounds the last "
                "elements of a tensor in another way than the others; leave fused=True out"
            )
