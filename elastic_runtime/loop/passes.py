"""Several backward passes in one iteration, each followed by an optimizer's step: a GAN's critic, then its generator;
and optimizers that compute the gradients as often as they need (`optimizer.step(closure)`, as LBFGS does).

Each pass is summed over the workers separately, but only the last one ends the step: if a worker is lost before that,
all workers return to the step's beginning, including those that have applied a pass. The state is therefore copied
before the first pass is applied. Rejected: each pass as a separate step. A worker that takes over a peer's state
between two of them would have to enter its loop in the middle of an iteration.

Each evaluation of a closure is such a pass. Invariant: all workers evaluate equally often, because everything that the
optimizer decides on is the same to the bit on all of them: the summed gradients, and the loss, which is the global
batch's and comes with the same sum. Workers that differ nevertheless (devices of two kinds) are detected by the
checksums of their passes. If a worker is lost in an evaluation, the state of the step's beginning is restored, and the
optimizer is left by an exception, which passes through its own code only: otherwise it would continue to write to the
parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.errors import LoopError, UsageError
from elastic_runtime.loop.step_states import StepState
from elastic_runtime.state.layouts import Copies
from elastic_runtime.state.packing import pack, unpack
from elastic_runtime.torch_internals import forget_unscaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_runtime.loop.session import Session
    from elastic_runtime.loop.step import GlobalStep
    from elastic_runtime.plan.batches import MicroBatch
    from elastic_runtime.reduction.step_modes import Mode
    from elastic_runtime.state.training_state import TrainingState


_MORE = (
    "job.backward(more=True)",
    "use the fast reduction; or, if all optimizers may act on the same gradients (a GAN whose networks step together), "
    "add the losses up, call job.backward(loss) once, and step them after it",
)
_CLOSURE = ("optimizer.step(closure)", "use the fast reduction, or an optimizer that needs no closure")
_WHY = {
    "exact": "each of its steps is computed in shards, an iteration for each, and optimizers act after the last one",
    "sharded": "its gradients are summed within the backward pass, once in a step",
}


class SummedPasses:
    """The backward passes of the current iteration that are summed, with others to come; `done` is their number."""

    def __init__(self, state: TrainingState) -> None:
        self.done = 0
        self.applied = False  # an optimizer acted on one of them
        self.used = False  # an iteration of this training had several
        self._state = state
        self._copies = Copies(device=None)
        self._before: Any = None
        self._aside: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def check(self, micro: MicroBatch, mode: Mode, *, first: bool, evaluation: bool) -> None:
        """Raise UsageError or LoopError if an iteration cannot have several. `evaluation`: the pass is a closure's."""
        if mode.name != "fast":
            call, instead = _CLOSURE if evaluation else _MORE
            raise UsageError(
                f"{call} needs reduction='fast' without shard=, and this training is {mode.name}: {_WHY[mode.name]}; "
                f"{instead}"
            )
        if not micro.last or not (first or self.done):
            raise LoopError(
                "job.backward(more=True) and optimizer.step(closure) need a step's whole share in one iteration, for "
                "optimizers act between the passes; leave max_batch_per_gpu out, or raise it to global_batch_size"
            )
        self.used = True

    def set_aside(self) -> None:
        """Set the content of `grad` from previous passes aside, so that it is not summed again."""
        if not self.done:
            return
        kept = [(p, p.grad) for _, p in self._state.parameters() if p.grad is not None]
        self._aside = [(parameter, gradient.clone()) for parameter, gradient in kept]
        for parameter, _ in kept:
            parameter.grad = None

    def add_back(self) -> None:
        """Add the gradients of previous passes that the script has not cleared, as torch does."""
        for parameter, gradient in self._aside:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._aside = []

    def add_one(self) -> None:
        """Count a pass that is summed and about to be applied; others follow."""
        if not self.done:
            skeleton, tensors = pack(self._state.capture())
            self._before = unpack(skeleton, self._copies.take(tensors))
        self.done += 1

    def restore(self) -> None:
        """Restore the state of the step's beginning."""
        if self.done:
            self._state.load(self._before)
            for _, part in self._state.parts:
                if isinstance(part, torch.amp.GradScaler):
                    forget_unscaled(part)
            self._copies = Copies(device=None)  # optimizers go on in the memory of what they load
        self.forget()

    def forget(self) -> None:
        """End the iteration."""
        self.done, self.applied, self._before, self._aside = 0, False, None, []


class _StepLost(Exception):  # noqa: N818  (no error: the iteration is going to be repeated)
    """The step is repeated, or others have applied it."""


class ClosureSteps:
    """Runs `optimizer.step(closure)` in place of job.backward and `optimizer.step()`."""

    def __init__(self, step: GlobalStep, session: Session) -> None:
        self._step, self._session = step, session
        self.evaluating = False  # an optimizer computes gradients by a closure

    def step(self, act: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        """Return what the optimizer returns, of the global batch; 0 in an iteration that is repeated.

        LoopError where the iteration has had its backward pass already.
        """
        step, session = self._step, self._session
        if session.released:
            return act(closure)
        if session.catching_up or step.state is StepState.REPEATED:
            return torch.zeros(())
        if step.micro is None or step.state not in {StepState.STARTED, StepState.CONTINUED}:
            raise LoopError(
                "optimizer.step(closure) stands alone in an iteration of the prepared loader's loop, with one "
                "job.backward(loss) in the closure; leave out the job.backward before it, or call optimizer.step(); "
                "for one that needs gradients before its closure, as SAM does, call job.backward(loss, more=True), "
                "optimizer.first_step(), job.backward(loss) and, where job.applied, optimizer.second_step()"
            )
        self.evaluating = True
        try:
            found = act(lambda: self._evaluate(closure))
        except _StepLost:
            return torch.zeros(())
        finally:
            self.evaluating = False
        session.may_step()
        session.end_evaluations()
        return found

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Return the loss of the global batch at the present parameters, and leave its gradients."""
        before = self._step.evaluations
        value = closure()
        if self._step.state is StepState.REPEATED or self._session.catching_up:
            raise _StepLost
        if self._step.evaluations != before + 1:
            raise LoopError(
                "the closure of optimizer.step(closure) calls job.backward(loss), in place of loss.backward(), exactly "
                "once"
            )
        loss = self._step.loss
        return torch.full_like(value.detach(), loss) if isinstance(value, torch.Tensor) else loss
