"""Optimizers that a script forgot to give to `prepare`.

Such a one would act on each worker by itself: its state reaches no joiner and no checkpoint, and where a hook calls it
within the backward pass its gradients are those of this worker's samples only. It is noticed when it steps.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from elastic_runtime.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.utils.hooks import RemovableHandle

    from elastic_runtime.loop.session import Session


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

    _remove_hooks_of_dropped_sessions()
    _hooks.append((watched, [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]))


_hooks: list[tuple[weakref.ref[Session], list[RemovableHandle]]] = []
"""torch's own registry of these hooks is global. They are not removed as a session is collected: that may happen in the
middle of a step, while torch iterates over the registry.
"""


def _remove_hooks_of_dropped_sessions() -> None:
    for entry in [entry for entry in _hooks if entry[0]() is None]:
        for handle in entry[1]:
            handle.remove()
        _hooks.remove(entry)


def _check(optimizer: torch.optim.Optimizer, session: Session | None) -> None:
    if session is None or not session.training:
        return
    if session.owns(parameter for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError(
            f"{type(optimizer).__name__} steps parameters of the job's model, but was not given to prepare: each "
            "worker would train them by itself; give it all of them, as a list: prepare(model, [first, second], loader)"
        )
