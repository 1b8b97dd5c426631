"""Gradients: gathered into flat buckets as the backward pass produces them, summed over the workers while it goes on.

Why not DistributedDataParallel: its bucket layout depends on the order of the first backward pass (a joiner would have
to rehearse it), it divides by the size it was built with, and it wraps the model. Here the layout is a function of the
parameters alone: buckets of about 25 MB in reverse order of definition, which is about the order of the backward pass.

Between the micro-batches of a step the sums live in the buckets and `parameter.grad` is None, so that whatever a loop
does with gradients in between (clipping, logging) does nothing. After the reduction `grad` is a view into the bucket.

The last bucket ends with a tail of small numbers which would otherwise cost a collective of their own: the samples
that were counted, the votes for the next generation, which parameters were used, and rank 0's buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from elastic_runtime.errors import CollectiveError, LoopError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.utils.hooks import RemovableHandle

    from elastic_runtime.groups import Group, Pending

BUCKET_BYTES = 25 << 20


@dataclass
class _Slot:
    """One parameter's place: bucket and element range, and whether this step has put anything there."""

    name: str
    parameter: torch.nn.Parameter
    bucket: int
    start: int
    view: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    touched: bool = False
    fired: bool = False


@dataclass
class _Bucket:
    """One flat buffer; `waiting` counts the parameters whose last gradient of the step is still to come."""

    dtype: torch.dtype
    device: torch.device
    size: int = 0
    slots: list[_Slot] = field(default_factory=list)
    flat: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    waiting: int = 0


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what gradients of `dtype` are summed: half precision is too coarse to add up in."""
    return torch.float32 if dtype in {torch.float16, torch.bfloat16} else dtype


class Reducer:
    """Sums the gradients of one or more models over a group, together with a tail of `tail_size` numbers."""

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], tail_size: int) -> None:
        slots = [_Slot(name, p, 0, 0) for name, p in parameters if p.requires_grad]
        if not slots:
            raise UsageError("the model has no parameter that requires a gradient; there is nothing to train")
        self._tail_size = tail_size + len(slots)
        self._buckets = _lay_out(slots, self._tail_size)
        self._slots = {slot.parameter: slot for slot in slots}
        self._order = slots
        self._group: Group | None = None
        self._works: list[Pending] = []
        self._launched = 0
        self._first = self._last = True
        self._ghost = self._passive = False
        self._allocate()
        self._hooks = [_register(slot.parameter, self._on_gradient) for slot in slots]

    @property
    def tail(self) -> torch.Tensor:
        """The caller's numbers, to be filled in before `reduce` and read after it. Shape: (tail_size,)."""
        return self._whole_tail[: self._tail_size - len(self._order)]

    def begin(self, group: Group | None, *, first: bool, last: bool, ghost: bool) -> None:
        """The next backward pass is the first or last of its step; a ghost's gradients count as zero."""
        self._group = group if group is not None and group.size > 1 else None
        self._first, self._last, self._ghost = first, last, ghost
        self._passive = self._group is None and first and last and not ghost
        for slot in self._order:
            slot.fired = False
            slot.touched = slot.touched and not first
        if last:
            self._launched = 0
            for bucket in self._buckets:
                bucket.waiting = len(bucket.slots)

    def reduce(self) -> None:
        """After the last backward pass of a step: every `grad` is the sum over all workers, or None if nobody has one.

        Raises CollectiveError where a peer was lost; the gradients are then gone, the buffers replaced.
        """
        if self._passive:
            return
        untouched = [slot for slot in self._order if not slot.touched]
        used = self._whole_tail[-len(self._order) :].fill_(1)
        for slot in untouched:
            slot.view.zero_()
        if untouched:
            used.copy_(torch.tensor([slot.touched for slot in self._order]))
        if self._group is not None:
            self._reduce_over(self._group)
        self._hand_out()

    def abandon(self) -> None:
        """Forget the step's gradients; what is in flight keeps the old buffers."""
        self._works = []
        self._allocate()
        for slot in self._order:
            slot.touched = False
            slot.parameter.grad = None

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _allocate(self) -> None:
        for bucket in self._buckets:
            bucket.flat = torch.zeros(bucket.size, dtype=bucket.dtype, device=bucket.device)
            for slot in bucket.slots:
                slot.view = _view(bucket.flat, slot)
        self._whole_tail = self._buckets[-1].flat[-self._tail_size :]

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._passive or parameter.grad is None:
            return
        slot = self._slots[parameter]  # type: ignore[index]
        if slot.fired:
            raise LoopError(
                f"parameter {slot.name!r} got two gradients in one iteration; call job.backward once per iteration, "
                "and use torch.utils.checkpoint with use_reentrant=False"
            )
        slot.fired = True
        self._gather(slot, parameter.grad)
        parameter.grad = None
        if self._last:
            bucket = self._buckets[slot.bucket]
            bucket.waiting -= 1
            if bucket.waiting == 0 and self._group is not None:
                self._launch_ready(self._group)

    def _gather(self, slot: _Slot, gradient: torch.Tensor) -> None:
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
        while self._launched < len(self._buckets) - 1 and self._buckets[self._launched].waiting == 0:
            self._works.append(group.all_reduce(self._buckets[self._launched].flat))
            self._launched += 1

    def _reduce_over(self, group: Group) -> None:
        try:
            for bucket in self._buckets[self._launched :]:
                self._works.append(group.all_reduce(bucket.flat))
            group.wait(self._works)
        except CollectiveError:
            self.abandon()
            raise
        self._works = []

    def _hand_out(self) -> None:
        used = self._whole_tail[-len(self._order) :]
        counts: Sequence[float] = [1.0] * len(self._order) if bool(used.min() > 0) else used.tolist()
        for slot, count in zip(self._order, counts, strict=True):
            if count <= 0:
                slot.parameter.grad = None
            elif slot.view.dtype == slot.parameter.dtype:
                slot.parameter.grad = slot.view
            else:
                slot.parameter.grad = slot.view.to(slot.parameter.dtype)


def _register(parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def _lay_out(slots: list[_Slot], tail_size: int) -> list[_Bucket]:
    """Buckets in launching order: reverse order of definition, by dtype and device; the tail ends the last one."""
    open_buckets: dict[tuple[torch.dtype, torch.device], _Bucket] = {}
    buckets: list[_Bucket] = []
    for slot in reversed(slots):
        kind = (sum_dtype(slot.parameter.dtype), slot.parameter.device)
        bucket = open_buckets.get(kind)
        if bucket is None or bucket.size * kind[0].itemsize >= BUCKET_BYTES:
            bucket = open_buckets[kind] = _Bucket(*kind)
            buckets.append(bucket)
        slot.start = bucket.size
        bucket.slots.append(slot)
        bucket.size += slot.parameter.numel()
    for index, bucket in enumerate(buckets):
        for slot in bucket.slots:
            slot.bucket = index
    buckets[-1].size += tail_size
    return buckets


def _view(flat: torch.Tensor, slot: _Slot) -> torch.Tensor:
    """The slot's elements in the parameter's own memory layout, so that optimizers take their fast paths."""
    parameter = slot.parameter
    part = flat[slot.start : slot.start + parameter.numel()]
    if parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last):
        return part.as_strided(parameter.size(), parameter.stride())
    return part.view(parameter.shape)
