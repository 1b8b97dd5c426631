"""Optimizers, schedulers and scalers that act only where a global step is complete.

The objects stay the user's own; what holds a reference to them (schedulers to optimizers, GradScaler to
`optimizer.step`) goes through the guard as well.

An optimizer that a script forgot to give to `prepare` would act on each worker by itself: its state reaches no joiner
and no checkpoint, and where a hook calls it within the backward pass its gradients are those of this worker's samples
only. It is noticed when it steps.
"""

from __future__ import annotations

import copyreg
import functools
import types
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from elastic_runtime.errors import LoopError, UsageError
from elastic_runtime.torch_internals.modules import reconstruct, stepping_scaler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch.utils.hooks import RemovableHandle

    from elastic_runtime.loop.session import Session

GUARDED = "_elastic_guarded"
"""An attribute of the classes that `guard_class` makes."""


def guard_method(
    target: object,
    method: str,
    may_act: Callable[[], bool],
    around: Callable[[], AbstractContextManager[None]] | None,
    evaluate: Callable[[Callable[..., Any], Callable[[], Any]], Any],
    draws: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Make `target.method(...)` do nothing and return None unless `may_act()`; it acts within `around()`, if given.

    For optimizers: the replacement is a bound method of the instance like the one that LRScheduler puts there, which
    looks at `optimizer.step.__func__` and at its own mark on it. With a closure, `evaluate(act, closure)` decides;
    without, it acts within `draws()`, in which all workers draw the same random numbers.
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
        _check_scaler(stepping_scaler())
        if not may_act():
            return None
        with draws():
            return act(*args, **kwargs)

    setattr(target, method, types.MethodType(guarded, target))


def _check_scaler(scaler: torch.amp.GradScaler | None) -> None:
    """Raise UsageError if a GradScaler calls `optimizer.step` that was not given to `prepare`."""
    if scaler is not None and not hasattr(type(scaler), GUARDED):
        raise UsageError(
            f"{type(scaler).__name__} was not given to prepare: its scale would reach no joiner and no checkpoint; use "
            "prepare(model, optimizer, loader, scaler=scaler) and job.backward(loss), which scales the loss by itself"
        )


def guard_class(
    target: object, methods: tuple[str, ...], may_act: Callable[[], int], contexts: tuple[str, ...] = ()
) -> None:
    """Guard an object whose `state_dict()` is its `__dict__`, such as a scheduler, by a subclass of its class.

    `may_act()`: how often the method acts in one call without arguments; with some it acts once, unless that is 0.
    `contexts`: methods that return a context, in which a `step()` of others stands.
    """
    kind = type(target)
    namespace: dict[str, Any] = {
        name: _guarded(getattr(kind, name), may_act) for name in methods if hasattr(kind, name)
    }
    namespace |= {name: _guarded_context(getattr(kind, name), may_act) for name in contexts if hasattr(kind, name)}
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
        make, arguments = reconstruct, (kind, object, None)
    return (make, tuple(kind if argument is guarded else argument for argument in arguments), *rest)


def _guarded(original: Callable[..., Any], may_act: Callable[[], int]) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(self: object, *args: object, **kwargs: object) -> Any:
        times = int(may_act())
        if not times:
            return None
        try:
            for _ in range(times - 1 if not args and not kwargs else 0):
                original(self)
            return original(self, *args, **kwargs)
        except AssertionError as error:
            if "No inf checks" in str(error):
                raise LoopError(_NO_GRADIENTS) from error
            raise

    return guarded


def _guarded_context(original: Callable[..., Any], may_act: Callable[[], int]) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(self: object, *args: object, **kwargs: object) -> Any:
        return original(self, *args, **kwargs) if may_act() else nullcontext()

    return guarded


def normalizes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its steps do not grow with the gradients, as those of Adam and its relatives."""
    kinds = (torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adafactor)
    return isinstance(optimizer, kinds) or "betas" in optimizer.defaults


_NO_GRADIENTS = (
    "GradScaler was asked to step an optimizer none of whose parameters has a gradient in this step; call "
    "scaler.step(optimizer) and scaler.update() only where the loss of the step depends on its parameters"
)


def watch_unprepared_optimizers(session: Session, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise UsageError if an optimizer that is none of these steps the session's parameters in the loop.

    Unless one of these calls it: an optimizer may be made of others.
    """
    prepared, watched = weakref.WeakSet(optimizers), weakref.ref(session)
    inside: list[int] = []

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer in prepared:
            inside.append(id(optimizer))
        elif not inside:
            _check(optimizer, watched())

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer in prepared:
            inside.clear()

    watch_no_more(session)
    _hooks.append((watched, [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]))


_hooks: list[tuple[weakref.ref[Session], list[RemovableHandle]]] = []
"""torch's own registry of these hooks is global. They are not removed as a session is collected: that may happen in the
middle of a step, while torch iterates over the registry.
"""


def watch_no_more(session: Session) -> None:
    """Remove the hooks of this session, and of those that were dropped."""
    for entry in [entry for entry in _hooks if entry[0]() in {None, session}]:
        for handle in entry[1]:
            handle.remove()
        _hooks.remove(entry)


def _check(optimizer: torch.optim.Optimizer, session: Session | None) -> None:
    if session is None or not session.training:
        return
    if session.owns(parameter for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError(
            f"{type(optimizer).__name__} steps parameters of the job's model, but was not given to prepare: each "
            "worker would train them by itself; give it all of them, as a list: prepare(model, [first, second], "
            "loader); or, after a loop that was left early, end the training by job.close()"
        )
