"""Parameters that a script creates after `prepare`: no worker would sum their gradients, and a joiner would lack them.

What a model and its optimizers consist of is fixed from `prepare` on: a layer that is added or replaced is refused
where it is registered, and a parameter that is none of the model's where it is given to an optimizer. Rejected: to
follow them. A worker that joins builds the model of the script's beginning, before it knows which layers the others
have.

A parameter that gets another name is refused for the same reason: no checkpoint of it could be read.

Registration is noticed by torch's global hooks, which cost nothing while nothing is registered.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from elastic_runtime.errors import UsageError
from elastic_runtime.torch_internals.modules import uncompiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils.hooks import RemovableHandle

_REMEDY = (
    "its gradients would not be summed, and a worker that joins would not have it: create all modules before prepare, "
    "freeze those that are trained later by requires_grad_(False), and thaw them where the training comes to them"
)


class NewParameters:
    """Refuses them, from the loop's beginning on until `end`."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._modules = weakref.WeakSet(model.modules())
        self._model = model
        self._own = {id(parameter): parameter for parameter in model.parameters()}
        self._handles: list[RemovableHandle] = []
        for optimizer in optimizers:
            self._guard(optimizer)

    def start(self) -> None:
        """Refuse from now on. UsageError for what was created since `prepare`."""
        for name, parameter in self._model.named_parameters():
            self._check(name, parameter)
        if self._handles:
            return
        watched = weakref.ref(self)

        def of_module(module: torch.nn.Module, name: str, added: torch.nn.Module | None) -> None:
            watch = watched()
            if watch is not None and added is not None and module in watch._modules:  # noqa: SLF001
                known = uncompiled(added) in watch._modules  # noqa: SLF001
                for inner, parameter in added.named_parameters(name):
                    watch._check(inner, parameter, renamed=not known)  # noqa: SLF001
                watch._modules.update(added.modules())  # noqa: SLF001

        def of_parameter(module: torch.nn.Module, name: str, added: torch.nn.Parameter | None) -> None:
            watch = watched()
            if watch is not None and added is not None and module in watch._modules:  # noqa: SLF001
                watch._check(name, added, renamed=name not in module._parameters)  # noqa: SLF001

        self._handles = [
            register_module_module_registration_hook(of_module),
            register_module_parameter_registration_hook(of_parameter),
        ]
        for handle in self._handles:
            weakref.finalize(self, handle.remove)

    def end(self) -> None:
        """Let the script change the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _check(self, name: str, parameter: torch.Tensor, *, renamed: bool = False) -> None:
        if renamed and id(parameter) in self._own:
            raise UsageError(
                f"a parameter of the model got the name {name!r} after prepare, as pruning and parametrizations rename "
                "it; a worker that joins or resumes builds the model of the script's beginning and could not load its "
                "state: do that before prepare (torch.nn.utils.prune.identity(module, name) makes a mask that prunes "
                "nothing), and change the mask or the buffers in the loop"
            )
        if id(parameter) not in self._own:
            raise UsageError(
                f"parameter {name!r} of shape {tuple(parameter.shape)} was created after prepare, in the model; "
                f"{_REMEDY}"
            )

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse parameters that are none of the model's in `add_param_group`."""
        original, watched = optimizer.add_param_group, weakref.ref(self)

        @functools.wraps(original)
        def add_param_group(_self: object, group: dict[str, Any]) -> None:
            watch = watched()
            if watch is not None and watch._handles:  # noqa: SLF001
                given = group["params"]
                group["params"] = [given] if isinstance(given, torch.Tensor) else list(given)
                for parameter in group["params"]:
                    watch._check_given(optimizer, parameter)  # noqa: SLF001
            original(group)

        optimizer.add_param_group = types.MethodType(add_param_group, optimizer)  # type: ignore[method-assign]

    def _check_given(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        if id(parameter) not in self._own:
            raise UsageError(
                f"{type(optimizer).__name__}.add_param_group got a parameter of shape {tuple(parameter.shape)} that "
                f"was created after prepare, or is none of the model's; {_REMEDY}"
            )
