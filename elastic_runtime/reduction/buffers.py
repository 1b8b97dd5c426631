"""A model's buffers: they follow rank 0, inside the gradients' own reduction, and go back when a step is repeated.

Every worker normalises with its own batch statistics and would drift away from the others; DistributedDataParallel
broadcasts the buffers of rank 0 before each forward pass. Here rank 0 adds its values to the end of the last bucket
and all other ranks add zeros: the sum is rank 0's, and no collective is added. Values that a float32 does not hold
(whole numbers of 32 and 64 bits, double precision) travel as three floats of 22 bits each, which is exact.

Buffers are looked up by module and name at each use, because a module may assign a new tensor (`self.mean = ...`). They
are written by `data`: autograd refuses a backward pass through a tensor that was written to in place after the forward
pass, and normalisation layers keep their buffers for it without reading them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import UsageError
from elastic_runtime.torch_internals.modules import EXTRA_STATE, BatchNorm, has_extra_state, is_persistent, own_buffers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_NUMEL = 1 << 20
"""Above this many elements (tables, caches) only the buffers of normalisation layers follow: others are constants."""
_BITS = 22
_LOW = (1 << _BITS) - 1
_PARTS = ((2 * _BITS, -1), (_BITS, _LOW), (0, _LOW))
"""(shift, mask) of each part of a 64-bit number; the first has its sign."""
_NARROW = {torch.float16, torch.bfloat16, torch.float32, torch.bool, torch.uint8, torch.int8, torch.int16}
_WIDE = {torch.int32, torch.int64, torch.float64}
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}


@dataclass(frozen=True)
class Buffer:
    """A buffer by where it is registered: `module`'s buffer `name`; `path` is its full name in the model."""

    module: torch.nn.Module
    name: str
    path: str
    persistent: bool

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is registered now."""
        found: torch.Tensor | None = own_buffers(self.module)[self.name]
        if found is None:
            raise UsageError(f"buffer {self.path!r} became None during the training; assign a tensor of zeros instead")
        return found

    def write(self, value: torch.Tensor) -> None:
        """Set the values; a tensor of another shape is replaced."""
        found = self.tensor
        if found.shape == value.shape and found.dtype == value.dtype:
            found.data.copy_(value)
        else:
            own_buffers(self.module)[self.name] = value.clone()


class FollowedBuffers:
    """The buffers of `modules` that follow rank 0, and the values of all of them at a step's beginning."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        modules = list(modules)
        buffers = [buffer for module in modules for buffer in _buffers_of(module)]
        if sum(buffer.tensor.numel() for buffer in buffers) > MAX_NUMEL:
            buffers = [b for b in buffers if isinstance(b.module, BatchNorm)]
        self._buffers = [b for b in buffers if _kind(b.tensor.dtype) in _NARROW | _WIDE]
        self._kept: list[torch.Tensor] = []
        self._saved = [b.tensor.detach().clone() for b in self._buffers]
        self._shapes = [(b.tensor.dtype, b.tensor.shape) for b in self._buffers]
        self._extra = ExtraStates(modules)
        self.size = sum(_width(dtype) * shape.numel() for dtype, shape in self._shapes)

    def transient(self) -> dict[str, torch.Tensor]:
        """Return the values of the buffers that `state_dict()` omits (`persistent=False`), by name."""
        return {b.path: b.tensor.detach() for b in self._buffers if not b.persistent}

    def load_transient(self, values: dict[str, torch.Tensor]) -> None:
        """Set values that `transient` or `values` returned, in this process or another one."""
        for buffer in self._buffers:
            if buffer.path in values:
                buffer.write(values[buffer.path].to(buffer.tensor.device))

    def values(self) -> dict[str, torch.Tensor]:
        """Return copies of the values of all buffers that follow rank 0, by name."""
        return {b.path: b.tensor.detach().clone() for b in self._buffers}

    def save(self) -> None:
        """Save the values at a step's beginning. UsageError if a shape or type has changed since the training began."""
        for index, (buffer, shape, saved) in enumerate(zip(self._buffers, self._shapes, self._saved, strict=True)):
            value = buffer.tensor.detach()
            if (value.dtype, value.shape) != shape:
                raise UsageError(
                    f"buffer {buffer.path!r} was {shape[0]} of shape {tuple(shape[1])} before the training and is "
                    f"{value.dtype} of shape {tuple(value.shape)} now; buffers follow rank 0 in a fixed layout: "
                    "register it with its final shape and type, or, where layers set it in their first forward pass "
                    "(the observers of quantization), compute one batch before prepare"
                )
            if saved.device == value.device:
                saved.copy_(value)
            else:
                self._saved[index] = value.clone()
        self._extra.save()

    def restore(self) -> None:
        """Restore the values of the step's beginning, to repeat the step."""
        self._write(self._saved)
        self._extra.restore()

    def rewound(self, model: dict[str, Any]) -> dict[str, Any]:
        """Return a model's `state_dict` with the values that its buffers had at the step's beginning."""
        saved = {b.tensor.data_ptr(): value for b, value in zip(self._buffers, self._saved, strict=True)}
        return {
            name: saved.get(value.data_ptr(), value) if isinstance(value, torch.Tensor) else value
            for name, value in (model | self._extra.saved).items()
        }

    def keep(self) -> None:
        """Save the values a second time, apart from those of the step's beginning."""
        self._kept = [b.tensor.detach().clone() for b in self._buffers]
        self._extra.keep()

    def restore_kept(self) -> None:
        """Restore the values that `keep` has saved."""
        if self._kept:
            self._write(self._kept)
        self._extra.restore_kept()

    def _write(self, values: list[torch.Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.write(value)

    def fill(self, section: torch.Tensor, *, leader: bool) -> None:
        """Write the values, or zeros unless this is the leader, into `section`. Shape: (size,)."""
        if not self.size:
            return
        if not leader:
            section.fill_(-0.0)  # adding it changes no number
            return
        torch.cat([part for b in self._buffers for part in _parts(b.tensor, section.dtype)], out=section)

    def take(self, section: torch.Tensor) -> None:
        """Set the buffers to the values in `section`. Shape: (size,)."""
        at = 0
        for buffer in self._buffers:
            tensor = buffer.tensor
            count = _width(tensor.dtype) * tensor.numel()
            tensor.data.copy_(_value(section[at : at + count], tensor))
            at += count


class ExtraStates:
    """What modules return by `get_extra_state`, beside their tensors: restored where a step is repeated, as buffers
    are.

    It does not follow rank 0: it is any object, and has to be the same function of the steps on all workers.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        found = [(prefix, part) for module in modules for prefix, part in module.named_modules()]
        self._modules = [
            (f"{prefix}.{EXTRA_STATE}".lstrip("."), part) for prefix, part in found if has_extra_state(part)
        ]
        self.saved: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}

    def _values(self) -> dict[str, Any]:
        return {name: copy.deepcopy(part.get_extra_state()) for name, part in self._modules}

    def _set(self, values: dict[str, Any]) -> None:
        for name, part in self._modules:
            if name in values:
                part.set_extra_state(copy.deepcopy(values[name]))

    def save(self) -> None:
        """Save the values at a step's beginning."""
        if self._modules:
            self.saved = self._values()

    def restore(self) -> None:
        """Restore the values of the step's beginning."""
        self._set(self.saved)

    def keep(self) -> None:
        """Save the values a second time."""
        if self._modules:
            self._kept = self._values()

    def restore_kept(self) -> None:
        """Restore the values that `keep` has saved."""
        self._set(self._kept)


def _buffers_of(model: torch.nn.Module) -> Iterator[Buffer]:
    """Yield each buffer once, though modules may share it."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, tensor in own_buffers(module).items():
            if tensor is None or not tensor.numel() or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield Buffer(module, name, f"{prefix}.{name}".lstrip("."), is_persistent(module, name))


def _kind(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the real numbers that a value of `dtype` is made of."""
    return _COMPLEX.get(dtype, dtype)


def _width(dtype: torch.dtype) -> int:
    """Return how many floats one element is sent as."""
    return (3 if _kind(dtype) in _WIDE else 1) * (2 if dtype in _COMPLEX else 1)


def _parts(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield the value of a buffer as flat tensors of `dtype`."""
    value = tensor.detach()
    value = (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).reshape(-1)
    if value.dtype in _NARROW:
        yield value.to(dtype)
        return
    bits = value.view(torch.int64) if value.dtype == torch.float64 else value.to(torch.int64)
    for shift, mask in _PARTS:
        yield (bits >> shift & mask).to(dtype)


def _value(section: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the value of a buffer like `like` from its parts: the inverse of `_parts`."""
    kind = _kind(like.dtype)
    value = section
    if kind in _WIDE:
        high, middle, low = section.view(3, -1).to(torch.int64)
        value = high << 2 * _BITS | middle << _BITS | low
        value = value.view(torch.float64) if kind == torch.float64 else value
    if like.dtype in _COMPLEX:
        return torch.complex(*value.to(kind).view(*like.shape, 2).unbind(-1))
    return value.view(like.shape)
