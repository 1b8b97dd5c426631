"""State of samples that a loop carries from one iteration to the next: a recurrent network's, detached.

It belongs to samples whose successors another worker has after a change of size, so it cannot be right there. It is
noticed alone, in the first iterations: twice in a row a module gets a tensor that it, or another one, gave in the
iteration before, with the batch's size as one of its dimensions. Tensors are compared by their memory, which `detach`
shares; memory that is looked at is kept from being used again.

The hooks are torch's global ones: a module's own would be copied and pickled with it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from elastic_runtime.errors import LoopError
from elastic_runtime.torch_internals.modules import is_compiled
from elastic_runtime.validation.loop_watch import LoopWatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.utils.hooks import RemovableHandle

LOOKS_AT = 6
"""Iterations: of an epoch that is shorter, the next one's are looked at."""


class CarriedState(LoopWatch):
    """Looks at what the modules of `models` get and give, until `LOOKS_AT` iterations are over.

    Only where they have recurrent layers of torch's, and are not compiled: global hooks would break a graph.
    """

    def __init__(self, models: Iterable[torch.nn.Module] = ()) -> None:
        models = list(models)
        modules = {part for model in models for part in model.modules()}
        compiled = any(is_compiled(part) for part in modules)
        recurrent = any(isinstance(part, torch.nn.RNNBase | torch.nn.RNNCellBase) for part in modules)
        self._modules = modules if recurrent and not compiled else set()
        self._left = LOOKS_AT if self._modules else 0
        self._size = self._found = 0
        self._carries = False  # in this iteration
        self._given: dict[int, StorageWeakRef] = {}  # in this iteration
        self._before: dict[int, StorageWeakRef] = {}  # in the one before
        self._handles: list[RemovableHandle] = []

    def before_iteration(self, samples: int) -> None:
        """Another iteration begins, over `samples` samples."""
        if not self._left:
            self.end()
            return
        if not self._handles:
            self._hook()
        self._left -= 1
        self._found = self._found + 1 if self._carries else 0
        self._size, self._before, self._given, self._carries = samples, self._given, {}, False

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._left, self._handles, self._before, self._given = 0, [], {}, {}

    def _hook(self) -> None:
        """The hooks do not keep this object, and so the models, from being given up with their session."""
        watched = weakref.ref(self)

        def before(module: torch.nn.Module, inputs: Any) -> None:
            if not torch.compiler.is_compiling() and (watch := watched()) is not None:
                watch.look_at_inputs(module, inputs)

        def after(module: torch.nn.Module, _inputs: Any, outputs: Any) -> None:
            if not torch.compiler.is_compiling() and (watch := watched()) is not None:
                watch.note_outputs(module, outputs)

        self._handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
        for handle in self._handles:
            weakref.finalize(self, handle.remove)

    def look_at_inputs(self, module: torch.nn.Module, inputs: Any) -> None:
        """A module is called. LoopError where it gets state of the iteration before, for the second time in a row."""
        if module not in self._modules or not self._before or not module.training or self._size < 2:
            return
        for tensor in _tensors(inputs):
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            if reference.cdata not in self._before or self._size not in tensor.shape:
                continue
            self._carries = True
            if self._found:
                self._refuse(module, tensor)

    def _refuse(self, module: torch.nn.Module, tensor: torch.Tensor) -> None:
        self.end()
        raise LoopError(
            f"{type(module).__name__} gets a tensor of shape {tuple(tensor.shape)} that was computed in the iteration "
            "before: the loop carries state from one iteration to the next, and after a change of size a worker has "
            "other samples, and another number of them. Begin each iteration with a fresh state, and read longer "
            "pieces (several windows in one iteration, detached in between, their losses added up), or keep the state "
            "by sample in the dataset"
        )

    def note_outputs(self, module: torch.nn.Module, outputs: Any) -> None:
        """A module gives these."""
        if module not in self._modules:
            return
        for tensor in _tensors(outputs):
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._given[reference.cdata] = reference


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and value.device.type != "meta":
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
