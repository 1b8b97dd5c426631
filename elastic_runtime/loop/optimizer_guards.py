"""Optimizers, schedulers and scalers that act only where a global step is complete.

The objects stay the user's own; what holds a reference to them (schedulers to optimizers, GradScaler to
`optimizer.step`) goes through the guard as well.
"""

from __future__ import annotations

import copyreg
import functools
import sys
import types
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import LoopError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import FrameType

GUARDED = "_elastic_guarded"
"""An attribute of the classes that `guard_class` makes."""


def guard_method(
    target: object,
    method: str,
    may_act: Callable[[], bool],
    around: Callable[[], AbstractContextManager[None]] | None,
    evaluate: Callable[[Callable[..., Any], Callable[[], Any]], Any],
) -> None:
    """`target.method(...)` does nothing, and returns None, unless `may_act()`; it acts within `around()`, if given.

    For optimizers: the replacement is a bound method of the instance like the one that LRScheduler puts there, which
    looks at `optimizer.step.__func__` and at its own mark on it. With a closure, `evaluate(act, closure)` decides.
    """
    original = getattr(target, method)

    def act(*args: object, **kwargs: object) -> Any:
        if around is None:
            return original(*args, **kwargs)
        with around():
            return original(*args, **kwargs)

    @functools.wraps(original)
    def guarded(_self: object, *args: object, **kwargs: object) -> Any:
        closures = [given for given in (*args, *kwargs.values()) if callable(given)]
        if closures:
            return evaluate(act, closures[0])
        _check_scaler(sys._getframe(1))  # noqa: SLF001  (the caller identifies itself better than any argument)
        return act(*args, **kwargs) if may_act() else None

    setattr(target, method, types.MethodType(guarded, target))


def _check_scaler(caller: FrameType) -> None:
    """UsageError where a GradScaler calls `optimizer.step` that was not given to `prepare`."""
    if caller.f_code.co_name != "_maybe_opt_step":
        return
    scaler = caller.f_locals.get("self")
    if isinstance(scaler, torch.amp.GradScaler) and not hasattr(type(scaler), GUARDED):
        raise UsageError(
            f"{type(scaler).__name__} was not given to prepare: its scale would reach no joiner and no checkpoint; use "
            "prepare(model, optimizer, loader, scaler=scaler) and job.backward(loss), which scales the loss by itself"
        )


def guard_class(target: object, methods: tuple[str, ...], may_act: Callable[[], bool]) -> None:
    """Guard an object whose `state_dict()` is its `__dict__`, such as a scheduler, by a subclass of its class."""
    kind = type(target)
    namespace: dict[str, Any] = {
        name: _guarded(getattr(kind, name), may_act) for name in methods if hasattr(kind, name)
    }
    namespace |= {
        GUARDED: True,
        "__module__": kind.__module__,
        "__reduce_ex__": functools.partialmethod(_reduce_plain, kind),
    }
    target.__class__ = type(kind.__name__, (kind,), namespace)


def _reduce_plain(self: object, kind: Any, protocol: Any) -> Any:
    """Rebuild a guarded object for pickle and copy: with its own class, without the guard."""
    make, arguments, *rest = kind.__reduce_ex__(self, protocol)
    guarded = type(self)
    if make is copyreg.__newobj__ and arguments == (guarded,):  # type: ignore[attr-defined]
        make, arguments = copyreg._reconstructor, (kind, object, None)  # type: ignore[attr-defined]  # noqa: SLF001
    return (make, tuple(kind if argument is guarded else argument for argument in arguments), *rest)


def _guarded(original: Callable[..., Any], may_act: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(self: object, *args: object, **kwargs: object) -> Any:
        if not may_act():
            return None
        try:
            return original(self, *args, **kwargs)
        except AssertionError as error:
            if "No inf checks" in str(error):
                raise LoopError(_NO_GRADIENTS) from error
            raise

    return guarded


_NO_GRADIENTS = (
    "GradScaler was asked to step an optimizer none of whose parameters has a gradient in this step; call "
    "scaler.step(optimizer) and scaler.update() only where the loss of the step depends on its parameters"
)
