"""Optimizers, schedulers and scalers that act only where a global step is complete.

The objects stay the user's own; what holds a reference to them (schedulers to optimizers, GradScaler to
`optimizer.step`) goes through the guard as well.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

from elastic_runtime.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


def guard_method(
    target: object, method: str, may_act: Callable[[], bool], around: Callable[[], AbstractContextManager[None]] | None
) -> None:
    """`target.method(...)` does nothing, and returns None, unless `may_act()`; it acts within `around()`, if given.

    For optimizers: the replacement is a bound method of the instance like the one that LRScheduler puts there, which
    looks at `optimizer.step.__func__` and at its own mark on it. UsageError for a closure: the gradients that it would
    compute anew are summed once a step.
    """
    original = getattr(target, method)

    @functools.wraps(original)
    def guarded(_self: object, *args: object, **kwargs: object) -> Any:
        if any(callable(given) for given in (*args, *kwargs.values())):
            raise UsageError(
                f"{method} was given a closure, which computes gradients several times in a step; call job.backward, "
                f"and then {method}() without one"
            )
        if not may_act():
            return None
        if around is None:
            return original(*args, **kwargs)
        with around():
            return original(*args, **kwargs)

    setattr(target, method, types.MethodType(guarded, target))


def guard_class(target: object, methods: tuple[str, ...], may_act: Callable[[], bool]) -> None:
    """The same for objects whose `state_dict()` is their `__dict__`, as a scheduler's is: by a class of their own."""
    kind = type(target)
    namespace = {name: _guarded(getattr(kind, name), may_act) for name in methods if hasattr(kind, name)}
    target.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **namespace})


def _guarded(original: Callable[..., Any], may_act: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(self: object, *args: object, **kwargs: object) -> Any:
        return original(self, *args, **kwargs) if may_act() else None

    return guarded
