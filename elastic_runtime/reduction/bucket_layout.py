"""The location of each parameter's gradient: flat buckets of a fixed layout, a function of the parameters alone.

Buckets of about 25 MB in reverse order of definition, which is about the order of the backward pass. The last one ends
with metadata, small numbers which would otherwise cost a collective of their own: the samples that were counted, the
votes for the next generation, rank 0's buffers, and which parameters were used.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from elastic_runtime.errors import UsageError
from elastic_runtime.state.sparse_parameters import no_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.utils.hooks import RemovableHandle

BUCKET_BYTES = 25 << 20
_KEPT = 2.0**-20
"""The count of a gradient of zeros that was there before the step: over all workers less than that of a new one."""
PADDING = 1024
"""Elements beyond a bucket's end, so that up to this number of ranks may have equal parts of it."""


@dataclass(eq=False)
class Slot:
    """One parameter's place: bucket and element range; in which iteration it got its last gradient, and in which step.

    Numbers rather than flags: nothing has to be reset for each iteration. A `sparse` one has no place in a bucket, but
    `rows`: this worker's sum, then that of all.
    """

    name: str
    parameter: torch.nn.Parameter
    bucket: int
    start: int
    sparse: bool = False
    rows: torch.Tensor | None = None
    view: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    touched: int = 0
    fired: int = 0

    @property
    def sum_dtype(self) -> torch.dtype:
        """The type in which its gradients are summed."""
        return sum_dtype(self.parameter.dtype)

    def zeros(self) -> torch.Tensor:
        """Return a gradient of zeros."""
        return no_rows(self.parameter) if self.sparse else torch.zeros_like(self.parameter)

    def sum(self) -> torch.Tensor:
        """Return the step's gradient."""
        if not self.sparse:
            return self.view.to(self.parameter.dtype)
        return self.zeros() if self.rows is None else self.rows.to(self.parameter.dtype)


@dataclass
class Bucket:
    """One flat buffer. `arrived`: the slots with a gradient in this iteration; `gradients`: these gradients."""

    dtype: torch.dtype
    device: torch.device
    size: int = 0
    slots: list[Slot] = field(default_factory=list)
    whole: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    arrived: list[Slot] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Return whether every parameter's gradient of this iteration is present."""
        return len(self.arrived) == len(self.slots)

    @property
    def flat(self) -> torch.Tensor:
        """Without the padding. Shape: (size,)."""
        return self.whole[: self.size]

    def memory(self) -> torch.Tensor:
        """Return a new buffer of zeros, padding included."""
        return torch.zeros(self.size + PADDING, dtype=self.dtype, device=self.device)


