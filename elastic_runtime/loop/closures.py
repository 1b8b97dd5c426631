"""Optimizers that compute the gradients by themselves, as often as they need: `optimizer.step(closure)`, as LBFGS does.

Each evaluation of the closure is a backward pass of its own, summed over the workers like a GAN's passes. Invariant:
all workers evaluate equally often, because everything that the optimizer decides on is the same to the bit on all of
them: the summed gradients, and the loss, which is the global batch's and comes with the same sum. Workers that differ
in spite of it (devices of two kinds) are detected by the stamps of their passes.

If a worker is lost in an evaluation, the state of the step's beginning is restored, and the optimizer is left by an
exception, which passes through its own code only: otherwise it would continue to write to the parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import LoopError

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_runtime.loop.session import Session
    from elastic_runtime.loop.step import GlobalStep


class _StepLost(Exception):  # noqa: N818  (no error: the iteration is going to be repeated)
    """The step is repeated, or others have applied it."""


class Closures:
    """Runs `optimizer.step(closure)` in place of job.backward and `optimizer.step()`."""

    def __init__(self, step: GlobalStep, session: Session) -> None:
        self._step, self._session = step, session

    def step(self, act: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        """Return what the optimizer returns, of the global batch; 0 in an iteration that is repeated.

        LoopError where the iteration has had its backward pass already.
        """
        step, session = self._step, self._session
        if session.released:
            return act(closure)
        if session.catching_up or step.repeat:
            return torch.zeros(())
        if step.micro is None or step.computed or step.begun:
            raise LoopError(
                "optimizer.step(closure) stands alone in an iteration of the prepared loader's loop, with one "
                "job.backward(loss) in the closure; leave out the job.backward before it, or call optimizer.step()"
            )
        step.evaluating = True
        try:
            found = act(lambda: self._evaluate(closure))
        except _StepLost:
            return torch.zeros(())
        finally:
            step.evaluating = False
        session.may_step()
        session.end_evaluations()
        return found

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """The loss of the global batch at the parameters of now, whose gradients are there then."""
        before = self._step.evaluations
        value = closure()
        if self._step.repeat or self._session.catching_up:
            raise _StepLost
        if self._step.evaluations != before + 1:
            raise LoopError(
                "the closure of optimizer.step(closure) calls job.backward(loss), in place of loss.backward(), exactly "
                "once"
            )
        loss = self._step.loss
        return torch.full_like(value.detach(), loss) if isinstance(value, torch.Tensor) else loss
