"""Rows of all workers' shares of a step's global batch, through which gradients flow back to the worker of each row.

A contrastive loss compares each sample with all samples of the batch, which at more than one worker are elsewhere. The
forward pass gathers the rows, the backward pass sums what all workers have computed for each row where it came from.

Invariant: within an iteration no call raises because a peer was lost. Zeros take the place of what could not be
exchanged, and `check` raises before anything is summed, so that the iteration is repeated as a whole. Raising from the
forward pass was rejected: the script's own code is on the stack there, and would have to be entered again.

The exchanges are collectives of the group that sums the gradients, and all workers must start them in one order. So
buckets are held back until the last exchange of a backward pass is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import CollectiveError, UsageError
from elastic_runtime.plan.batches import split

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_runtime.loop.member import Member
    from elastic_runtime.membership.process_group import Group
    from elastic_runtime.plan.batch_sizes import MicroBatchLimit
    from elastic_runtime.plan.batches import MicroBatch
    from elastic_runtime.reduction.step_modes import Mode

_NARROW = (torch.float16, torch.bfloat16)
"""Exchanged as float32: not every library sums them."""
_EXCHANGED = frozenset({*_NARROW, torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8})


class RowGather:
    """The exchanges of one iteration's rows. `used`: an iteration of this training had one.

    `outstanding`: those of its forward passes that a backward pass has to answer.
    """

    def __init__(self, member: Member, mode: Mode, limit: MicroBatchLimit | None) -> None:
        self._member, self._mode, self._limit = member, mode, limit
        self.used = False
        self._failed: CollectiveError | None = None
        self.outstanding = 0

    def reset(self) -> None:
        """Begin an iteration."""
        self._failed, self.outstanding = None, 0

    def check(self) -> None:
        """Raise CollectiveError if an exchange of this iteration failed."""
        if self._failed is not None:
            raise self._failed

    def whole(self, rows: torch.Tensor, micro: MicroBatch, largest_share: int) -> torch.Tensor:
        """Return the rows of the step's whole global batch, in its order. Shape: (step_samples, *row).

        `rows` has one row for each sample of this worker's share. `largest_share`: the samples of a step of one worker.
        """
        group, shares = self._shares(micro, largest_share, "job.gather_batch")
        if rows.ndim == 0 or (not micro.padding and rows.shape[0] != micro.size):
            raise UsageError(
                f"job.gather_batch got a tensor of shape {tuple(rows.shape)} in an iteration with {micro.size} samples "
                "of this worker; its first dimension must be these samples"
            )
        if rows.dtype not in _EXCHANGED:
            raise UsageError(f"job.gather_batch cannot exchange {rows.dtype}; convert it, to float32 for example")
        self.used = True
        if group is None:
            return rows
        return self._exchanged(rows, _Exchange(group, [stop - start for start, stop in shares], self._attempt))

    def one_of_each(self, row: torch.Tensor, micro: MicroBatch, largest_share: int) -> torch.Tensor | None:
        """Return one row of each worker, of shape (workers, values); None with one worker.

        The last value is the row's weight, which is zero for a worker without a sample in this step.
        """
        group, shares = self._shares(micro, largest_share, "SyncBatchNorm")
        self.used = True
        if group is None:
            return None
        if micro.padding:
            row = torch.cat([row[:, :-1], torch.zeros_like(row[:, -1:])], dim=1)
        return self._exchanged(row, _Exchange(group, [1] * len(shares), self._attempt))

    def _exchanged(self, rows: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        if not (rows.requires_grad and torch.is_grad_enabled()):
            return exchange.gather(rows)
        self.outstanding += 1
        found: torch.Tensor = _Rows.apply(rows, exchange, self)
        return found

    def _shares(self, micro: MicroBatch, largest_share: int, what: str) -> tuple[Group | None, list[tuple[int, int]]]:
        """Return the group, if it has several workers, and the samples of each. UsageError if a share is cut."""
        if self._mode.name != "fast":
            raise UsageError(f"{what} needs reduction='fast' without shard=, and this training is {self._mode.name}")
        group = self._member.group
        rank, size = (0, 1) if group is None else (group.rank, group.size)
        shares, limit = split(micro.step_samples, size), self._limit.now if self._limit is not None else None
        if (micro.start, micro.stop) != shares[rank] or (limit is not None and limit < largest_share):
            raise UsageError(
                f"{what} needs a worker's whole share of a step in one iteration, at every size: leave "
                f"max_batch_per_gpu out, or raise it to {largest_share}"
            )
        return (group if size > 1 else None), shares

    def _attempt(self, exchange: Callable[[], None]) -> None:
        """Run an exchange, and keep its failure for `check`. After a failure none is tried."""
        if self._failed is None:
            try:
                self._member.check()
                exchange()
            except CollectiveError as error:
                self._failed = error

    def returned(self) -> None:
        """Note that the gradients of one gathering are exchanged: after the last, buckets may be summed."""
        self.outstanding = max(0, self.outstanding - 1)  # with retain_graph=True there are more

    @property
    def late_scale(self) -> float:
        """By what this worker's gradients are multiplied only after its backward pass."""
        return self._mode.reducer.current.scale


class _Exchange:
    """One gathering. `sizes`: the rows of each rank."""

    def __init__(self, group: Group, sizes: list[int], attempt: Callable[[Callable[[], None]], None]) -> None:
        self._group, self._sizes, self._attempt = group, sizes, attempt

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks; zeros where it fails. Shape: (sum(sizes), *row)."""
        padded = self._padded(rows)
        padded[: self._mine] = rows[: self._mine]
        parts = padded.new_zeros((self._group.size, *padded.shape))
        self._attempt(lambda: self._group.all_gather_into(parts.view(-1), padded.view(-1)))
        return torch.cat([part[:size] for part, size in zip(parts, self._sizes, strict=True)]).to(rows.dtype)

    def sum_own(self, gradient: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the sum over all ranks of the gradients of this rank's rows, in their shape; zeros where it fails."""
        padded = self._padded(gradient)
        parts = padded.new_zeros((self._group.size, *padded.shape))
        for part, piece in zip(parts, torch.split(gradient, self._sizes), strict=True):
            part[: len(piece)] = piece
        self._attempt(lambda: self._group.reduce_scatter_into(padded.view(-1), parts.view(-1)))
        found = padded.new_zeros(shape)
        found[: self._mine] = padded[: self._mine]
        return found

    @property
    def _mine(self) -> int:
        return self._sizes[self._group.rank]

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Return zeros for the rows of the largest share."""
        dtype = torch.float32 if rows.dtype in _NARROW else rows.dtype
        return rows.new_zeros((max(self._sizes), *rows.shape[1:]), dtype=dtype)


class _Rows(torch.autograd.Function):
    """Gathers in the forward pass; the backward pass sums each row's gradients where the row came from."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: _Exchange, gather: RowGather) -> torch.Tensor:
        ctx.exchange, ctx.gather = exchange, gather
        ctx.shape, ctx.dtype = rows.shape, rows.dtype
        return exchange.gather(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        scale = ctx.gather.late_scale  # of this worker's losses, but not of the others'
        found = ctx.exchange.sum_own(gradient * scale if scale != 1.0 else gradient, ctx.shape).to(ctx.dtype)
        ctx.gather.returned()
        return (found / scale if scale not in (0.0, 1.0) else found), None, None
