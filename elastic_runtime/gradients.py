"""Gradients: gathered into flat buckets as the backward pass produces them, summed over the workers while it goes on.

Why not DistributedDataParallel: its bucket layout depends on the order of the first backward pass (a joiner would have
to rehearse it), it divides by the size it was built with, and it wraps the model.

Between the micro-batches of a step the sums live in the buckets and `parameter.grad` is None, so that whatever a loop
does with gradients in between (clipping, logging) does nothing. After the reduction `grad` is a view into the bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from elastic_runtime.errors import CollectiveError
from elastic_runtime.layout import Layout, Slot

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_runtime.batches import MicroBatch
    from elastic_runtime.groups import Group, Pending


class GradientReducer(Protocol):
    """Sums the gradients of a step over a group, together with a tail of numbers."""

    @property
    def tail(self) -> torch.Tensor:
        """The caller's numbers, to be filled in before `reduce` and read after it. Shape: (tail_size,)."""

    @property
    def passive(self) -> bool:
        """Whether nothing is done to this step's gradients: `factor` is 1 then."""

    def begin(self, group: Group | None, micro: MicroBatch, *, first: bool) -> None:
        """The next backward pass is this micro-batch's, and the `first` of its step."""

    def end(self) -> None:
        """The backward pass of the micro-batch is over."""

    def reduce(self) -> None:
        """After the last micro-batch of a step: sum up over all workers, the tail with the gradients.

        Raises CollectiveError where a peer was lost; the gradients are then gone, the buffers replaced.
        """

    def hand_out(self, factor: float) -> None:
        """After `reduce`: every `grad` is `factor` times the sum over all workers, or None if nobody has one."""

    @property
    def in_flight(self) -> bool:
        """Whether something of this step was sent already, so that it cannot be computed again alone."""

    def abandon(self) -> None:
        """Forget the step's gradients; what is in flight keeps the old buffers."""


class FastReducer:
    """By all-reduce: equal to one worker's sum within rounding."""

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], tail_size: int) -> None:
        self._layout = Layout(parameters, tail_size)
        self._group: Group | None = None
        self._works: list[Pending] = []
        self._launched = 0
        self._last = True
        self._ghost = self._passive = False
        self._layout.hook(self._on_gradient)

    @property
    def tail(self) -> torch.Tensor:
        """See GradientReducer."""
        return self._layout.tail

    def begin(self, group: Group | None, micro: MicroBatch, *, first: bool) -> None:
        """See GradientReducer. A ghost's gradients count as zero."""
        self._group = group if group is not None and group.size > 1 else None
        self._last, self._ghost = micro.last, micro.ghost
        self._passive = self._group is None and first and micro.last and not micro.ghost
        for slot in self._layout.slots:
            slot.fired = False
            slot.touched = slot.touched and not first
        if micro.last:
            self._launched = 0
            for bucket in self._layout.buckets:
                bucket.waiting = len(bucket.slots)

    def end(self) -> None:
        """See GradientReducer."""

    def reduce(self) -> None:
        """See GradientReducer."""
        if self._passive:
            return
        used = self._layout.used.fill_(1)
        untouched = [slot for slot in self._layout.slots if not slot.touched]
        for slot in untouched:
            slot.view.zero_()
        if untouched:
            used.copy_(torch.tensor([slot.touched for slot in self._layout.slots]))
        if self._group is not None:
            self._reduce_over(self._group)

    def hand_out(self, factor: float) -> None:
        """See GradientReducer."""
        if not self._passive:
            self._layout.hand_out(factor)

    @property
    def in_flight(self) -> bool:
        """See GradientReducer."""
        return bool(self._works)

    @property
    def passive(self) -> bool:
        """See GradientReducer. Alone, with one micro-batch a step."""
        return self._passive

    def abandon(self) -> None:
        """See GradientReducer."""
        self._works = []
        self._layout.forget()

    def _on_gradient(self, slot: Slot, gradient: torch.Tensor) -> None:
        if self._passive:
            return
        slot.fired = True
        self._gather(slot, gradient)
        slot.parameter.grad = None
        if self._last:
            bucket = self._layout.buckets[slot.bucket]
            bucket.waiting -= 1
            if bucket.waiting == 0 and self._group is not None:
                self._launch_ready(self._group)

    def _gather(self, slot: Slot, gradient: torch.Tensor) -> None:
        if self._ghost:
            if not slot.touched:
                slot.view.zero_()
        elif slot.touched:
            slot.view.add_(gradient)
        elif gradient.data_ptr() != slot.view.data_ptr():
            slot.view.copy_(gradient)
        slot.touched = True

    def _launch_ready(self, group: Group) -> None:
        """All but the last bucket: that one carries the tail, which is known when the backward pass is over."""
        buckets = self._layout.buckets
        while self._launched < len(buckets) - 1 and buckets[self._launched].waiting == 0:
            self._works.append(group.all_reduce(buckets[self._launched].flat))
            self._launched += 1

    def _reduce_over(self, group: Group) -> None:
        try:
            for bucket in self._layout.buckets[self._launched :]:
                self._works.append(group.all_reduce(bucket.flat))
            group.wait(self._works)
        except CollectiveError:
            self.abandon()
            raise
        self._works = []