class Layout:
    """The buckets, their slots in order of definition, and `metadata_size` numbers for the caller.

    `used`: how often each slot's parameter got a gradient in this step, or `_KEPT` it. Shape: (slots,). `kept`: the
    slots whose parameters had one already when the step began, as `zero_grad(set_to_none=False)` leaves them: zeros.
    """

    metadata: torch.Tensor
    used: torch.Tensor

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        metadata_size: int,
        sparse: frozenset[torch.nn.Parameter] = frozenset(),
    ) -> None:
        self._parameters = list(parameters)
        self._handles: list[RemovableHandle] = []
        self.on_gradient: Callable[[Slot, torch.Tensor], None] | None = None
        self._trained = self._trainable()
        self.slots = [Slot(name, p, 0, 0, p in sparse) for name, p in self._parameters if p.requires_grad]
        self.sparse = [slot for slot in self.slots if slot.sparse]
        if not self.slots:
            raise UsageError("the model has no parameter that requires a gradient; there is nothing to train")
        self._metadata_size = metadata_size + len(self.slots)
        self.buckets = _lay_out(self.slots, self._metadata_size)
        self.iteration = self.step = 1
        self.kept: list[Slot] = []
        self.allocate()

    def _trainable(self) -> list[bool]:
        return [parameter.requires_grad for _, parameter in self._parameters]

    @property
    def outdated(self) -> bool:
        """Whether parameters were frozen, or are to be trained again, since it was made."""
        return self._trained != self._trainable()

    def allocate(self) -> None:
        """Allocate new memory everywhere: what is in flight keeps the old one."""
        for bucket in self.buckets:
            bucket.whole = bucket.memory()
            for slot in bucket.slots:
                slot.view = view_of(bucket.whole, slot)
        whole_metadata = self.metadata_of(self.buckets[-1].whole)
        self.metadata, self.used = whole_metadata[: -len(self.slots)], whole_metadata[-len(self.slots) :]
        self._same_dtype = all(slot.sum_dtype == slot.parameter.dtype for slot in self.slots) and not self.sparse

    def metadata_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the caller's numbers, then one for each slot, at the end of the last bucket's buffer."""
        size = self.buckets[-1].size
        return whole[size - self._metadata_size : size]

    def hook(self, on_gradient: Callable[[Slot, torch.Tensor], None]) -> None:
        """Call `on_gradient` with each gradient as it is complete.

        The hooks refer to this layout weakly: a cycle from a parameter through its hook and back is not collected.
        """
        self.unhook()
        self.on_gradient, this = on_gradient, weakref.ref(self)
        self._handles = [_register(slot.parameter, partial(_fire, this, at)) for at, slot in enumerate(self.slots)]

    def unhook(self) -> None:
        """Leave the parameters alone."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin_pass(self, *, first: bool) -> None:
        """Begin a backward pass, which may be the `first` of its sum."""
        self.iteration += 1
        self.step += first
        for bucket in self.buckets:
            bucket.arrived, bucket.gradients = [], []

    def keep(self) -> None:
        """Take the gradients away that parameters have before the step's first backward pass; note which had one."""
        self.kept = [slot for slot in self.slots if slot.parameter.grad is not None]
        for slot in self.kept:
            slot.parameter.grad = None

    def fill_kept(self) -> None:
        """Set zeros where a parameter had a gradient before, and got none."""
        for slot in self.kept:
            if slot.parameter.grad is None:
                slot.parameter.grad = slot.zeros()

    def present(self, touched: list[bool]) -> torch.Tensor:
        """Return what counts for each slot's gradient after this step: it got one, or kept one. Shape: (slots,)."""
        kept = set(self.kept)
        return torch.tensor(
            [1.0 if got else _KEPT * (slot in kept) for slot, got in zip(self.slots, touched, strict=True)]
        )

    @property
    def empty(self) -> bool:
        """Whether no worker's backward pass gave a gradient in the step that was summed."""
        return bool(self.used.max() < 1)

    def touched(self) -> list[bool]:
        """Return which slots got a gradient in this step."""
        return [slot.touched == self.step for slot in self.slots]

    def distribute(self, factor: float = 1.0, *, all_used: bool = False) -> None:
        """Set each `grad` to `factor` times its view, or to None if no worker used it (`all_used`: all are used)."""
        if factor != 1.0:
            torch._foreach_mul_([slot.view for slot in self.slots], factor)
            for slot in self.sparse:
                slot.rows = None if slot.rows is None else slot.rows * factor
        if self._same_dtype and (all_used or bool(self.used.min() > 0)):
            for slot in self.slots:
                slot.parameter.grad = slot.view
            return
        for slot, count in zip(self.slots, self.used.tolist(), strict=True):
            slot.parameter.grad = slot.sum() if count > 0 else None

    def forget(self) -> None:
        """Drop all gradients and allocate new memory."""
        self.allocate()
        for slot in self.slots:
            slot.touched, slot.rows = 0, None
            slot.parameter.grad = None


def _fire(held: weakref.ref[Layout], at: int, parameter: torch.Tensor) -> None:
    layout, gradient = held(), parameter.grad
    if layout is not None and layout.on_gradient is not None and gradient is not None:
        layout.on_gradient(layout.slots[at], gradient)


def _register(parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of `dtype` are summed: half is too coarse, complex ones are pairs."""
    if dtype in {torch.float16, torch.bfloat16}:
        return torch.float32
    return dtype.to_real() if dtype.is_complex else dtype


def numbers(parameter: torch.Tensor) -> int:
    """Return the number of real numbers in a parameter."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _lay_out(slots: list[Slot], metadata_size: int) -> list[Bucket]:
    """Return buckets in launching order: reverse order of definition, by dtype and device; metadata ends the last."""
    open_buckets: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    buckets: list[Bucket] = []
    for slot in reversed(slots):
        kind = (slot.sum_dtype, slot.parameter.device)
        if slot.sparse:
            continue
        bucket = open_buckets.get(kind)
        if bucket is None or bucket.size * kind[0].itemsize >= BUCKET_BYTES:
            bucket = open_buckets[kind] = Bucket(*kind)
            buckets.append(bucket)
        bucket.size += bucket.size % 2 if slot.parameter.is_complex() else 0  # pairs begin at even places
        slot.start = bucket.size
        bucket.slots.append(slot)
        bucket.size += numbers(slot.parameter)
    for index, bucket in enumerate(buckets):
        for slot in bucket.slots:
            slot.bucket = index
    if not buckets:
        buckets.append(Bucket(torch.float32, slots[-1].parameter.device))
    buckets[-1].size += metadata_size
    return buckets


def view_of(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return the slot's elements in the parameter's own memory layout, so that optimizers take their fast paths."""
    parameter = slot.parameter
    part = flat[slot.start : slot.start + numbers(parameter)]
    if parameter.is_complex():
        return torch.view_as_complex(part.view(*parameter.shape, 2))
    if parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last):
        return part.as_strided(parameter.size(), parameter.stride())
    return part.view(parameter.shape)
