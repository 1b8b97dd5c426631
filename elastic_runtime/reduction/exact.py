"""Gradients that are the same to the bit whatever the number of workers.

A step is computed as a fixed number of shards, each with a shape and random streams of its own, and their gradients are
added up along one fixed tree (`trees`). A worker adds up what it can of the tree while its backward passes run; what is
left, one or a few partial sums, is cut into one part for each rank, exchanged (all-to-all), finished there, and
gathered. Where shards and workers are powers of two that moves what a ring all-reduce moves; else up to twice as much.

The scheme is that of EasyScale (Li et al., "EasyScale: Elastic Training with Consistent Accuracy", SC 2023), with one
tree in place of its fixed order of one worker after another. A ring all-reduce was rejected: its order of additions
depends on the number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from elastic_runtime.plan.batches import split
from elastic_runtime.reduction.bucket_layout import Bucket, Slot, numbers, view_of
from elastic_runtime.reduction.gradients import BucketReducer
from elastic_runtime.reduction.sum_tree import Node, Push, joint_plan, range_plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elastic_runtime.membership.process_group import Group, Pending
    from elastic_runtime.reduction.backward_pass import Pass

_NOTHING = -0.0
"""x + -0.0 is x to the bit for every x; x + 0.0 is not where x is -0.0."""


class ExactReducer(BucketReducer):
    """Sums along the tree. Its memory: one copy of the gradients more for each level that a worker adds up itself."""

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], metadata_size: int) -> None:
        self._nodes: tuple[tuple[Node, ...], ...] = ()  # of each rank
        self._merges: tuple[tuple[int, int], ...] = ()
        self._pushes: Iterator[Push] = iter(())
        self._push = Push(0, ())
        super().__init__(parameters, metadata_size)

    def _lay_out(self) -> None:
        super()._lay_out()
        self._exchanges = [Exchange(bucket) for bucket in self._layout.buckets]
        self._forget_rows()

    def begin_pass(self, group: Group | None, begun: Pass) -> None:
        """Begin a shard's pass: its place in the tree is that of the next push."""
        super().begin_pass(group, begun)
        if begun.first:
            self._plan_step(begun.micro.step_shards)
        self._push = next(self._pushes)

    def _plan_step(self, leaves: int) -> None:
        rank, size = (self._group.rank, self._group.size) if self._group is not None else (0, 1)
        plans = [range_plan(*shards, leaves) for shards in split(leaves, size)]
        self._pushes = iter(plans[rank].pushes)
        self._nodes = tuple(plan.nodes for plan in plans)
        self._merges = joint_plan(self._nodes, leaves)

    def end_pass(self) -> None:
        """Add nothing for each parameter without a gradient, at its place in the tree."""
        for bucket in self._layout.buckets:
            if self.current.micro.padding or not bucket.complete:
                self._gather(bucket)

    def reduce(self) -> None:
        """Exchange this worker's partial sums, and finish the tree."""
        self._fill_metadata()
        if self._group is not None:
            self._sum_over(self._group)

    def distribute(self, factor: float) -> None:
        """Set each `grad` to `factor` times its view of the summed bucket."""
        self._layout.distribute(factor)

    def abandon(self) -> None:
        """Drop the step's gradients and partial sums."""
        self._layout.forget()
        self._forget_rows()
        for exchange in self._exchanges:
            exchange.forget()

    def _forget_rows(self) -> None:
        # [row][bucket], padding included; row 0 is the layout's own
        self._rows: list[list[torch.Tensor]] = [[bucket.whole for bucket in self._layout.buckets]]
        self._views: dict[tuple[int, Slot], torch.Tensor] = {(0, slot): slot.view for slot in self._layout.slots}

    def _row(self, row: int) -> list[torch.Tensor]:
        """Return the buckets of a partial sum; memory for it is allocated when it is first needed."""
        while row >= len(self._rows):
            self._rows.append([bucket.memory() for bucket in self._layout.buckets])
            for each in self._layout.slots:
                self._views[len(self._rows) - 1, each] = view_of(self._rows[-1][each.bucket], each)
        return self._rows[row]

    def _on_gradient(self, slot: Slot, gradient: torch.Tensor) -> None:
        slot.fired = self._layout.iteration
        slot.parameter.grad = None
        if not self.current.micro.padding:
            slot.touched = self._layout.step
            self._collect(slot, gradient)

    def _gather(self, bucket: Bucket) -> None:
        """Copy a shard's gradients to their node of the tree, and merge the nodes that they complete."""
        index, merges = bucket.slots[0].bucket, self._push.merges
        straight = bool(merges) and merges[0][1] == self._push.row  # into its sibling
        row = merges[0][0] if straight else self._push.row
        self._row(row)
        views = [self._views[row, slot] for slot in bucket.arrived]
        gradients, bucket.gradients = bucket.gradients, []
        if self.norms is not None:
            self.norms.add(gradients, 1.0)
        if straight and views:
            torch._foreach_add_(views, gradients)
        elif views:
            torch._foreach_copy_(views, gradients)
        if not straight and len(views) < len(bucket.slots):
            missing = set(bucket.slots) - set(bucket.arrived)
            torch._foreach_copy_(*self._nothing(row, missing))
        for into, source in merges[straight:]:
            self._gradients_of(into, index).add_(self._gradients_of(source, index))

    def _nothing(self, row: int, slots: Iterable[Slot]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        views = [self._views[row, slot] for slot in slots]
        return views, [torch.full((), _NOTHING, dtype=view.dtype, device=view.device).expand_as(view) for view in views]

    def _gradients_of(self, row: int, index: int) -> torch.Tensor:
        """Return a bucket of a partial sum, without metadata and padding. Shape: (elements,)."""
        last = self._layout.buckets[index].slots[-1]
        return self._row(row)[index][: last.start + numbers(last.parameter)]

    def _fill_metadata(self) -> None:
        """Write the numbers into this rank's first partial sum; the others carry nothing."""
        self._layout.used.copy_(self._layout.present(self._layout.touched()))
        for row in self._rows[1:]:
            self._layout.metadata_of(row[-1]).fill_(_NOTHING)

    # Over the ranks

    def _launch(self, group: Group, index: int) -> None:
        self._exchanges[index].scatter(group, [row[index] for row in self._rows], self._nodes)

    def _finish(self, group: Group) -> None:
        for exchange in self._exchanges:
            exchange.gather(group, self._merges)
        for exchange in self._exchanges:
            exchange.finish(group)


class Exchange:
    """One bucket's way over the ranks: scattered by all-to-all, summed up in parts, gathered."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._received = torch.empty(0)
        self._rows: list[torch.Tensor] = []
        self._works: list[Pending] = []
        self._gathering: list[Pending] = []

    def scatter(self, group: Group, partial: list[torch.Tensor], nodes: tuple[tuple[Node, ...], ...]) -> None:
        """Start to send each rank its part of this rank's partial sums; they are read until `gather`."""
        part = -(-self._bucket.size // group.size)
        count = sum(len(of_rank) for of_rank in nodes)
        if self._received.numel() != part * count:
            self._received = torch.empty(part * count, dtype=self._bucket.dtype, device=self._bucket.device)
        received = iter(self._received.view(count, part))
        places: dict[tuple[int, int], torch.Tensor] = {}
        self._works = []
        start = 0
        for turn in range(max(len(of_rank) for of_rank in nodes)):
            senders = [turn < len(of_rank) for of_rank in nodes]
            stop = start + part * sum(senders)
            sends = senders[group.rank]
            source = partial[turn][: part * group.size] if sends else self._received[:0]
            self._works.append(
                group.all_to_all(
                    self._received[start:stop],
                    source,
                    [part * sent for sent in senders],
                    [part * sends] * group.size,
                )
            )
            for rank in (rank for rank, sent in enumerate(senders) if sent):
                places[rank, turn] = next(received)
            start = stop
        self._rows = [places[rank, turn] for rank, of_rank in enumerate(nodes) for turn in range(len(of_rank))]

    def gather(self, group: Group, merges: tuple[tuple[int, int], ...]) -> None:
        """Sum up this rank's part, and start to gather all parts into the bucket."""
        group.wait(self._works)
        *earlier, (into, source) = merges  # two ranks have two sums at least
        for target, added in earlier:
            self._rows[target].add_(self._rows[added])
        part = self._rows[0].numel()
        mine = self._bucket.whole[part * group.rank : part * (group.rank + 1)]
        torch.add(self._rows[into], self._rows[source], out=mine)
        self._gathering = group.gather_parts(self._bucket.whole[: part * group.size])

    def finish(self, group: Group) -> None:
        """Wait until all parts are there."""
        group.wait(self._gathering)
        self._gathering = []

    def forget(self) -> None:
        """Drop the buffers; exchanges in flight keep their memory."""
        self._received, self._rows, self._works, self._gathering = torch.empty(0), [], [], []
