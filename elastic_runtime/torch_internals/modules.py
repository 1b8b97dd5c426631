"""Private parts of torch and Python that are used where no public way is fast or exact.

`Module._parameters` and `_buffers` are read in each step: attributes cost ten times as much. `GradScaler._scale` is the
tensor; `get_scale()` waits for the GPU. Checked with torch 2.14 and 2.15; tests/elastic_runtime/test_torch_internals.py
fails where one of them changes.
"""

from __future__ import annotations

import _random
import ctypes
import random
import sys
from copyreg import _reconstructor as reconstruct  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any, Final

from torch.amp import GradScaler
from torch.nn.modules.batchnorm import _BatchNorm as BatchStatistics
from torch.nn.modules.batchnorm import _NormBase as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE
from torch.nn.modules.module import Module
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader


__all__ = ["EXTRA_STATE", "BatchNorm", "BatchStatistics", "Dropout", "LoaderIterator", "reconstruct"]  # of torch's own

OPTIMIZER_ATTRIBUTES: Final = frozenset(
    {"_opt_called", "_step_count", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"}
)
"""Numbers that torch itself keeps in attributes of an optimizer."""


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return the registry of the module's own parameters: what is set there is set on the module."""
    return module._parameters  # noqa: SLF001


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the registry of the module's own buffers: what is set there is set on the module."""
    return module._buffers  # noqa: SLF001


def is_persistent(module: torch.nn.Module, name: str) -> bool:
    """Return whether the module's buffer of this name is in its state_dict."""
    return name not in module._non_persistent_buffers_set  # noqa: SLF001


def has_extra_state(module: torch.nn.Module) -> bool:
    """Return whether the module's class has a `get_extra_state` of its own."""
    return type(module).get_extra_state is not Module.get_extra_state


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether `module.compile()` was called."""
    return module._compiled_call_impl is not None  # noqa: SLF001


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """Return the scale without waiting for its device; None before the first loss."""
    return scaler._scale  # noqa: SLF001


def index_sampler(iterator: Any) -> object:
    """Return the object from which a DataLoader's iterator takes its indices."""
    return iterator._index_sampler  # noqa: SLF001


def drop_loader_processes(loader: DataLoader[Any]) -> None:
    """End the loader's persistent processes: its next iteration starts new ones."""
    loader._iterator = None  # noqa: SLF001


def stepping_scaler() -> GradScaler | None:
    """Return the GradScaler that calls `optimizer.step`, which calls this; None if another function does.

    The caller identifies itself better than any argument.
    """
    caller = sys._getframe(2)  # noqa: SLF001
    if caller.f_code.co_name != "_maybe_opt_step":
        return None
    found = caller.f_locals.get("self")
    return found if isinstance(found, GradScaler) else None


def batch_norm(layer: torch.nn.SyncBatchNorm, values: torch.Tensor) -> torch.Tensor:
    """Return what the layer computes from this process's values alone."""
    found: torch.Tensor = BatchStatistics.forward(layer, values)
    return found


def writes_to(tensor: torch.Tensor) -> int:
    """Return the number of times that the tensor was written to in place: there is no public counter."""
    return tensor._version  # noqa: SLF001


def uncompiled(model: Any) -> Any:
    """Return the model that `torch.compile(model)` was made of; the model itself if it is none."""
    return getattr(model, "_orig_mod", model)


def was_given_to_a_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a scheduler was made for the optimizer: it marks `optimizer.step`."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def inner_schedulers(scheduler: object) -> list[Any]:
    """Return the schedulers that SequentialLR and its like are made of."""
    return list(getattr(scheduler, "_schedulers", ()))


_MT19937_BYTES: Final = 625 * 4
"""NumPy's struct of a Mersenne Twister: 624 words of key, and the position among them."""


def python_words() -> bytes:
    """Return the memory of Python's global generator behind the object's head; empty if it is not CPython's own."""
    generator = getattr(random.getstate, "__self__", None)
    if type(generator) is not random.Random or sys.implementation.name != "cpython":
        return b""
    head = object.__basicsize__
    return ctypes.string_at(id(generator) + head, _random.Random.__basicsize__ - head)


def numpy_words(numpy: Any) -> bytes:
    """Return the memory of NumPy's global generator; empty if it is not the usual one."""
    get = getattr(numpy.random, "get_bit_generator", None)
    generator = get() if get else None
    if generator is None or type(generator).__name__ != "MT19937":
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
